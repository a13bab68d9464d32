"""Tensors of any layout: what of them is strided, and can be compared or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

INSTEAD_OF_NESTED = (
    "pad it (torch.nested.to_padded_tensor) with a mask beside it, or let the batch hold a list of tensors"
)

# How a layout names its indices.
_INDICES = {
    torch.sparse_coo: ("_indices",),
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class Sparseness(NamedTuple):
    """What a sparse tensor is besides its parts.

    Attributes:
        layout: of the tensor.
        shape: of the tensor.
        is_coalesced: whether each index is there once; of ``torch.sparse_coo``.
        num_parts: indices and values.
    """

    layout: torch.layout
    shape: tuple[int, ...]
    is_coalesced: bool
    num_parts: int

    @classmethod
    def of(cls, tensor: Tensor) -> Sparseness | None:
        """That of a tensor; None for one that is not sparse."""
        names = _INDICES.get(tensor.layout)
        if names is None:
            return None
        coalesced = tensor.layout == torch.sparse_coo and tensor.is_coalesced()
        return cls(tensor.layout, tuple(tensor.shape), coalesced, len(names) + 1)

    def tensor(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor with these parts."""
        if self.layout == torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices, values, self.shape, is_coalesced=self.is_coalesced, check_invariants=False
            )
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(
            outer, inner, values, self.shape, layout=self.layout, check_invariants=False
        )


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold what is in it: itself, or its indices and values if it is sparse, or those it nests."""
    if tensor.is_nested:
        return list(tensor.unbind())
    names = _INDICES.get(tensor.layout)
    if names is None:
        return [tensor]
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    return [*(getattr(tensor, name)() for name in names), values]


def is_strided(tensor: Tensor) -> bool:
    """Whether it is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of what is in it: not of the zeros that a sparse one leaves out."""
    return sum(part.numel() * part.element_size() for part in strided_parts(tensor.detach()))


def same_contents(one: Tensor, other: Tensor) -> bool:
    """Whether they hold the same numbers in the same way; ``torch.equal`` knows strided tensors alone."""
    if is_strided(one) and is_strided(other):
        return torch.equal(one, other)
    if one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if not one.is_nested and one.shape != other.shape:
        return False
    ours, theirs = strided_parts(one.detach()), strided_parts(other.detach())
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
