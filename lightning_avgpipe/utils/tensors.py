"""Tensors of any layout: strided parts, which can be compared and sent; reductions by name; values for tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.utils.torch_compat import is_transformed, untransformed

INSTEAD_OF_NESTED = (
    "pad it (torch.nested.to_padded_tensor) with a mask beside it, or let the batch hold a list of tensors"
)

# Names of the methods that return the indices of each layout.
_INDICES = {
    torch.sparse_coo: ("_indices",),
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


class Sparseness(NamedTuple):
    """The properties of a sparse tensor that its parts do not contain.

    Attributes:
        layout: layout of the tensor.
        shape: shape of the tensor.
        is_coalesced: whether each index occurs once; only for ``torch.sparse_coo``.
        num_parts: number of tensors with indices and values.
    """

    layout: torch.layout
    shape: tuple[int, ...]
    is_coalesced: bool
    num_parts: int

    @classmethod
    def of(cls, tensor: Tensor) -> Sparseness | None:
        """Return the properties of a tensor; None if it is not sparse."""
        names = _INDICES.get(tensor.layout)
        if names is None:
            return None
        coalesced = tensor.layout == torch.sparse_coo and tensor.is_coalesced()
        return cls(tensor.layout, tuple(tensor.shape), coalesced, len(names) + 1)

    def tensor(self, parts: Sequence[Tensor]) -> Tensor:
        """Make the tensor from its parts."""
        if self.layout == torch.sparse_coo:
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices, values, self.shape, is_coalesced=self.is_coalesced, check_invariants=False,
                device=values.device,
            )  # fmt: skip
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(
            outer, inner, values, self.shape, layout=self.layout, check_invariants=False, device=values.device
        )


def as_tensor(value: Tensor | float) -> Tensor:
    """Return a tensor unchanged, and a number as a tensor on the host, regardless of torch's default device."""
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")


# Bytes of an element -> integer type of the same size.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 17  # elements that are converted at a time: they stay in a core's cache
_ODD = 0x9E3779B1  # spreads positions over all bits


def words(tensor: Tensor) -> Tensor:
    """Return the bits of each element of a strided tensor as an integer; a complex element gives two."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous().view(_WORDS[tensor.itemsize])


def digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor of any layout, as an integer tensor on its device.

    It depends on the bits of each element and on its position: it changes if one element changes, or if two different
    elements are exchanged.
    """
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in strided_parts(tensor.detach()):
        bits = words(part).reshape(-1)
        positions = torch.arange(min(_CHUNK, bits.numel()), device=tensor.device) * (2 * _ODD) + 1
        for chunk in bits.split(_CHUNK):
            found = found * _ODD + (chunk * positions[: chunk.numel()]).sum()
    return found


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors of a tensor: itself, indices and values if it is sparse, or its nested tensors."""
    if tensor.is_nested:
        return list(tensor.unbind())
    names = _INDICES.get(tensor.layout)
    if names is None:
        return [tensor]
    values = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    return [*(getattr(tensor, name)() for name in names), values]


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a strided tensor in their order in memory; None if that is ascending, or it has gaps.

    The strides of dimensions of size 1 count, although no element depends on them: kernels may use them to decide
    whether channels are last.
    """
    if tensor.is_contiguous() and (1 not in tensor.shape or not tensor.numel()):
        return None
    strides, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.ndim), key=lambda d: (-strides[d], shape[d] == 1)))
    return order if order != tuple(range(tensor.ndim)) and tensor.permute(order).is_contiguous() else None


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor is a view with gaps in memory, or one whose elements share memory."""
    return is_strided(tensor) and not tensor.is_contiguous() and memory_order(tensor) is None


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor; for a sparse one, those of its indices and values."""
    return sum(part.numel() * part.element_size() for part in strided_parts(tensor.detach()))


