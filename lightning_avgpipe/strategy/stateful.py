"""The strategy's part in checkpoints: what Lightning asks it to gather, write, read and hand out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.checkpoint_files import (
    LocalCheckpointIO,
    is_sharded,
    load_shards,
    save_shards,
    with_local_files,
)
from lightning_avgpipe.strategy.connected import ConnectedStrategy
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.state import (
    full_optimizer_state,
    full_state_dict,
    move_state,
    named_optimizer_state,
    own_state_dict,
    scattered_owners,
)
from lightning_avgpipe.weights.initialisation import Origin, on_meta
from lightning_avgpipe.weights.on_demand import OnDemandGather

__all__ = ["StatefulStrategy"]

_KEY = "AvgPipeStrategy"  # of what a checkpoint holds beside Lightning's own


class StatefulStrategy(ConnectedStrategy):
    """A strategy whose processes each hold a part of the state.

    Attributes:
        seed: of the random numbers that are drawn in units; a resumed run goes on with the seed of the first one.
        advancing: chooses the schedule of each iteration of training.
    """

    seed: int = 0
    schedule_control: ScheduleControl | None = None
    _deployment: Deployment | None
    _loaded_weights: Mapping[str, Tensor] | None = None

    @property
    def save_distributed_checkpoint(self) -> bool:
        """Whether each process writes its own part of a checkpoint."""
        return self._options.save_distributed_checkpoint

    @property
    def save_replicas(self) -> bool:
        """Whether checkpoints hold parallel models besides their reference."""
        return self._options.save_replicas

    def setup_environment(self) -> None:
        """Connect the processes; called before the module's own set-up hooks."""
        self._choose_files()
        super().setup_environment()

    def choose_seed(self, mesh: Mesh) -> None:
        """Take the seed of rank 0's process; loading may change it."""
        self.seed = mesh.world.broadcast(torch.initial_seed())

    def take_origin(self, module: nn.Module) -> Origin | None:
        """Where the contents of parameters and buffers on meta come from; None if there are none there."""
        loaded, self._loaded_weights = self._loaded_weights, None
        if not on_meta(module):
            return None
        origin = Origin(module, self.seed, self.root_device, loaded)
        origin.fill_buffers()
        return origin

    def fill(self, module: nn.Module, mesh: Mesh) -> None:
        """Give everything on meta its contents, in a process that is alone."""
        if on_meta(module):
            self.choose_seed(mesh)
            OnDemandGather(module, mesh, self.take_origin(module)).bring(
                [name for name, _ in module.named_parameters()]
            )

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are built on the host, or with ``empty_init`` on meta: the device gets its own stages only."""
        if self.plain:
            with super().tensor_init_context(empty_init):
                yield
            return
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def _choose_files(self) -> None:
        """Use our own files where nobody asks for others."""
        self.checkpoint_io: CheckpointIO = with_local_files(self._checkpoint_io)
        if self.save_distributed_checkpoint and type(self.checkpoint_io) is not LocalCheckpointIO:
            raise ConfigurationError(
                "save_distributed_checkpoint=True writes with torch.distributed.checkpoint and would not use "
                f"{type(self.checkpoint_io).__name__}; remove the plugin, or the option"
            )

    # -- gathering ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the weights of all stages; for a distributed checkpoint one's own. Every rank calls it."""
        module = self.lightning_module
        assert module is not None
        whole = not self.save_distributed_checkpoint
        if self._deployment is not None:
            return self._deployment.state_dict(whole)
        mesh = self._mesh
        if mesh is None:
            return module.state_dict()
        # after training, each rank has its part of a module that began on meta
        owner = scattered_owners(module, mesh) if self._is_scattered(module, mesh) else {}
        if not whole:
            return own_state_dict(module, mesh, owner)
        return full_state_dict(module, mesh, owner) if owner and not mesh.group_number else module.state_dict()

    def _is_scattered(self, module: nn.Module, mesh: Mesh) -> bool:
        """Whether some process is without contents of a part of the module; one that has all of it takes part too."""
        if mesh.world_size == 1 or self.failed:
            return False
        return bool(int(mesh.sum(torch.tensor(int(on_meta(module))))))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 an ordinary optimizer state; for a distributed checkpoint one's own. Every rank calls it."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.save_distributed_checkpoint:
            assert self.lightning_module is not None
            return named_optimizer_state(inner, self.lightning_module)
        if self._mesh is None or self.world_size == 1 or self._mesh.group_number:
            return inner.state_dict()
        return full_optimizer_state(inner, self._mesh)

    # -- writing and reading -----------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file, or a folder of shards. Every rank calls it."""
        if checkpoint.get("optimizer_states") and not self.plain:
            checkpoint[_KEY] = {"seed": self.seed}
            if self.schedule_control is not None and (state := self.schedule_control.state_dict()) is not None:
                checkpoint[_KEY]["advance"] = state
            models = self._deployment.ensemble_state() if self.save_replicas and self._deployment is not None else None
            if models is not None:
                checkpoint[_KEY]["ensemble"] = models
        if not self.save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigurationError("storage_options are not supported with save_distributed_checkpoint=True")
        if self._mesh is None:
            raise ConfigurationError(
                "save_distributed_checkpoint=True, but no run has connected the processes yet; fit or validate first"
            )
        if self._mesh.group_number == 0:  # the other groups have the same
            save_shards(checkpoint, filepath, self._mesh)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either kind."""
        if is_sharded(checkpoint_path):
            assert self.lightning_module is not None
            fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
            return load_shards(checkpoint_path, optimizers=fitting, weights_only=weights_only)
        asked = {} if weights_only is None else {"weights_only": weights_only}
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **asked)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights; those for parameters on meta are kept in mind until it is known who needs them."""
        module = self.lightning_module
        assert module is not None
        if self._deployment is not None:
            self._deployment.dissolve(average=False)  # parallel models begin anew, from what is loaded
        if on_meta(module):
            self._loaded_weights = dict(checkpoint["state_dict"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Hand out optimizer states. They stay on the host until it is known which process needs which."""
        assert self.lightning_module is not None
        states = [{"state": {}, **state} for state in checkpoint["optimizer_states"]]
        if on_meta(self.lightning_module):
            assert self._deployment is not None
            self._deployment.load_later(states)
            states = [{**state, "state": {}} for state in states]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            optimizer.load_state_dict(state)
            if self.plain:
                move_state(optimizer, self.root_device)
        ours = checkpoint.get(_KEY, {})
        self.seed = ours.get("seed", self.seed)
        if self.schedule_control is not None:
            self.schedule_control.load_state_dict(ours.get("advance"))
        if self._deployment is not None:
            self._deployment.load_models_later(ours.get("ensemble", {}))
