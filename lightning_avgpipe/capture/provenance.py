"""Provenance: in which node a tensor was made, and which tensors from elsewhere a node computes with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.capture.tracer import tensor_arguments
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.torch_compat import address, is_mutable, targets, version_of

# What they give depends on the description of their arguments.
_LIKE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
        "empty_like", "full_like", "ones_like", "zeros_like",
    )
)  # fmt: skip


class _Again(torch.autograd.Function):
    """The same numbers in the same memory as another tensor, which is no view."""

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
    """Watches the operations inside of units, where torch functions are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}  # the node; whether it is a constant
        self._mixed: set[int] = set()  # memory of constants into which something else was written
        self._told = False  # whether Python knows numbers by now that are no constants
        self._node = 0
        self._descriptions: dict[int, tuple[Any, ...]] = {}  # of what nodes were given
        self._used: dict[int, tuple[Tensor, int]] = {}

    def at(self, node: int, args: Any, kwargs: Any) -> Provenance:
        """The context in which a node runs with these arguments."""
        self._node = node
        self._descriptions[node] = _description(args, kwargs)
        self._used = {}
        self._told = False
        return self

    @property
    def used(self) -> list[Tensor]:
        """The tensors that the node took which is running, or was last, and that were not made by itself."""
        return [tensor for tensor, _ in self._used.values()]

    def written(self) -> list[Tensor]:
        """Those of them that the node changed."""
        return [tensor for tensor, version in self._used.values() if version_of(tensor) != version]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_arguments(args, kwargs)
        for tensor in tensors:
            if self.birth(tensor) != self._node:
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
            if constant and address(tensor) not in before:  # memory that was another tensor's
                self._mixed.discard(address(tensor))
        return result

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a node made a tensor from no other numbers: neither parameters, nor the batch, nor random ones."""
        made = self._entry(tensor) or (None if tensor._base is None else self._entry(tensor._base))
        return made is not None and made[2] and address(tensor) not in self._mixed

    def makes_again(self, tensor: Tensor) -> bool:
        """Whether the node that is running, or was last, would make this very tensor, which one like it has made."""
        birth = self.birth(tensor)
        alike = birth is not None and self._descriptions[birth] == self._descriptions[self._node]
        return alike and self.is_constant(tensor)

    def followed(self, result: Any, arguments: Any, modules: Iterable[nn.Module]) -> Any:
        """The result of the node that ran last, with other tensors in place of those that it made.

        The step, and the objects that the node was given, go on with these. Whoever gets hold of one of the others has
        found it where the node left it.
        """
        others: dict[int, Tensor] = {}

        def other(tensor: Tensor) -> Tensor:
            if self._born(tensor) != self._node:
                return tensor
            if id(tensor) not in others:
                others[id(tensor)] = _again(tensor)
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
        """The node inside of which this very tensor, or the one that it is a view of, was made."""
        born = self._born(tensor)
        return born if born is not None or tensor._base is None else self._born(tensor._base)

    def forget(self) -> None:
        """What ran last was no node: what it made is free."""
        self._made = {key: made for key, made in self._made.items() if made[1] != self._node}


_ATOMS = (type(None), bool, int, float, str)


def _description(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What a node is given, without numbers in tensors."""
    leaves = tree.flatten((args, kwargs))[0]
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x if type(x) in _ATOMS else type(x) for x in leaves)
