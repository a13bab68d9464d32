"""The state of a run in checkpoints: weights, optimizer states, and what Lightning's format has no key for."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import AbsentValueError, ConfigurationError
from lightning_avgpipe.loading.saving import save
from lightning_avgpipe.strategy import commands
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
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.patching import noop, replaced
from lightning_avgpipe.weights.initialisation import Origin, on_meta
from lightning_avgpipe.weights.on_demand import OnDemandGather
from lightning_avgpipe.weights.relocation import holders

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.schedule_control import ScheduleControl

_KEY = "AvgPipeStrategy"  # key of the additions to Lightning's checkpoint


class CheckpointState:
    """The state of a module, of its optimizers, and of the run that divides the module, if there is one.

    Every process calls each method. After a run, each process may still have only a part of the module.

    Args:
        module: module that has the weights.
        connection: connection of the processes.
        configuration: the strategy's options, which say what checkpoints hold.

    Attributes:
        module: module that has the weights.
        loaded: weights for a module on meta, kept until it is known which process needs which; None if there are none.
        drain: called before weights are read, to drain the pipeline and to bring the extra state of submodules.
    """

    def __init__(self, module: pl.LightningModule, connection: Connection, configuration: Configuration) -> None:
        self.module = module
        self.loaded: Mapping[str, Tensor] | None = None
        self.drain: Callable[[], None] = noop
        self._connection = connection
        self._configuration = configuration
        self._deployment: Deployment | None = None  # while a run divides the module
        self._schedule_control: ScheduleControl | None = None
        self._is_of_run = False  # whether a run divides the module, or has done so

    def begin(self, deployment: Deployment, schedule_control: ScheduleControl | None = None) -> None:
        """Begin a run that divides the module; until :meth:`end` the state is that of this run."""
        self._deployment, self._schedule_control, self._is_of_run = deployment, schedule_control, True

    def end(self) -> None:
        """Drop the deployment, since the run has ended."""
        self._deployment, self.drain = None, noop

    def weights(self) -> dict[str, Any]:
        """Return the weights: on rank 0 those of all stages, or for a distributed checkpoint those of this process.

        With parallel models these are the weights of the reference.
        """
        module, cluster = self.module, self._connection.cluster
        distributed = self._configuration.options.save_distributed_checkpoint
        if self._deployment is not None:
            self.drain()
            return self._deployment.state_dict(whole=not distributed)
        if cluster is None:
            return module.state_dict()
        # a module that began on meta stays divided after training
        owner = scattered_owners(module, cluster) if self._is_scattered(cluster) else {}
        if distributed:
            return own_state_dict(module, cluster, owner)
        return full_state_dict(module, cluster, owner) if owner and not cluster.group_number else module.state_dict()

    def save_pretrained(self, model: Any, folder: str | Path, **options: Any) -> None:
        """Write a transformers or peft model that is part of the module, with the weights that checkpoints hold.

        Raises:
            ConfigurationError: it is called in a hook that only rank 0 runs.
        """
        cluster, holdings = self._connection.cluster, None
        if self._connection.is_leading:
            raise ConfigurationError(
                "save_pretrained: every process lends its part of the model, and this hook runs on rank 0 only; call "
                "it in a hook that every process runs, such as on_train_end or one of a Callback, or after fit"
            )
        with contextlib.ExitStack() as shown:
            if self._deployment is not None:
                self.drain()
                shown.enter_context(self._deployment.parallel.showing_reference())
                holdings = self._deployment.holdings
            names = {id(t): name for name, t in (*self.module.named_parameters(), *self.module.named_buffers())}

            def elsewhere(tensor: Tensor) -> bool:
                return holdings is not None and holdings.is_owned_elsewhere(names.get(id(tensor), ""))

            if cluster is None or cluster.group_number == 0:
                save(model, folder, None if cluster is None else cluster.group, elsewhere, **options)
        self._connection.barrier("save_pretrained")

    def _is_scattered(self, cluster: Cluster) -> bool:
        """Return whether any process of the group lacks a part of the module. Every process of the group calls it."""
        if cluster.group.world_size == 1 or self._connection.failed:
            return False
        return cluster.group.count(on_meta(self.module)) > 0

    def optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state: on rank 0 the whole, or for a distributed checkpoint this process's part."""
        inner, cluster = unwrapped(optimizer), self._connection.cluster
        waiting = None if self._deployment is None else self._deployment.holdings.to_load(inner)
        entries = None if waiting is None else waiting["state"]
        if self._configuration.options.save_distributed_checkpoint:
            if entries is not None and cluster is not None and cluster.rank:  # all have the whole state
                entries = {}
            return named_optimizer_state(inner, self.module, entries)
        if entries is not None:
            return {**inner.state_dict(), "state": entries}
        if cluster is None or cluster.world.world_size == 1:
            return inner.state_dict()
        if self._configuration.options.shard is not None:
            return full_optimizer_state(inner, cluster.world)
        return inner.state_dict() if cluster.group_number else full_optimizer_state(inner, cluster.group)

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning has no key for to a checkpoint with optimizer states: seed, schedule, parallel models.

        Raises:
            AbsentValueError: the checkpoint contains weights on meta, which hooks have put into it.
        """
        cluster = self._connection.cluster
        if cluster is None or cluster.world.rank == 0:  # only rank 0 writes its checkpoint
            _check_numbers(checkpoint)
        if not self._is_of_run or not checkpoint.get("optimizer_states"):
            return
        ours: dict[str, Any] = {"seed": self._configuration.seed}
        if self._schedule_control is not None and (state := self._schedule_control.state_dict()) is not None:
            ours["advance"] = state
        if self._configuration.options.averaging.save_models and self._deployment is not None:
            ensemble = self._deployment.parallel.state_dict(self._deployment.holdings.owner_of)
            ours.update({"ensemble": ensemble} if ensemble else {})
        checkpoint[_KEY] = ours

    def load_weights(self, own: Callable[..., None], checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load weights with Lightning's own method, and keep those of parameters on meta until they have a process.

        Parallel models start again from these weights.
        """
        if self._deployment is not None:
            self._deployment.parallel.dissolve(average=False)
        if not on_meta(self.module):
            own(checkpoint, strict)
            return
        loaded = dict(checkpoint["state_dict"])
        with _keeping_what_arrives(self.module, loaded), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)
            own(checkpoint, strict)
        if self._deployment is None:  # a run that divides the module has taken them when it began
            self.loaded = loaded

    def load_optimizers(self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states, and what :meth:`complete` has added.

        For a module on meta the states stay on the host until it is known which process needs which.
        """
        cluster, deployment = self._connection.cluster, self._deployment
        states = [{"state": {}, **state} for state in checkpoint["optimizer_states"]]
        # counted over the group, since one process may have all weights while others have them on meta
        if deployment is not None and cluster is not None and cluster.group.count(on_meta(self.module)):
            deployment.holdings.load_later([{**state, "state": _by_number(state)} for state in states])
            states = [{**state, "state": {}} for state in states]
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(state)
            if deployment is None and cluster is not None:
                move_state(optimizer, cluster.device)
        if deployment is None:
            return
        deployment.holdings.load_if_placed()  # the module is divided already, as after a search for a learning rate
        ours = checkpoint.get(_KEY, {})
        self._configuration.seed = ours.get("seed", self._configuration.seed)
        if self._schedule_control is not None:
            self._schedule_control.load_state_dict(ours.get("advance"))
        deployment.parallel.saved = ours.get("ensemble", {})

    def take_origin(self, cluster: Cluster, seed: int) -> Origin | None:
        """Return the source of parameters and buffers that no process holds; None if nothing is on meta here.

        Every process calls it.

        Args:
            cluster: the connected processes.
            seed: seed of random weights.
        """
        loaded, self.loaded = self.loaded, None
        here = [name for name, parameter in self.module.named_parameters() if not parameter.is_meta]
        held = holders(cluster.group, here)  # after an earlier run each process has the parameters of its stages
        if not on_meta(self.module):
            return None
        origin = Origin(self.module, seed, cluster.device, loaded, held, commands.wants_plans_only())
        origin.fill_buffers()
        return origin

    def fill(self) -> None:
        """Materialize everything that is on meta, in a run of one process."""
        module, cluster = self.module, self._connection.cluster
        if cluster is not None and on_meta(module):
            gather = OnDemandGather(module, cluster, self.take_origin(cluster, torch.initial_seed()))
            gather.fill([name for name, _ in module.named_parameters()])


def _keeping_what_arrives(module: nn.Module, loaded: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which values that modules load into tensors on meta replace the entries in ``loaded``.

    Hooks and overridden methods of modules may rename or convert entries, so the entries of the file are not enough.
    """
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    load, visited = nn.Module._load_from_state_dict, set[int]()

    def keep(self: nn.Module, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        load(self, state_dict, prefix, *args, **kwargs)
        for leaf, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is not None and tensor.is_meta and id(self) in paths:
                name = joined(paths[id(self)], leaf)
                if id(self) not in visited:  # a shared module is loaded once for each of its names
                    loaded.pop(name, None)
                if prefix + leaf in state_dict:
                    loaded[name] = state_dict[prefix + leaf]
        visited.add(id(self))

    return replaced(nn.Module, "_load_from_state_dict", keep)


def _by_number(state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the states of an optimizer's parameters, keyed by number; distributed checkpoints are keyed by name."""
    names = (name for group in state["param_groups"] for name in group["params"])
    number = {name: i for i, name in enumerate(names)}
    return {number.get(name, name): entry for name, entry in state["state"].items()}


def _check_numbers(checkpoint: Mapping[str, Any]) -> None:
    """Check that no tensor of a checkpoint is on meta; raise an AbsentValueError otherwise."""
    for name, leaf in tree.flatten_with_names(checkpoint)[0]:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            continue
        if name.startswith("['state_dict']"):
            raise AbsentValueError(
                f"the checkpoint has {name} without numbers: either no process has them, or the module's state_dict() "
                "gives a weight of another stage a name other than its own"
            )
        raise AbsentValueError(
            f"a hook or a callback puts {name} into the checkpoint, made from a weight of another stage, whose numbers "
            "this process does not have. Average weights with Lightning's EMAWeightAveraging or WeightAveraging, which "
            "support stages, or keep copies of weights as submodules or buffers of the LightningModule"
        )
