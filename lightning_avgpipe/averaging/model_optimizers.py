"""The optimizers of parallel models: the trainer's own for pipeline 0, and clones of them for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.models import Models
from lightning_avgpipe.averaging.optimizer_clone import clone_optimizer, follow
from lightning_avgpipe.averaging.optimizer_start import load_states, states_of_group_0
from lightning_avgpipe.averaging.replica import Replica
from lightning_avgpipe.comm.collectives import ReplicaGroup
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.weights.relocation import OptimizerStates


class ModelOptimizers:
    """The optimizers of each parallel model.

    Args:
        own: returns the current optimizers of pipeline 0.
        models: models that they train.
        replica_group: processes that hold the parallel models of other groups; None if there are none.
    """

    def __init__(
        self, own: Callable[[], Sequence[Optimizer]], models: Models, replica_group: ReplicaGroup | None
    ) -> None:
        self._own = own
        self._models = models
        self._replica_group = replica_group
        self._clones: list[list[Optimizer]] = [[]]

    def of(self, number: int) -> list[Optimizer]:
        """Return the optimizers of pipeline n; for pipeline 0 those of the trainer."""
        return self._clones[number] if number else list(self._own())

    def resize(self) -> None:
        """Drop the optimizers of models that have gone, and make those of new models.

        They begin with the state of group 0's pipeline 0, for which all groups call this method.
        """
        del self._clones[self._models.size :]
        if len(self._clones) == self._models.size:
            return
        own = self._own()
        states = None if self._replica_group is None else states_of_group_0(own, self._replica_group)
        for replica in self._models.replicas[len(self._clones) :]:
            places = self._places(replica)
            self._clones.append([clone_optimizer(optimizer, places) for optimizer in own])
            for made, state in zip(self._clones[-1], states or (), strict=False):
                load_states(made, state)

    def _places(self, replica: Replica) -> dict[int, Tensor]:
        """Return ``id -> tensor`` of the model's tensor for each of the module's own."""
        return {id(p): replica.parameters[name] for name, p in self._models.placement.own.parameters.items()}

    def follow(self, only: Optimizer | None = None) -> None:
        """Give the clones the current hyper-parameters of pipeline 0's optimizers.

        Args:
            only: the clone to update; None: all of them.
        """
        for replica, clones in zip(self._models.replicas[1:], self._clones[1:], strict=True):
            if only is None or any(made is only for made in clones):
                places = self._places(replica)
                for made, optimizer in zip(clones, self._own(), strict=True):
                    follow(made, optimizer, places)

    def states(self) -> list[OptimizerStates]:
        """Return the states of the clones, which move with their parameters."""
        return [
            OptimizerStates(made, partial(getattr, replica, "parameters"))
            for replica, made in zip(self._models.replicas, self._clones, strict=True)
        ]

    def check(self, module: nn.Module) -> None:
        """Check that each model can have a copy of everything that is trained.

        Raises:
            ConfigurationError: an optimizer trains something that is no parameter of the module.
        """
        known = {id(parameter) for parameter in module.parameters()}
        for optimizer in self._own():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if id(parameter) not in known and parameter.requires_grad:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} trains a tensor of shape {tuple(parameter.shape)} that is no "
                        "parameter of the LightningModule, so parallel models cannot have their own; make it a "
                        "parameter of a submodule, or use num_pipelines=1"
                    )
