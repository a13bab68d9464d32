"""Duplicates: a module once more, with tensors of its own, such that running one leaves no trace in the other."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS

_CONTAINERS = (list, dict, set, tuple, deque)
_SHARED = (Dataset, DataLoader, Sampler, pl.LightningDataModule, pl.Callback, pl.Trainer)


def duplicate(
    module: pl.LightningModule, contents: Mapping[str, Tensor], shared: Iterable[Any] = ()
) -> pl.LightningModule:
    """A copy of a module with its hooks, also those that are closures over it.

    ``copy.deepcopy`` alone would share such closures, lose the hooks of parameters, and fail at results of operations.

    Args:
        module: to be copied; its parameters may be without contents here.
        contents: name -> what the copy's parameter or buffer holds; cloned. Others are copied from the module.
        shared: objects that are no part of the model, in whatever attribute they are.
    Raises:
        ConfigurationError: an attribute cannot be copied.
    """
    memo: dict[int, Any] = {id(thing): thing for thing in shared}
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in named.items():
        memo[id(tensor)] = _like(tensor, contents.get(name, tensor))
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    for thing in _within(module):
        if id(thing) in memo:
            continue
        if isinstance(thing, Tensor) and thing.grad_fn is not None:
            memo[id(thing)] = thing.detach().clone().requires_grad_()
        elif isinstance(thing, types.FunctionType) and _closes_over_state(thing):
            memo[id(thing)] = _unbound(thing)
            functions.append((thing, memo[id(thing)]))
        elif isinstance(thing, _SHARED):
            memo[id(thing)] = thing
    made = _copied(module, memo)
    for function, twin in functions:
        for cell, empty in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
            held = _contents(cell)
            empty.cell_contents = copy.deepcopy(held, memo) if _is_state(held) else held
    for tensor in named.values():
        for hooks in GRADIENT_HOOKS:
            if getattr(tensor, hooks, None):
                setattr(memo[id(tensor)], hooks, copy.deepcopy(getattr(tensor, hooks), memo))
    made._metric_attributes = None  # known by their ids
    for metric in made.modules():
        if isinstance(metric, Metric):
            vars(metric).pop("forward", None)
            metric.distributed_available_fn = _alone
    return made


@contextlib.contextmanager
def named_instead(module: nn.Module, twin: nn.Module) -> Iterator[None]:
    """Within this context global variables that the module's code sees, and that hold it or a part, hold the copy's."""
    parts = {id(part): path for path, part in module.named_modules()}
    functions = (f for cls in type(module).__mro__ for f in vars(cls).values() if isinstance(f, types.FunctionType))
    namespaces = {id(f.__globals__): f.__globals__ for f in functions}.values()
    found = [(space, name, held) for space in namespaces for name, held in space.items() if id(held) in parts]
    for space, name, held in found:
        space[name] = twin.get_submodule(parts[id(held)])
    try:
        yield
    finally:
        for space, name, held in found:
            space[name] = held


def _like(tensor: Tensor, contents: Tensor) -> Tensor:
    data = contents.detach().to(copy=True)
    if isinstance(tensor, nn.Parameter):
        made: Tensor = nn.Parameter(data, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))
        return made
    return data.requires_grad_(tensor.requires_grad)


def _copied(module: pl.LightningModule, memo: dict[int, Any]) -> pl.LightningModule:
    before = dict(memo)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        held = [(path, name, v) for path, m in module.named_modules() for name, v in vars(m).items()]
        for path, name, value in held:
            if name in vars(nn.Module()) or name == "_trainer":
                continue
            try:
                copy.deepcopy(value, dict(before))
            except Exception as reason:
                full = joined(path, name)
                raise ConfigurationError(
                    f"verify copies the module, and the attribute '{full}' ({type(value).__name__}) cannot be copied: "
                    f"{reason}. Give its class a __deepcopy__, keep it outside of the module, or use verify=False"
                ) from error
        raise ConfigurationError(
            f"verify copies the module, and {type(module).__name__} cannot be copied: {error}. Give it a "
            "__deepcopy__, or use verify=False"
        ) from error


def _within(module: nn.Module) -> Iterator[Any]:
    """What attributes of a module and its submodules hold, and what containers and bound arguments hold in turn."""
    seen: set[int] = set()
    waiting = [value for m in module.modules() for value in vars(m).values()]
    waiting += [hooks for p in module.parameters() for name in GRADIENT_HOOKS if (hooks := getattr(p, name, None))]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, nn.Module):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, _CONTAINERS):
            waiting += thing
        elif isinstance(thing, functools.partial):
            waiting += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.MethodType):
            waiting.append(thing.__func__)
        elif isinstance(thing, types.FunctionType):
            waiting += [_contents(cell) for cell in thing.__closure__ or ()]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_state(held: Any) -> bool:
    return isinstance(held, (nn.Module, Tensor, types.FunctionType, types.MethodType, *_CONTAINERS))


def _closes_over_state(function: types.FunctionType) -> bool:
    return any(_is_state(_contents(cell)) for cell in function.__closure__ or ())


def _unbound(function: types.FunctionType) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def _alone() -> bool:
    return False
