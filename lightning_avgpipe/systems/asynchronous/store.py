"""The store of weights: which tensors an action uses if a stage has several versions of its weights.

::

    module.layer.weight   <-  the parameter, which the optimizer changes in place      version 3, the current one
                          <-  a leaf of its own                                        version 2, for B6 and B7
                          <-  the parameter, filled with a prediction for one action

Between a forward and its backward autograd refers to the weights. If a parameter got other contents in between, some
operations would use the old ones in the backward and others the new ones. So if a backward uses the weights of its
forward, each version is a leaf of its own. It shares the memory of the parameter until the next update, which gives the
parameter new memory; its gradient is accumulated into that of the parameter. If a backward uses other weights than the
forward, the forward is repeated with them, and a parameter's contents are exchanged for one action at a time.

Versions exist between two drains; at a drain a stage has its current weights only. Buffers have no versions: statistics
count every micro-batch once.

Weights after further updates are extrapolated from the state of the optimizer::

    predicted = W - lr * ahead * Delta          Delta: of the optimizer's state after its last step; before any, 0

    SGD, RMSprop    momentum buffer
    Adam            m^ / (sqrt(v^) + eps), with eps outside of the root, as in torch
    AdamW           the same: decoupled weight decay is left out

For an optimizer whose state has no direction, or an unknown one, the last increment of the weights can be used:
``Delta = (W_before - W) / lr``. It includes everything, such as weight decay, and costs a copy of the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.systems.asynchronous.versions import Place, Use, VersionPolicy
from lightning_avgpipe.utils.torch_compat import share_gradient_hooks
from lightning_avgpipe.weights.slots import Slot, slots_for, swapped

Weights = dict[str, nn.Parameter]


@dataclass
class _Stage:
    """The weights of a stage.

    Attributes:
        place: place of the stage in the pipeline.
        parameters: parameters that it trains, by name.
        version: version of the parameters.
        leaves: leaves of the versions and predictions that are used later.
        before: weights before the last update; empty unless they are needed.
        now: weights that the current action uses.
        checked: whether it is known that forwards use the versions.
    """

    place: Place
    parameters: Weights
    version: int = 0
    leaves: dict[Use, Weights] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    now: Use = Use(0)  # noqa: RUF009
    checked: bool = False


class WeightStore:
    """Versions of the weights of the stages that a process hosts.

    Args:
        module: whole module.
        policy: says which weights an action uses.
        optimizers: returns the current optimizers of the module.

    Attributes:
        policy: as given.
    """

    constant = False  # the weights change within an iteration

    def __init__(self, module: nn.Module, policy: VersionPolicy, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self.policy = policy
        self._module = module
        self._optimizers = optimizers
        self._names: Mapping[int, Sequence[str]] = {}
        self._here: Collection[int] = ()
        self._stages: dict[int, _Stage] = {}  # empty at a drain
        self._slots: dict[int, list[Slot]] = {}

    def divide(self, names: Mapping[int, Sequence[str]], here: Collection[int]) -> None:
        """Set which parameters the stages use. Call it at a drain.

        Args:
            names: full names of the parameters of each stage, of all stages.
            here: stages that this process hosts.
        """
        self._names, self._here, self._stages = names, here, {}

    def begin(self, num_microbatches: int) -> None:
        """Begin to keep versions, at a drain. Micro-batches and versions are counted from 0.

        Args:
            num_microbatches: M, the number of micro-batches of an update.

        Raises:
            ConfigurationError: two stages train the same parameter, or the steps of an optimizer cannot be predicted.
        """
        parameters = {n: p for n, p in self._module.named_parameters(remove_duplicate=False) if p.requires_grad}
        places = [Place(k, len(self._names), num_microbatches) for k in range(len(self._names))]
        users: dict[int, int] = {}
        for stage, used in self._names.items():
            for name in used:
                if name in parameters and users.setdefault(id(parameters[name]), stage) != stage:
                    raise ConfigurationError(
                        f"'{name}' is trained on the stages {users[id(parameters[name])]} and {stage}, which have it "
                        f"in different versions with weight_policy='{self.policy.name}'; keep its uses on one stage "
                        "with split_points, or use weight_policy='flush'"
                    )
        if self.policy.delta == "state" and any(self._predicts(place) for place in places):
            for optimizer in self._optimizers():
                check_predictable(optimizer)
        self._stages = {
            k: _Stage(places[k], {name: parameters[name] for name in self._names[k] if name in parameters})
            for k in self._here
        }
        trained = [p for stage in self._stages.values() for p in stage.parameters.values()]
        self._slots = slots_for(self._module, trained)

    def _predicts(self, place: Place) -> bool:
        return any(use.ahead for i in range(2 * place.num_stages) for use in self.policy.uses(place, i))

    def end(self) -> None:
        """Drop all versions but the current one: the pipeline has drained."""
        self._stages = {}

    # -- actions -----------------------------------------------------------------------------------------------------

    def act(self, stage: int, micro_batch: int, backward: bool) -> None:
        """Set the next action of a stage: a forward or backward of this micro-batch, counted from the last drain."""
        here = self._stages[stage]
        here.now = self.policy.uses(here.place, micro_batch)[backward]

    def swaps(self, stage: int) -> bool:
        """Return whether other tensors are put into the module for an action of a stage: always."""
        return True

    @contextlib.contextmanager
    def placed(self, stage: int) -> Iterator[dict[int, str]]:
        """Put the weights that the stage's action uses into the module within this context; yield ``id -> name``.

        Raises:
            ScheduleError: these weights are not kept, because actions come in another order than that of 1F1B.
        """
        here = self._stages.get(stage)
        if here is None:
            yield {}
            return
        with self._shown(here) if self.policy.backward is None else self._filled(here) as leaves:
            yield {id(leaf): name for name, leaf in leaves.items()}

    @contextlib.contextmanager
    def _shown(self, here: _Stage) -> Iterator[Weights]:
        """Put a version's leaves in the places of the parameters; gradients accumulate into those of the parameters."""
        leaves = here.leaves[here.now] if here.now in here.leaves else self._make(here, here.now)
        pairs = [(here.parameters[name], leaf) for name, leaf in leaves.items()]
        for parameter, leaf in pairs:
            leaf.grad = parameter.grad
        try:
            with swapped([(slot, leaf) for parameter, leaf in pairs for slot in self._slots[id(parameter)]]):
                yield leaves
        finally:
            for parameter, leaf in pairs:
                parameter.grad, leaf.grad = leaf.grad, None

    def _make(self, here: _Stage, use: Use) -> Weights:
        """Make leaves of the current version, or of a prediction from it."""
        contents = self._contents(here, use)
        here.leaves[use] = made = {name: nn.Parameter(tensor) for name, tensor in contents.items()}
        for name, leaf in made.items():
            share_gradient_hooks(here.parameters[name], leaf)
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
        before = here.before if self.policy.delta == "increment" else None
        contents = {name: p.data for name, p in here.parameters.items()}  # parameters without an optimizer stay
        return contents | {
            name: predicted(trained_by[id(p)], p, use.ahead, None if before is None else before.get(name, p))
            for name, p in here.parameters.items()
            if id(p) in trained_by
        }

    @contextlib.contextmanager
    def _filled(self, here: _Stage) -> Iterator[Weights]:
        """Exchange the contents of the parameters for one action, whose autograd graph is not used afterwards."""
        contents = self._contents(here, here.now)
        own = {name: parameter.data for name, parameter in here.parameters.items()}
        for name, parameter in here.parameters.items():
            parameter.data = contents[name]
        try:
            yield {}
        finally:
            for name, parameter in here.parameters.items():
                parameter.data = own[name]

    def check_used(self, stage: int, leaves: Iterable[Tensor]) -> None:
        """Check, once for each stage, that the gradients of a forward go to the versions of its weights.

        Raises:
            ConfigurationError: they go to a parameter itself.
        """
        here = self._stages[stage]
        if here.checked or self.policy.backward is not None:
            return
        here.checked = True
        names = {id(parameter): name for name, parameter in here.parameters.items()}
        for leaf in leaves:
            if id(leaf) in names:
                raise ConfigurationError(
                    f"training_step uses the parameter '{names[id(leaf)]}' from a place where versions of it cannot be "
                    f"put, as weight_policy='{self.policy.name}' has to: a closure, a functools.partial, a global or "
                    "an object that is not an nn.Module. Get it from the module when it is used (self.layer.weight) or "
                    "use weight_policy='flush'"
                )

    # -- updates -----------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Keep current weights that are used after the next update, in memory of their own. Call it before the step."""
        for here in self._stages.values():
            self._keep(here)

    def _keep(self, here: _Stage) -> None:
        needed = self._needed(here) if self.policy.backward is None else set()
        now = Use(here.version)
        if now in needed and now not in here.leaves:
            self._make(here, now)
        here.leaves = {use: leaves for use, leaves in here.leaves.items() if use in needed}
        with torch.no_grad():
            if self.policy.delta == "increment":
                here.before = {name: p.detach().clone() for name, p in here.parameters.items()}
            if now in here.leaves:  # the leaves keep the memory, so the parameters get a copy
                for parameter in here.parameters.values():
                    parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def stepped(self) -> None:
        """Count a step of the optimizers: the weights are the next version."""
        for here in self._stages.values():
            here.version += 1

    def _needed(self, here: _Stage) -> set[Use]:
        """Return the uses of the current and older weights, and of predictions from them, after the next update."""
        found: set[Use] = set()
        place, micro_batch = here.place, (here.version + 1) * here.place.num_microbatches
        while (uses := self.policy.uses(place, micro_batch))[0].version <= here.version:
            found.update(uses)
            micro_batch += 1
        return {use for use in found if use.version <= here.version}


