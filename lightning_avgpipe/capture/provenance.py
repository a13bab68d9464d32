"""Provenance: in which node a tensor was made, and which tensors from elsewhere a node computes with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.capture.tracer import tensor_arguments
from lightning_avgpipe.objects import Objects

__all__ = ["Provenance"]


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
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._node = 0
        self._used: dict[int, tuple[Tensor, int]] = {}

    def at(self, node: int) -> Provenance:
        """The context in which a node runs."""
        self._node = node
        self._used = {}
        return self

    @property
    def used(self) -> list[Tensor]:
        """The tensors that the node took which is running, or was last, and that were not made by itself."""
        return [tensor for tensor, _ in self._used.values()]

    def written(self) -> list[Tensor]:
        """Those of them that the node changed."""
        return [tensor for tensor, version in self._used.values() if _version(tensor) != version]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensor_arguments(args, kwargs):
            if self.birth(tensor) != self._node:
                self._used.setdefault(id(tensor), (tensor, _version(tensor)))
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and id(tensor) not in self._used:
                self._made[id(tensor)] = (weakref.ref(tensor), self._node)
        return result

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

    def _born(self, tensor: Tensor) -> int | None:
        made = self._made.get(id(tensor))
        return made[1] if made is not None and made[0]() is tensor else None

    def birth(self, tensor: Tensor) -> int | None:
        """The node inside of which this very tensor, or the one that it is a view of, was made."""
        born = self._born(tensor)
        return born if born is not None or tensor._base is None else self._born(tensor._base)

    def forget(self) -> None:
        """What ran last was no node: what it made is free."""
        self._made = {key: made for key, made in self._made.items() if made[1] != self._node}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