def same_contents(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same layout and values, or the same bits where these are NaN."""
    if is_strided(one) and is_strided(other):
        return _are_equal(one, other)
    if one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if not one.is_nested and one.shape != other.shape:
        return False
    ours, theirs = strided_parts(one.detach()), strided_parts(other.detach())
    return len(ours) == len(theirs) and all(map(_are_equal, ours, theirs))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if one.dtype != other.dtype or one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.equal(words(one), words(other))  # NaN differs from itself


def lent(tensor: Tensor) -> Tensor:
    """Mark a tensor as a stand-in for a parameter in a single operation, and return it."""
    tensor._avgpipe_lent = True  # type: ignore[attr-defined]
    return tensor


def is_lent(tensor: Tensor) -> bool:
    """Return whether a tensor or its base is a stand-in for a parameter, which must not be kept."""
    return any(hasattr(one, "_avgpipe_lent") for one in (tensor, tensor._base))


# -- reductions by their names, as ``self.log(reduce_fx=...)`` and ``torch.distributed`` accept them -------------------

_OTHER_NAMES = {"avg": "mean", "amax": "max", "amin": "min", "prod": "product"}
_OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
_REDUCE = {
    "mean": lambda stacked: (stacked if stacked.is_floating_point() else stacked.to(torch.get_default_dtype())).mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "product": lambda stacked: stacked.prod(0),
}


def reduction_name(reduction: Any) -> str:
    """Return the name of a reduction: "mean", "sum", "min", "max", "product", or for others the name that it has.

    Args:
        reduction: a name in any case, a function such as ``torch.max`` or ``sum``, or a ``torch.distributed.ReduceOp``.
            None is a sum, as for torch.distributed.
    """
    if reduction is None:
        return "sum"
    known = (operation.lower() for operation in _OPERATIONS if reduction == getattr(dist.ReduceOp, operation))
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", None) or next(known, "")
    return _OTHER_NAMES.get(name.lower(), name.lower())


def reduced(stacked: Tensor, name: str) -> Tensor | None:
    """Reduce a tensor over its first dimension; None if there is no reduction of this name."""
    return _REDUCE[name](stacked) if name in _REDUCE else None


def tensor_arguments(*arguments: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order, and those that torch.func has wrapped."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
            if is_transformed(argument):
                found.append(untransformed(argument))
        elif isinstance(argument, (list, tuple)):
            if argument:
                found.extend(tensor_arguments(*argument))
        elif isinstance(argument, dict) and argument:
            found.extend(tensor_arguments(*argument.values()))
    return found


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield autograd's nodes on which the outputs of a forward depend."""
    nodes = [tensor.grad_fn for tensor in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def leaves_of(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves to which the gradients of a forward's outputs go."""
    return (leaf for node in nodes_of(outputs) if (leaf := getattr(node, "variable", None)) is not None)


V = TypeVar("V")


class KnownTensors(Generic[V]):
    """A mapping from tensor objects to values, which keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], V]] = {}

    def learn(self, tensor: Tensor, value: V) -> None:
        """Set the value of this tensor object."""
        self._known[id(tensor)] = (weakref.ref(tensor), value)

    def forget(self, is_gone: Callable[[V], bool]) -> None:
        """Forget the tensors whose value ``is_gone``."""
        self._known = {key: entry for key, entry in self._known.items() if not is_gone(entry[1])}

    def own_value_of(self, tensor: Tensor) -> V | None:
        """Return the value of this very object (not of its base); None if it has none."""
        entry = self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def value_of(self, tensor: Tensor) -> V | None:
        """Return the value of a tensor or its base; None if it has none."""
        value = self.own_value_of(tensor)
        if value is None and tensor._base is not None:
            return self.own_value_of(tensor._base)
        return value

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether this very object (not its base) has a value."""
        return self.own_value_of(tensor) is not None

    def alive(self) -> dict[V, Tensor]:
        """Return value -> the tensor object that has it, for objects that still exist."""
        return {value: tensor for ref, value in self._known.values() if (tensor := ref()) is not None}
