"""The optimizers of parallel models: the trainer's own for pipeline 0, and clones of them for the others.

In all groups of processes they begin with the state of group 0's optimizers of pipeline 0.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.models import Models, ParallelModel
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.weights.relocation import OptimizerStates

_TRIED_RATE = 0.1  # smallest learning rate of trial steps
_TRIED_STEPS = 10  # number of trial steps; estimates of several optimizers grow slowly
_HOOKS = "_hooks"  # how the names of an optimizer's dictionaries of hooks end
States = Mapping[int, Mapping[str, Any]]  # state of each parameter, by its position among the optimizer's parameters


class ModelOptimizers:
    """The optimizers of each parallel model.

    Args:
        own: returns the current optimizers of pipeline 0.
        models: models that the optimizers train.
        averaging_group: processes of all groups that hold the same stages; None if there is one group.
    """

    def __init__(
        self, own: Callable[[], Sequence[Optimizer]], models: Models, averaging_group: TensorCollectives | None
    ) -> None:
        self._own = own
        self._models = models
        self._averaging_group = averaging_group
        self._clones: list[list[Optimizer]] = [[]]

    def of(self, number: int) -> list[Optimizer]:
        """Return the optimizers of pipeline n; for pipeline 0 those of the trainer."""
        return self._clones[number] if number else list(self._own())

    def resize(self) -> None:
        """Drop the optimizers of models that were dropped, and make those of new models.

        New optimizers start with the state of group 0's pipeline 0, so all groups must call this method.
        """
        del self._clones[self._models.size :]
        if len(self._clones) == self._models.size:
            return
        own = self._own()
        states = None if self._averaging_group is None else states_of_group_0(own, self._averaging_group)
        for model in self._models.each[len(self._clones) :]:
            places = self._places(model)
            self._clones.append([clone_optimizer(optimizer, places) for optimizer in own])
            for made, state in zip(self._clones[-1], states or (), strict=False):
                load_states(made, state)

    @functools.cached_property
    def names_set_by_steps(self) -> list[Collection[str]]:
        """For each optimizer, the names of group values that its steps set (a step count), which each model keeps."""
        return [set_by_steps(optimizer) for optimizer in self._own()]

    def _places(self, model: ParallelModel) -> dict[int, Tensor]:
        """Return the model's parameter for each of the module's own, by the ``id`` of the latter."""
        return {id(p): model.parameters[name] for name, p in self._models.own.parameters.items()}

    def follow(self) -> None:
        """Give the clones the current hyper-parameters of pipeline 0's optimizers."""
        for model, clones in zip(self._models.each[1:], self._clones[1:], strict=True):
            places = self._places(model)
            for made, optimizer, counted in zip(clones, self._own(), self.names_set_by_steps, strict=True):
                follow(made, optimizer, places, counted)

    def states(self) -> list[OptimizerStates]:
        """Return the states of the clones, which move with their parameters."""
        return [
            OptimizerStates(made, partial(getattr, model, "parameters"))
            for model, made in zip(self._models.each, self._clones, strict=True)
        ]

    def check(self, module: nn.Module) -> None:
        """Check that each model can have its own copy of everything that is trained.

        Raises:
            ConfigurationError: an optimizer trains something that is not a parameter of the module, or has separate
                weights for evaluation.
        """
        known = {id(parameter) for parameter in module.parameters()}
        for optimizer in self._own():
            if holds_two_kinds(optimizer):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has a method eval, which changes the weights of one model for "
                    "evaluation, but with parallel models the reference is evaluated, which no optimizer "
                    "knows; use another optimizer, such as AdamW, or num_pipelines=1"
                )
            for parameter in parameters_in(optimizer):
                if id(parameter) not in known and parameter.requires_grad:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} trains a tensor of shape {tuple(parameter.shape)} that is not "
                        "a parameter of the LightningModule, so parallel models cannot have their own; make it a "
                        "parameter of a submodule, or use num_pipelines=1"
                    )


class StepCounter:
    """A hook that counts the steps of one optimizer, so clones of the optimizer do not get it.

    Attributes:
        count: number of steps.
    """

    count = 0

    def __call__(self, *step: Any) -> None:
        """Count a step."""
        self.count += 1


def clone_optimizer(optimizer: Optimizer, own: Mapping[int, Tensor], with_state: bool = True) -> Optimizer:
    """Return an optimizer like another one, with a copy of its state, for other parameters.

    ``copy.deepcopy`` alone would lose attributes that some classes add, and would copy the objects to which hooks are
    bound.

    Args:
        optimizer: optimizer of model 0. A scheduler may have patched its ``step``; that of the clone is not patched.
        own: parameter that replaces each of its parameters, by the ``id`` of the latter; those not in it are shared.
        with_state: whether the clone gets a copy of the state, or starts without one.
    """
    memo: dict[int, Any] = {id(p): own.get(id(p), p) for p in parameters_in(optimizer)}
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # patched by a scheduler, which counts the original's steps
        if name == "state" and not with_state:
            value = defaultdict(dict)
        if name.endswith(_HOOKS):
            hooks = ((key, hook) for key, hook in value.items() if not isinstance(hook, StepCounter))
            vars(made)[name] = OrderedDict(hooks)
        else:
            vars(made)[name] = copy.deepcopy(value, memo)
    return made


