"""The context of a run of the trainer: the objects that exist when it begins, passed to its parts as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning.memory import MemoryLimit, limit_of
from lightning_avgpipe.strategy.checkpoint_state import CheckpointState
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.data import Distributor
from lightning_avgpipe.strategy.options import Configuration
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.lightning import TrainerFn, pl

Own = Callable[..., Any]  # Lightning's own implementation, given to the method of a run that extends it

_DEFAULT_SHARE = 0.9  # share of a device's memory that its stages may use if no limit is given


@dataclass(frozen=True)
class RunContext:
    """The trainer, connection and options of a run, which exist when it begins.

    Attributes:
        trainer: trainer of the run.
        connection: connection of the processes.
        configuration: the strategy's options as they are now.
        state: saves and loads the state of checkpoints.
        distributor: sends batches to the processes of the group.
    """

    trainer: pl.Trainer
    connection: Connection
    configuration: Configuration
    state: CheckpointState
    distributor: Distributor

    @property
    def module(self) -> pl.LightningModule:
        """The module of the run."""
        return self.trainer.lightning_module

    @property
    def fitting(self) -> bool:
        """Whether the run trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def cluster(self) -> Cluster:
        """The connected processes."""
        assert self.connection.cluster is not None
        return self.connection.cluster

    @property
    def sharing_stages(self) -> int:
        """The number of stages that share a device's memory; on the CPU all stages of this node."""
        cluster, layout = self.cluster, self.connection.layout
        assert layout is not None
        on_host = port_of(cluster.device).is_host
        sharing = layout.node_size if on_host else self.configuration.options.averaging.processes_per_device
        return len(cluster.stages) * sharing

    def memory_per_stage(self, limit: MemoryLimit = None) -> float:
        """Return the bytes that each stage may use, by ``limit``, else ``memory_limit``, else 90 % of the device."""
        limit = self.configuration.options.memory_limit if limit is None else limit
        return limit_of(_DEFAULT_SHARE if limit is None else limit, self.cluster.device, self.sharing_stages)
