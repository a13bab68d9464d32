"""The strategy's part in processes: which there are, how they find each other, and what Lightning asks of them."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor

from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.strategy import checks, launch
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.strategy.signals import ending_together, saving_what_is_whole
from lightning_avgpipe.strategy.whole import why_whole
from lightning_avgpipe.utils import packages, parent

__all__ = ["ConnectedStrategy"]


class ConnectedStrategy(ParallelStrategy):
    """A strategy whose processes host the stages of pipelines, in groups that each host all of them.

    Args:
        options: what it was asked for.
        lightnings: accelerator, devices and plugins, as every Lightning strategy takes them.

    Attributes:
        num_nodes: set by the Trainer.
        failed: whether this run has ended with an error, here or in another process.
        begun: whether training has begun in this run.
    """

    def __init__(self, options: Options, **lightnings: Any) -> None:
        super().__init__(**lightnings)
        self.num_nodes = 1
        self.failed = self.begun = False
        self._options = options
        self._backend = options.process_group_backend
        self._mesh: Mesh | None = None
        self._undo = contextlib.ExitStack()

    @property
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        """What computes; a trainer sets it first, and makes the strategy one of its own package of Lightning."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        packages.adopt(self, accelerator)
        given = {
            "precision_plugin": self._precision_plugin, "checkpoint_io": self._checkpoint_io,
            "cluster_environment": self.cluster_environment,
        }  # fmt: skip
        packages.check_plugins(type(self).__name__, accelerator, given)
        self._accelerator = accelerator

    # -- which there are ---------------------------------------------------------------------------------------------

    @property
    def processes_per_device(self) -> int:
        """Groups that share the same devices, each with processes of its own."""
        return self._options.processes_per_device

    @property
    def saves_parts(self) -> bool:
        """Whether each process writes its own part of a checkpoint."""
        return self._options.save_distributed_checkpoint

    @property
    def timeout(self) -> timedelta:
        """Longest wait for another process."""
        return self._options.timeout

    @property
    def device_layout(self) -> DeviceLayout:
        """Of all processes on devices."""
        devices = len(self.parallel_devices) if self.parallel_devices is not None else 1
        return DeviceLayout(devices, self.num_nodes, self.processes_per_device)

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return self.device_layout.node_size

    @property
    def num_stages(self) -> int:
        """K."""
        wanted = self._options.num_stages
        return self.device_layout.num_devices if wanted == "auto" else wanted

    @property
    def plain(self) -> bool:
        """Whether there is nothing to pipeline: one process, with nothing to divide, or whose steps run whole.

        Then nothing is captured, split, replaced or refused: all is as with Lightning's strategy for one device.
        """
        one_model = self.device_layout.world_size == self._options.num_pipelines == 1
        return one_model and (self.undivided or (self.whole is not None and not self._options.splits))

    @property
    def undivided(self) -> bool:
        """Whether one stage and one micro-batch are all there is."""
        return self.num_stages == 1 and not self._options.splits and not self._options.recompute

    @property
    def whole(self) -> str | None:
        """Why the module's steps run whole; None if they do not."""
        return None if self._lightning_module is None else why_whole(self._lightning_module)

    @property
    def num_groups(self) -> int:
        """Groups of processes that host all K stages."""
        return len(self.device_layout.groups(self.num_stages))

    @property
    def group_number(self) -> int:
        """Which group this process is in, 0-based."""
        groups = enumerate(self.device_layout.groups(self.num_stages))
        return next(number for number, ranks in groups if self.global_rank in ranks)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.device_layout.device_of(self.local_rank)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In each group one process reads the data of the group."""
        return {"num_replicas": self.num_groups, "rank": self.group_number}

    # -- how they find each other ------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """Processes and channels, from the set-up of the environment on."""
        assert self._mesh is not None
        return self._mesh

    @property
    def process_group_backend(self) -> str | None:
        """Backend of torch.distributed."""
        return self._backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        checks.processes(self.num_stages, self.device_layout.num_devices)
        self._launcher = launch.launcher(self, self._options.start_method)
        if self.plain and self.undivided:
            rank_zero_info(
                "AvgPipeStrategy: with one device, one stage and one micro-batch there is nothing to pipeline; "
                "everything is as with strategy='auto'. More devices, or num_stages=2 on this one, make a pipeline"
            )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def connect(self, model: pl.LightningModule) -> None:
        """Begin a run with a module, which knows its trainer."""
        super().connect(model)
        self.begun = False
        if not self.plain and model._trainer is not None:  # a run; a strategy may also be given a module to save
            self._undo.enter_context(saving_what_is_whole(model.trainer, self))

    def on_train_start(self) -> None:
        """What the run goes on with is loaded."""
        super().on_train_start()
        self.begun = True

    def setup_environment(self) -> None:
        """Connect the processes; called before the module's own set-up hooks."""
        super().setup_environment()
        if not self.plain:
            reset_seed()  # as ddp; in one process too, so that it draws what several draw
        self.set_world_ranks()
        if self.world_size == 1:
            self._mesh = self._mesh or Mesh(self.num_stages, 0, 1, self.root_device, self.timeout)
            self._mesh.open()
            return
        self._backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        checks.backend(self._backend, self.root_device)
        self.failed = False
        with launch.connecting(self.global_rank, self.world_size):
            self._connect(self._backend)

    def _connect(self, backend: str) -> None:
        assert self.cluster_environment is not None
        device, timeout = self.root_device, self.timeout
        if self._mesh is None:
            self._mesh = Mesh(
                self.num_stages,
                self.global_rank,
                self.world_size,
                device,
                timeout,
                device_backend=backend if device.type == "cuda" else None,
                reader=self.device_layout.group_size(self.num_stages) - 1 if self._options.reader == "first" else 0,
                device_layout=self.device_layout,
                deaths=parent.deaths,
            )
        assert self.lightning_module is not None
        self._undo.enter_context(ending_together(self.lightning_module.trainer, self))
        store, keeper = launch.store(self.cluster_environment, self.global_rank, timeout)
        # control messages travel on the host, whatever connects the devices
        all_devices = backend if self.processes_per_device == 1 else "gloo"
        both = f"cpu:gloo,cuda:{all_devices}" if backend == "nccl" else backend
        meet = partial(_init_dist_connection, self.cluster_environment, both, timeout=timeout, store=store)
        self._mesh.open(store, meet, keeper)  # if torch has a group of all processes, Lightning leaves it as it is

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, unless all have agreed to end here."""
        if self._mesh is None or (isinstance(exception, SIGTERMException) and self.mesh.agreed("stop")):
            return
        self.failed = True
        self.mesh.report(exception)
        parent.end_with_this_process()

    # -- what Lightning asks of them ---------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if self._mesh is not None and not self.failed:
            self.mesh.world.barrier(f"the barrier '{name}'" if name else "a barrier")

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Every rank gets the source's object."""
        return obj if self._mesh is None or self.failed else self.mesh.world.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Values live on one rank only: nothing to reduce."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The stages work on the same batch, so there is nothing to gather; as with one device."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decided so."""
        if self._mesh is None or self.failed or self.world_size == 1:
            return decision
        votes = int(self.mesh.world.sum(torch.tensor(int(decision))))
        return votes == self.world_size if all else votes > 0