def follow(made: Optimizer, optimizer: Optimizer, own: Mapping[int, Tensor], counted: Collection[str] = ()) -> None:
    """Give a clone the optimizer's current parameter groups: hyper-parameters and new parameters.

    Args:
        made: the clone.
        optimizer: optimizer of model 0.
        own: as for :func:`clone_optimizer`.
        counted: names of group values that steps set, of which the clone keeps its own.
    """
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        if i < len(made.param_groups):
            kept = {name: value for name, value in made.param_groups[i].items() if name in counted}
            group = {name: value for name, value in group.items() if name not in counted} | kept
        groups.append({**group, "params": [own.get(id(p), p) for p in group["params"]]})
    made.param_groups[:] = groups


# -- what an optimizer does, found by a trial -------------------------------------------------------------------------


class _Group(dict[str, Any]):
    """A parameter group that notes the names of values that a step sets in it."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__(group)
        self.noted: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.noted.add(name)
        super().__setitem__(name, value)


def set_by_steps(optimizer: Optimizer) -> Collection[str]:
    """Return the names of values that an optimizer's steps set in its groups; none if it cannot be tried."""
    try:
        groups: Any = after_trial_steps(optimizer).param_groups
    except Exception:  # of any type: it is the user's code
        return ()
    return {name for group in groups for name in group.noted}


def after_trial_steps(optimizer: Optimizer, together: bool = True) -> Optimizer:
    """Return a clone of an optimizer, after a few steps on small random parameters: two in the first group.

    Args:
        optimizer: optimizer to clone; it does not change.
        together: whether all parameters have gradients, or only the first one.
    """
    generator = torch.Generator().manual_seed(0)

    def like(parameter: Tensor) -> Tensor:
        return torch.rand((2,) * parameter.ndim, generator=generator, device="cpu").to(parameter.dtype)

    groups = [(group, group["params"][0]) for group in optimizer.param_groups if group["params"]]
    small = [nn.Parameter(like(parameter)) for _, parameter in groups]
    own = {id(p): to for (group, _), to in zip(groups, small, strict=True) for p in group["params"]}
    made = clone_optimizer(optimizer, own, with_state=False)
    for name in vars(made):
        if name.endswith(_HOOKS):
            vars(made)[name] = OrderedDict()
    made.param_groups[:] = [_Group({**group, "params": [to]}) for (group, _), to in zip(groups, small, strict=True)]
    for group in made.param_groups:
        if isinstance(group.get("lr"), (int, float)):  # a schedule may begin at 0
            dict.update(group, lr=max(group["lr"], _TRIED_RATE))
    first, further = small[0], nn.Parameter(like(small[0]))
    made.param_groups[0]["params"].append(further)
    with torch.random.fork_rng([]):
        for step in range(_TRIED_STEPS):
            for parameter in (first, further, *small[1:]):
                gradient = like(parameter)  # always drawn, so that both runs draw the same numbers
                parameter.grad = gradient if together or parameter is first else None
            torch.default_generator.manual_seed(step)  # for optimizers that add noise
            made.step()
    return made


def holds_two_kinds(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has separate weights for training and evaluation, as schedule-free ones do."""
    return callable(getattr(optimizer, "eval", None))


def parameters_in(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def states_of(optimizer: Optimizer) -> States:
    """Return the states of an optimizer's parameters, each as a new dictionary with the same values."""
    return {i: dict(optimizer.state[p]) for i, p in enumerate(parameters_in(optimizer)) if optimizer.state.get(p)}


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer within a trainer's wrapper, or the optimizer itself if it is not wrapped."""
    return getattr(optimizer, "_optimizer", optimizer)


class _Described(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def states_of_group_0(optimizers: Sequence[Optimizer], averaging_group: TensorCollectives) -> list[States]:
    """Return copies of the states of group 0's optimizers. All processes of the averaging group call it.

    Args:
        optimizers: optimizers of the same parameters in all groups; their states may differ.
        averaging_group: processes of all groups that hold the same stages.
    """
    own = list(map(states_of, optimizers))
    told = averaging_group.members.broadcast(
        tree.map_tensors(lambda t: _Described(tuple(t.shape), t.dtype, t.is_cpu), own)
    )
    if averaging_group.group_number == 0:
        states = tree.map_tensors(lambda t: t.detach().clone(), own)
    else:
        states = [
            {i: _memory(entry, parameters[i].device) for i, entry in entries.items()}
            for parameters, entries in zip(map(parameters_in, optimizers), told, strict=True)
        ]
    averaging_group.copy(tree.tensors(states))
    return states


def _memory(entry: Any, device: torch.device) -> Any:
    """Return a parameter's state with an empty tensor in place of each description; other values as they are."""
    leaves, spec = tree.flatten(entry, lambda node: isinstance(node, _Described))
    made = [
        torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.on_host else device)
        if isinstance(leaf, _Described)
        else leaf
        for leaf in leaves
    ]
    return tree.unflatten(made, spec)


def load_states(optimizer: Optimizer, states: States) -> None:
    """Replace the states of an optimizer's parameters by copies of these."""
    parameters = parameters_in(optimizer)
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
    for i, entry in states.items():
        optimizer.state[parameters[i]] = copy.deepcopy(dict(entry))
