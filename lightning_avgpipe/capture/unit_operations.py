"""Watch the operations inside of units, where torch functions are not followed."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_avgpipe.capture.tracer import tensor_arguments
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.tensors import is_lent
from lightning_avgpipe.utils.torch_compat import address, is_mutable, targets, version_of

# Operations whose results depend only on shape, dtype and device of their arguments.
_LIKE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
        "empty_like", "full_like", "ones_like", "zeros_like",
    )
)  # fmt: skip


class _Again(torch.autograd.Function):
    """An identity whose result is another tensor object with the same memory, but no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _again(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        again: Tensor = _Again.apply(tensor)
    return again


class Provenance(TorchDispatchMode):
    """A dispatch mode that watches the operations inside of units, where torch functions are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}  # node that made it; whether it is a constant
        self._mixed: set[int] = set()  # memory of constants into which something else was written
        self._told = False  # whether Python code of the node has read numbers that are not constant
        self._node = 0
        self._descriptions: dict[int, tuple[Any, ...]] = {}  # of the arguments, by node
        self._used: dict[int, tuple[Tensor, int]] = {}

    def at(self, node: int, args: Any, kwargs: Any) -> Provenance:
        """Return the context in which a node runs with these arguments."""
        self._node = node
        self._descriptions[node] = _description(args, kwargs)
        self._used = {}
        self._told = False
        return self

    @property
    def used(self) -> list[Tensor]:
        """The tensors that the running or last node took and did not make itself."""
        return [tensor for tensor, _ in self._used.values()]

    def written(self) -> list[Tensor]:
        """Return the tensors in :attr:`used` that the node changed in place."""
        return [tensor for tensor, version in self._used.values() if version_of(tensor) != version]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_arguments(args, kwargs)
        for tensor in tensors:
            if self.birth(tensor) != self._node and not is_lent(tensor):
                self._used.setdefault(id(tensor), (tensor, version_of(tensor)))
        known = func.overloadpacket in _LIKE or all(map(self.is_constant, tensors))
        constant = known and not self._told and torch.Tag.nondeterministic_seeded not in func.tags
        if is_mutable(func) and not constant:
            self._mixed.update(map(address, targets(func, args, kwargs)))
        result = func(*args, **kwargs)
        found = tensor_arguments(result)
        self._told |= not (found or known)
        before = set(map(address, tensors))
        for tensor in found:
            if id(tensor) not in self._used:
                self._made[id(tensor)] = (weakref.ref(tensor), self._node, constant)
            if constant and address(tensor) not in before:  # new memory at the address of an earlier tensor
                self._mixed.discard(address(tensor))
        return result

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether a node made a tensor without parameters, the batch or random numbers."""
        made = self._entry(tensor) or (None if tensor._base is None else self._entry(tensor._base))
        return made is not None and made[2] and address(tensor) not in self._mixed

    def makes_again(self, tensor: Tensor) -> bool:
        """Return whether the running or last node, given equal arguments, would make this same tensor again."""
        birth = self.birth(tensor)
        alike = birth is not None and self._descriptions[birth] == self._descriptions[self._node]
        return alike and self.is_constant(tensor)

    def followed(self, result: Any, arguments: Any, modules: Iterable[nn.Module]) -> Any:
        """Return the result of the last node, with new tensor objects in place of those that the node made.

        The step, and the objects that the node was given, go on with the new ones. Code that uses one of the original
        objects must have found it where the node left it.
        """
        others: dict[int, Tensor] = {}

        def other(tensor: Tensor) -> Tensor:
            if self._born(tensor) != self._node:
                return tensor
            if id(tensor) not in others:
                others[id(tensor)] = again = _again(tensor)
                vars(again).update(vars(tensor))
            return others[id(tensor)]

        holder = [result]
        Objects((arguments, holder), modules).replace_tensors(other)
        return holder[0]

    def _entry(self, tensor: Tensor) -> tuple[weakref.ref[Tensor], int, bool] | None:
        made = self._made.get(id(tensor))
        return made if made is not None and made[0]() is tensor else None

    def _born(self, tensor: Tensor) -> int | None:
        made = self._entry(tensor)
        return None if made is None else made[1]

    def birth(self, tensor: Tensor) -> int | None:
        """Return the node inside of which this very tensor, or its base, was made."""
        born = self._born(tensor)
        return born if born is not None or tensor._base is None else self._born(tensor._base)

    def forget(self) -> None:
        """Forget the tensors of the last unit, which was no node, so that its tensors are free."""
        self._made = {key: made for key, made in self._made.items() if made[1] != self._node}


_ATOMS = (type(None), bool, int, float, str)


def _description(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a node with shapes and dtypes in place of tensors."""
    leaves = tree.flatten((args, kwargs))[0]
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x if type(x) in _ATOMS else type(x) for x in leaves)


class Flops(FlopCounterMode):
    """A counter for the operations of a unit as a whole.

    Torch's own per-module counts need gradient hooks, which fail where a parameter is the argument of a module and
    gradients are off, as in a parametrization under ``torch.inference_mode``.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_others())
        self.mod_tracker = _NoModules()  # type: ignore[assignment]


class _NoModules(contextlib.nullcontext[None]):
    parents = frozenset({"Global"})

    def __exit__(self, *exc_info: object) -> None:
        """Accept no arguments, as torch calls this method."""


def _others() -> dict[Any, Callable[..., int]]:
    """Return counters for operations of libraries that are imported: bitsandbytes' product with a 4-bit matrix."""
    product = getattr(torch.ops.bitsandbytes, "gemm_4bit", None)

    def count(left: Sequence[int], packed: Sequence[int], shape: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(left) * shape[0]

    return {} if product is None else {product: count}


def recurrent_flops(unit: nn.Module, result: Any) -> float:
    """Return two operations per weight and time step for fused recurrent kernels, which torch does not count."""
    weights = sum(p.numel() for m in unit.modules() if isinstance(m, nn.RNNBase) for p in m.parameters())
    outputs = tree.tensors(result)
    rows = outputs[0].numel() // max(outputs[0].shape[-1], 1) if weights and outputs and outputs[0].ndim else 0
    return 2.0 * weights * rows