# -- predictions -------------------------------------------------------------------------------------------------------

_State = Mapping[str, Any]


def _momentum(state: _State, group: _State) -> Tensor | None:
    return state.get("momentum_buffer")


def _adam(state: _State, group: _State) -> Tensor:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    steps = float(state["step"])
    second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    root = (second / (1 - beta2**steps)).sqrt_().add_(group["eps"])
    return state["exp_avg"] / (1 - beta1**steps) / root


# A class of optimizers, its hyper-parameter that must not be zero, and a function from a parameter's state to Delta.
_DIRECTIONS: Sequence[tuple[type[Optimizer], str | None, Callable[[_State, _State], Tensor | None]]] = (
    (Adam, None, _adam),
    (AdamW, None, _adam),  # no subclass of Adam before torch 2.7
    (SGD, "momentum", _momentum),
    (RMSprop, "momentum", _momentum),
)


def check_predictable(optimizer: Optimizer) -> None:
    """Check that the state of an optimizer has the direction of its next steps.

    Raises:
        ConfigurationError: it has none, or the optimizer is not known.
    """
    for kind, wanted, _ in _DIRECTIONS:
        if isinstance(optimizer, kind):
            if wanted is None or all(group[wanted] for group in optimizer.param_groups):
                return
            raise ConfigurationError(
                f"{type(optimizer).__name__} with {wanted}=0 does not remember its direction, so the weights that its "
                f"next steps will make cannot be predicted from its state; give it {wanted}, or predict from the last "
                'increment: PipeOptim(delta="increment")'
            )
    known = ", ".join(kind.__name__ for kind, _, _ in _DIRECTIONS)
    raise ConfigurationError(
        f"the weights that the next steps of {type(optimizer).__name__} will make cannot be predicted from its state, "
        f'only those of {known} and their subclasses; use one of these, or PipeOptim(delta="increment")'
    )


