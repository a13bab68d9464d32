"""Placeholders: what lives on another stage, as far as its description goes."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.source import source_line


class TensorMeta(NamedTuple):
    """Description of a tensor: enough to answer ``x.shape``, ``x.dtype`` and the like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, tensor.requires_grad)


class Absent(Tensor):
    """Stands for a value that lives in another process or on another stage, and is not needed here.

    It has a shape, a type and a device, so glue that asks for these, or makes a view, goes on. Whoever computes with it
    gets an :class:`AbsentValueError` that names the value and says what to do.
    """

    _name: str
    _advice: str

    @staticmethod
    def __new__(cls, meta: TensorMeta, device: torch.device, name: str, advice: str | None = None) -> Absent:
        absent: Absent = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.shape,
            dtype=meta.dtype,
            device=torch.device("cpu") if meta.on_host else device,
            requires_grad=meta.requires_grad and (meta.dtype.is_floating_point or meta.dtype.is_complex),
        )
        absent._name = name
        absent._advice = advice or _HIDDEN_VALUE
        return absent

    @classmethod
    def of_batch(cls, meta: TensorMeta, device: torch.device, name: str) -> Absent:
        """Stand for a tensor of the batch that no stage of this process needs."""
        return cls(meta, device, name, _UNSENT_LEAF)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({self._name!r}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        absent = [a for a in tree.tensors((args, kwargs)) if isinstance(a, Absent)]
        if func.overloadpacket.__name__ in _PASSIVE and len(absent) == 1:
            return absent[0]._passed_on(func, args, kwargs)
        raise AbsentValueError(
            f"{func} at {source_line()} needs the value of '{', '.join(a._name for a in absent)}', "
            f"{absent[0]._advice if absent else ''}"
        )

    def _passed_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a view or a copy of it looks like."""
        given = [*args, *kwargs.values()]
        devices = [value for value in given if isinstance(value, torch.device)]
        devices += [other.device for other in given if isinstance(other, Tensor) and other is not self]
        place = devices[0] if devices else self.device
        result = func(*map(_described, args), **{name: _described(value) for name, value in kwargs.items()})
        return tree.map_tensors(
            lambda t: Absent(TensorMeta(tuple(t.shape), t.dtype, False, False), place, self._name, self._advice),
            result,
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own."""
    return not isinstance(tensor, Absent) and not tensor.is_meta and tensor.layout == torch.strided


def _described(value: Any) -> Any:
    """An argument with which an operation says what it gives, and computes nothing."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


# Operations that hand numbers on without looking at them.
_PASSIVE = frozenset((
    "_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unfold", "unsqueeze", "view",
))  # fmt: skip
_HIDDEN_VALUE = (
    "which lives on an earlier stage and was not sent: the step did not need it when it was captured. It reached this "
    "code through an attribute or an object that hides tensors; pass it as an argument, return it, or keep both units "
    "on one stage with split_points"
)
_UNSENT_LEAF = (
    "a tensor of the batch that was not sent to this process: its stages did not need it when the step was captured. "
    "If a hook or a callback needs it here, use AvgPipeStrategy(send_batch='all')"
)


# Equal ones of these types can stand for one another; a float may change with every micro-batch (or be -0.0), and
# another object may change although it stays the same object.
_ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)


class Constant:
    """What a node returned besides tensors, on its way to later stages.

    Tensors that hide in an object lose their history between processes, so they travel as absent ones: whoever
    computes with them is told, instead of silently getting no gradient.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self) -> int:
        if type(self.value) not in _ATOMS:
            raise TypeError(f"a {type(self.value).__name__} must be sent every time")
        return hash(self.value)

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        _HidingPickler(buffer).dump(self.value)
        return _unhide, (buffer.getvalue(),)


class _HidingPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return TensorMeta.of(obj) if isinstance(obj, Tensor) else None


class _HidingUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return Absent(pid, torch.device("cpu"), "an object that hides tensors")


def _unhide(pickled: bytes) -> Constant:
    return Constant(_HidingUnpickler(io.BytesIO(pickled)).load())


@dataclass(frozen=True, eq=True)
class Spec:
    """A tree specification that can be a key: equal specs meet, whatever their hash lacks."""

    spec: Any
    num_leaves: int

    def __hash__(self) -> int:
        return self.num_leaves


# What a node returned: one tensor's description, or a tree of descriptions and constants.
Description = TensorMeta | tuple[Spec, tuple[TensorMeta | Constant, ...]]


def described(result: Any) -> Description:
    """What a node returned, without numbers."""
    if type(result) is Tensor:
        return TensorMeta.of(result)
    leaves, spec = tree.flatten(result)
    return Spec(spec, len(leaves)), tuple(TensorMeta.of(x) if isinstance(x, Tensor) else Constant(x) for x in leaves)
