"""What a run of the trainer finds when it begins."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning.memory_limit import MemoryLimit, limit_of
from lightning_avgpipe.strategy.checkpoint_state import WholeState
from lightning_avgpipe.strategy.configuration import Configuration
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.data import Distributor
from lightning_avgpipe.utils.device import port_of

_MOST = 0.9  # of a device's memory, where nobody says what a stage may use


@dataclass(frozen=True)
class Surroundings:
    """Of a run.

    Attributes:
        trainer: of the run.
        connection: of the processes.
        configuration: of the strategy.
        before: the state before the run.
        distributor: of batches.
    """

    trainer: pl.Trainer
    connection: Connection
    configuration: Configuration
    before: WholeState
    distributor: Distributor

    @property
    def fitting(self) -> bool:
        """Whether it trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def cluster(self) -> Cluster:
        """Of the processes."""
        assert self.connection.cluster is not None
        return self.connection.cluster

    @property
    def sharing_stages(self) -> int:
        """Stages that share a device's memory; on the CPU all stages of this node."""
        cluster, layout = self.cluster, self.connection.layout
        assert layout is not None
        on_host = port_of(cluster.device).is_host
        sharing = layout.node_size if on_host else self.configuration.options.processes_per_device
        return len(cluster.stages) * sharing

    def memory_per_stage(self, limit: MemoryLimit = None) -> float:
        """Bytes that each stage may use: by this limit, or else ``memory_limit``, or else 90 % of the device."""
        limit = self.configuration.options.memory_limit if limit is None else limit
        return limit_of(_MOST if limit is None else limit, self.cluster.device, self.sharing_stages)