# An optimizer, and one of its parameter groups
Source = tuple[Optimizer, dict[str, Any]]


def sources(optimizers: Iterable[Optimizer]) -> dict[int, Source]:
    """Return the optimizer and the parameter group of each parameter, by the ``id`` of the parameter."""
    return {
        id(p): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }


def direction(source: Source, parameter: Tensor) -> Tensor | None:
    """Return Delta of a parameter, in the parameter's shape; None before the first step, which means 0.

    Args:
        source: optimizer, for which :func:`check_predictable` passes, and group of the parameter.
        parameter: parameter that the optimizer trains.
    """
    optimizer, group = source
    state = optimizer.state.get(parameter)
    if not state:
        return None
    return next(rule for kind, _, rule in _DIRECTIONS if isinstance(optimizer, kind))(state, group)


@torch.no_grad()
def predicted(source: Source, parameter: Tensor, ahead: int, before: Tensor | None = None) -> Tensor:
    """Return the weights after ``ahead`` further updates, in new memory.

    Args:
        source: optimizer and group of the parameter.
        parameter: current weights.
        ahead: number of updates, at least 0.
        before: weights before the last update, to extrapolate by the increment; None: by the optimizer's state.
    """
    if before is not None:  # lr * Delta, whatever the learning rate was
        return torch.lerp(before, parameter, 1.0 + ahead)
    delta = direction(source, parameter)
    if delta is None or not ahead:
        return parameter.clone()
    return parameter - float(source[1]["lr"]) * ahead * delta
