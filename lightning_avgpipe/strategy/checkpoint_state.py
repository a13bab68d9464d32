"""The state of a run in checkpoints: weights, optimizer states, and what Lightning has no key for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizer_clone import unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.options import Configuration
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.holdings import (
    full_optimizer_state,
    full_state_dict,
    move_state,
    named_optimizer_state,
    own_state_dict,
    scattered_owners,
)
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.weights.initialisation import Origin, on_meta
from lightning_avgpipe.weights.on_demand import OnDemandGather

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.schedule_control import ScheduleControl

_KEY = "AvgPipeStrategy"  # key of the additions to Lightning's checkpoint


class State(Protocol):
    """The state of a module, its optimizers, and the run that trains them. Every process calls the methods.

    Attributes:
        loaded: weights for a module on meta, which wait until it is known which process needs them; None if there are
            none.
    """

    loaded: Mapping[str, Tensor] | None

    def weights(self) -> dict[str, Any]:
        """Return, on rank 0, the weights of all stages; for a distributed checkpoint this process's own."""

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return, on rank 0, an ordinary optimizer state; for a distributed checkpoint this process's own."""

    def complete(self, checkpoint: dict[str, Any], models: bool = True) -> None:
        """Add to a checkpoint what Lightning does not know of; parallel models only if ``models``."""

    def load_weights(self, own: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights with Lightning's own method."""

    def load_optimizers(self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states, and what :meth:`complete` has added."""


class WholeState:
    """The state of a module that no run divides; an earlier run may have left a part of the module on each process.

    Args:
        module: module that has the weights.
        connection: connection of the processes.
        distributed: whether each process writes its own part of a checkpoint.
        sharded: whether replicas have divided the optimizer states.

    Attributes:
        module: module that has the weights.
        loaded: weights for a module on meta, which wait until it is known which process needs them.
    """

    def __init__(self, module: pl.LightningModule, connection: Connection, distributed: bool, sharded: bool) -> None:
        self.loaded: Mapping[str, Tensor] | None = None
        self.module = module
        self._connection = connection
        self._distributed = distributed
        self._sharded = sharded

    def weights(self) -> dict[str, Any]:
        """Return, on rank 0, the weights of all stages; for a distributed checkpoint this process's own."""
        module, cluster = self.module, self._connection.cluster
        if cluster is None:
            return module.state_dict()
        # after training each rank has its own stages of a module that began on meta
        owner = scattered_owners(module, cluster) if self._is_scattered(cluster) else {}
        if self._distributed:
            return own_state_dict(module, cluster, owner)
        return full_state_dict(module, cluster, owner) if owner and not cluster.group_number else module.state_dict()

    def _is_scattered(self, cluster: Cluster) -> bool:
        """Return whether a process lacks contents of a part of the module. Every process of the group calls it."""
        if cluster.group.world_size == 1 or self._connection.failed:
            return False
        return bool(int(cluster.group.sum(torch.tensor(int(on_meta(self.module)), device="cpu"))))

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return, on rank 0, an ordinary optimizer state; for a distributed checkpoint this process's own."""
        inner = unwrapped(optimizer)
        cluster = self._connection.cluster
        if self._distributed:
            return named_optimizer_state(inner, self.module)
        if cluster is None or cluster.world.world_size == 1:
            return inner.state_dict()
        if self._sharded:
            return full_optimizer_state(inner, cluster.world)
        return inner.state_dict() if cluster.group_number else full_optimizer_state(inner, cluster.group)

    def complete(self, checkpoint: dict[str, Any], models: bool = True) -> None:
        """Add nothing."""

    def load_weights(self, own: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights; keep those of parameters on meta for later."""
        if on_meta(self.module):
            self.loaded = dict(checkpoint["state_dict"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)
            own(checkpoint, strict)

    def load_optimizers(self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states, and move them to the device."""
        for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict({"state": {}, **state})
            cluster = self._connection.cluster
            if cluster is not None:
                move_state(optimizer, cluster.device)

    def fill(self) -> None:
        """Give everything on meta its contents, in a run of one process."""
        module, cluster = self.module, self._connection.cluster
        if cluster is not None and on_meta(module):
            gather = OnDemandGather(module, cluster, take_origin(module, cluster, torch.initial_seed(), self))
            gather.fill([name for name, _ in module.named_parameters()])


class DividedState:
    """The state of a module that a run divides, during the run and after it.

    Args:
        before: the state before the run.
        configuration: the strategy's options, which say what checkpoints hold.
        deployment: deployment of the module on processes.
        schedule_control: schedule control of the run, whose state checkpoints hold; None if there is none.

    Attributes:
        settle: called before weights are read, to drain the pipeline.
    """

    loaded: Mapping[str, Tensor] | None = None

    def __init__(
        self,
        before: WholeState,
        configuration: Configuration,
        deployment: Deployment,
        schedule_control: ScheduleControl | None,
    ) -> None:
        self._before = before
        self._configuration = configuration
        self.settle: Callable[[], None] = nothing
        self._deployment: Deployment | None = deployment  # until the run ends
        self._schedule_control = schedule_control

    def end(self) -> None:
        """Drop the deployment, since the run has ended."""
        self._deployment = None

    def weights(self) -> dict[str, Any]:
        """Return, on rank 0, the reference's weights of all stages; for a distributed checkpoint this process's own."""
        if self._deployment is None:
            return self._before.weights()
        self.settle()
        return self._deployment.state_dict(whole=not self._configuration.options.save_distributed_checkpoint)

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return, on rank 0, an ordinary optimizer state; for a distributed checkpoint this process's own."""
        return self._before.optimizer(optimizer)

    def complete(self, checkpoint: dict[str, Any], models: bool = True) -> None:
        """Add seed, schedule and parallel models to a checkpoint from which training can resume."""
        if not checkpoint.get("optimizer_states"):
            return
        ours: dict[str, Any] = {"seed": self._configuration.seed}
        if self._schedule_control is not None and (state := self._schedule_control.state_dict()) is not None:
            ours["advance"] = state
        if not models:
            ours["ensemble"] = None  # on resuming, all start from these weights, without a message
        elif self._configuration.options.averaging.save_models and self._deployment is not None:
            ensemble = self._deployment.models.state_dict(self._deployment.holdings.answers)
            ours.update({} if ensemble is None else {"ensemble": ensemble})
        checkpoint[_KEY] = ours

    def load_weights(self, own: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights that this process has; parallel models start again from these weights."""
        if self._deployment is not None:
            self._deployment.models.dissolve(average=False)
        self._before.load_weights(own, checkpoint, strict)

    def load_optimizers(self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states. They stay on the host until it is known which process needs which."""
        assert self._deployment is not None
        states = [{"state": {}, **state} for state in checkpoint["optimizer_states"]]
        if on_meta(self._before.module):
            self._deployment.holdings.load_later(states)
            states = [{**state, "state": {}} for state in states]
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(state)
        ours = checkpoint.get(_KEY, {})
        self._configuration.seed = ours.get("seed", self._configuration.seed)
        if self._schedule_control is not None:
            self._schedule_control.load_state_dict(ours.get("advance"))
        self._deployment.models.saved.load_later(ours.get("ensemble", {}))


def take_origin(module: nn.Module, cluster: Cluster, seed: int, before: State) -> Origin | None:
    """Return the origin of the contents of parameters and buffers on meta; None if there are none.

    Args:
        module: module that is about to be trained.
        cluster: the connected processes.
        seed: seed of random weights.
        before: the state before this run, which may have been given weights to load.
    """
    loaded, before.loaded = before.loaded, None
    if not on_meta(module):
        return None
    origin = Origin(module, seed, cluster.device, loaded)
    origin.fill_buffers()
    return origin
