"""The store of weights: which tensors an action uses, where a stage has several versions of its weights.

::

    module.layer.weight   <-  the parameter, which the optimizer changes in place      version 3, that of now
                          <-  a leaf of its own                                        version 2, for B6 and B7
                          <-  the parameter, filled with a prediction for one action

Between a forward and its backward autograd holds on to the weights, and what it then finds in a parameter with other
contents is the old ones for some operations and the new ones for others. So if a backward uses what the forward did,
each version is a leaf of its own. It shares the memory of the parameter until the next update, which gives the
parameter other memory; gradients accumulate into the parameter's. If a backward uses other weights than the forward,
the forward is repeated with them, and a parameter's contents are exchanged for one action at a time.

Buffers have no versions: statistics are of all micro-batches, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.schedule.versions import Place, Use, WeightPolicy
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS
from lightning_avgpipe.weights.prediction import check_predictable, predicted, sources
from lightning_avgpipe.weights.slots import Slot, slots_for

__all__ = ["WeightStore"]

Weights = dict[str, nn.Parameter]


@dataclass
class _Stage:
    """A stage's weights.

    Attributes:
        place: of the stage.
        parameters: that it trains, by name.
        version: of the parameters.
        leaves: of versions that are used later.
        before: the weights before the last update; empty unless they are needed.
        now: what the action that runs uses.
    """

    place: Place
    parameters: Weights
    version: int = 0
    leaves: dict[Use, Weights] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    now: Use = Use(0)  # noqa: RUF009


class WeightStore:
    """Versions of the weights of the stages that a process hosts.

    Args:
        module: the whole module.
        policy: which weights actions use.
        num_stages: K.
        num_microbatches: M, of an update.
        optimizers: those that train the module, as of when they are asked for.
    Raises:
        ScheduleError: the policy needs more micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: WeightPolicy,
        num_stages: int,
        num_microbatches: int,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.policy = policy
        self._module = module
        self._optimizers = optimizers
        self._places = [Place(k, num_stages, num_microbatches) for k in range(num_stages)]
        policy.check(self._places[0])
        self._stages: dict[int, _Stage] = {}
        self._slots: dict[int, list[Slot]] = {}

    def divide(self, names: Mapping[int, Sequence[str]]) -> None:
        """Tell which parameters the stages here use, at a drain.

        Args:
            names: stage -> full names.
        Raises:
            ConfigurationError: two stages use the same parameter, or an optimizer whose steps cannot be predicted.
        """
        users: dict[str, int] = {}
        for stage, used in names.items():
            for name in used:
                if users.setdefault(name, stage) != stage:
                    raise ConfigurationError(
                        f"'{name}' is used on the stages {users[name]} and {stage}, which have it in different "
                        f"versions with weight_policy='{self.policy.name}'; keep its uses on one stage with "
                        "split_points, or use weight_policy='flush'"
                    )
        if self.policy.delta == "state" and any(self._predicts(place) for place in self._places):
            for optimizer in self._optimizers():
                check_predictable(optimizer)
        parameters = dict(self._module.named_parameters())
        self._stages = {
            k: _Stage(self._places[k], {name: parameters[name] for name in used if parameters[name].requires_grad})
            for k, used in names.items()
        }
        trained = [p for stage in self._stages.values() for p in stage.parameters.values()]
        self._slots = slots_for(self._module, trained)

    def _predicts(self, place: Place) -> bool:
        return any(use.ahead for i in range(2 * place.num_stages) for use in self.policy.uses(place, i))

    # -- actions -----------------------------------------------------------------------------------------------------

    def act(self, stage: int, micro_batch: int, backward: bool) -> None:
        """A stage's next action is a forward or backward of this micro-batch, counted from the last drain."""
        here = self._stages[stage]
        here.now = self.policy.uses(here.place, micro_batch)[backward]

    @contextlib.contextmanager
    def placed(self, stage: int) -> Iterator[dict[int, str]]:
        """Within this context the module has the weights that the stage's action uses; gives ``id -> name`` of leaves.

        Raises:
            ScheduleError: they are not held, because actions come in another order than that of 1F1B.
        """
        here = self._stages[stage]
        with self._shown(here) if self.policy.backward is None else self._filled(here) as leaves:
            yield {id(leaf): name for name, leaf in leaves.items()}

    @contextlib.contextmanager
    def _shown(self, here: _Stage) -> Iterator[Weights]:
        """A version's leaves are in the places of the parameters, and gradients accumulate into those of these."""
        leaves = here.leaves.get(here.now) or self._make(here, here.now)
        pairs = [(here.parameters[name], leaf) for name, leaf in leaves.items()]
        for parameter, leaf in pairs:
            leaf.grad = parameter.grad
            for slot in self._slots[id(parameter)]:
                slot.set(leaf)
        try:
            yield leaves
        finally:
            for parameter, leaf in pairs:
                parameter.grad, leaf.grad = leaf.grad, None
                for slot in self._slots[id(parameter)]:
                    slot.set(parameter)

    def _make(self, here: _Stage, use: Use) -> Weights:
        """Leaves of the version of now, or predicted from it."""
        contents = self._contents(here, use)
        here.leaves[use] = made = {name: nn.Parameter(tensor) for name, tensor in contents.items()}
        for name, leaf in made.items():
            for hooks in GRADIENT_HOOKS:
                if getattr(here.parameters[name], hooks, None):
                    setattr(leaf, hooks, getattr(here.parameters[name], hooks))
        return made

    def _contents(self, here: _Stage, use: Use) -> dict[str, Tensor]:
        if use.version != here.version:
            raise ScheduleError(
                f"stage {here.place.stage} needs its weights of version {use.version} and has version {here.version}; "
                f"weight_policy='{self.policy.name}' wants the order of 1F1B"
            )
        if not use.ahead:
            return {name: parameter.data for name, parameter in here.parameters.items()}
        trained_by = sources(self._optimizers())
        increment = self.policy.delta == "increment"
        return {
            name: predicted(trained_by[id(p)], p, use.ahead, here.before.get(name, p) if increment else None)
            for name, p in here.parameters.items()
        }

    @contextlib.contextmanager
    def _filled(self, here: _Stage) -> Iterator[Weights]:
        """The parameters have other contents; what they do leaves nothing that is used later."""
        contents = self._contents(here, here.now)
        own = {name: parameter.data for name, parameter in here.parameters.items()}
        for name, parameter in here.parameters.items():
            parameter.data = contents[name]
        try:
            yield {}
        finally:
            for name, parameter in here.parameters.items():
                parameter.data = own[name]

    # -- updates -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, stage: int) -> Iterator[None]:
        """Within this context the stage's optimizers step; its weights are the next version afterwards."""
        here = self._stages[stage]
        needed = self._needed(here) if self.policy.backward is None else set()
        now = Use(here.version)
        if now in needed and now not in here.leaves:
            self._make(here, now)
        here.leaves = {use: leaves for use, leaves in here.leaves.items() if use in needed}
        with torch.no_grad():
            if self.policy.delta == "increment":
                here.before = {name: p.detach().clone() for name, p in here.parameters.items()}
            if now in here.leaves:  # which keep the memory
                for parameter in here.parameters.values():
                    parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        yield
        here.version += 1

    def _needed(self, here: _Stage) -> set[Use]:
        """What is used after the next update of weights up to now."""
        found: set[Use] = set()
        place, micro_batch = here.place, (here.version + 1) * here.place.num_microbatches
        while (uses := self.policy.uses(place, micro_batch))[0].version <= here.version:
            found.update(uses)
            micro_batch += 1
        return {use for use in found if use.version <= here.version}

    def restart(self) -> None:
        """The pipeline has drained: micro-batches and versions count from 0 again."""
        for here in self._stages.values():
            here.version = 0
            here.leaves = {}

    def held(self, stage: int) -> int:
        """Copies of a stage's weights that are in memory between two actions."""
        here = self._stages[stage]
        shared = Use(here.version) in here.leaves
        return 1 + len(here.leaves) - shared + bool(here.before)
