"""Placeholders for values of other stages: descriptions of tensors, tensors without memory, absent attributes."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import is_strided, memory_order
from lightning_avgpipe.utils.torch_compat import is_mutable


class TensorMeta(NamedTuple):
    """A description of a tensor, which is enough for ``x.shape``, ``x.stride()``, ``x.requires_grad`` and the like.

    Attributes:
        shape: shape of the tensor.
        dtype: type of its elements.
        on_host: whether it is in the host's memory.
        requires_grad: whether it requires a gradient.
        order: order of the dimensions in memory, once the tensor is received; None: ascending.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Describe a tensor."""
        order = memory_order(tensor) if is_strided(tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, tensor.requires_grad, order)

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of each dimension, once the tensor is received."""
        steps, step = [0] * len(self.shape), 1
        for dimension in reversed(self.order or range(len(self.shape))):
            steps[dimension], step = step, step * max(1, self.shape[dimension])
        return tuple(steps)


class _Flow(threading.local):
    on = False


class Absent(Tensor):
    """A tensor without memory in place of a value of another stage that is not needed here.

    It has a shape, a type and a device, so that glue that only reads these, or makes a view, works. Computing with it
    raises an :class:`AbsentValueError` that names the value and says what to do.
    """

    __module__ = "torch"  # libraries (opt_einsum) choose their functions by it
    _name: str
    _advice = (
        "which lives on an earlier stage and was not sent: the step did not need it when it was captured. It reached "
        "this code through an attribute (perhaps of the micro-batch before) or an object that hides tensors; pass it "
        "as an argument, return it, or keep both units on one stage with split_points"
    )
    _flow = _Flow()

    @staticmethod
    def __new__(cls, meta: TensorMeta, device: torch.device, name: str, advice: str | None = None) -> Absent:
        return cls.maker(meta, device, name, advice)()

    @classmethod
    def maker(
        cls, meta: TensorMeta, device: torch.device, name: str, advice: str | None = None
    ) -> Callable[[], Absent]:
        """Return a function that makes placeholders with these properties."""
        make = partial(
            torch.Tensor._make_wrapper_subclass,  # type: ignore[attr-defined]
            cls,
            meta.shape,
            meta.stride,
            dtype=meta.dtype,
            device=torch.device("cpu") if meta.on_host else device,
            requires_grad=meta.requires_grad and (meta.dtype.is_floating_point or meta.dtype.is_complex),
        )

        def made() -> Absent:
            absent: Absent = make()
            absent._name = name
            if advice is not None:
                absent._advice = advice
            return absent

        return made

    @classmethod
    def of_batch(cls, meta: TensorMeta, device: torch.device, name: str) -> Absent:
        """Make a placeholder for a tensor of the batch that no stage of this process needs."""
        return cls(meta, device, name, _UNSENT_LEAF)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made, (TensorMeta.of(self), self.device, self._name, self._advice)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent({self._name!r}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the value counts as a leaf of autograd's graph: if it requires no gradient."""
        return not self.requires_grad

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        """None, as for a value that requires no gradient. Otherwise only the value's own stage knows its operation.

        Raises:
            AbsentValueError: the value requires a gradient.
        """
        if self.requires_grad:
            raise AbsentValueError(f"grad_fn at {source_line()} asks for the history of '{self._name}', {self._advice}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        absent = [a for a in tree.tensors((args, kwargs)) if isinstance(a, Absent)]
        name = func.overloadpacket.__name__
        if name in _PASSIVE and len(absent) == 1:
            return absent[0]._passed_on(func, args, kwargs)
        if Absent._flow.on and not is_mutable(func):
            with contextlib.suppress(RuntimeError):  # the operation needs the values of tensors
                return absent[0]._passed_on(func, args, kwargs)
        raise AbsentValueError(
            f"{name}() at {source_line()} needs the value of '{', '.join(a._name for a in absent)}', "
            f"{absent[0]._advice if absent else ''}"
        )

    @staticmethod
    def flowing() -> contextlib.AbstractContextManager[None]:
        """Let operations on absent values return absent values within this context; reading values stays an error."""
        return replaced(Absent._flow, "on", True)

    def _passed_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the absent result of an operation; its shape and type are computed with meta tensors."""
        given = [*args, *kwargs.values()]
        devices = [value for value in given if isinstance(value, torch.device)]
        devices += [other.device for other in given if isinstance(other, Tensor) and other is not self]
        place = devices[0] if devices else self.device
        args, kwargs = tree.map_tensors(_described, (args, kwargs))
        args, kwargs = [_elsewhere(a) for a in args], {name: _elsewhere(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        return tree.map_tensors(lambda t: Absent(TensorMeta.of(t), place, self._name, self._advice), result)


def _made(*given: Any) -> Absent:
    """Unpickle a placeholder, whose class cannot be found by name, because it has another module's name."""
    return Absent(*given)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and has memory."""
    return not isinstance(tensor, Absent) and not tensor.is_meta and tensor.layout == torch.strided


def _described(tensor: Tensor) -> Tensor:
    """Return a meta tensor like an argument, to compute the shape and type of an operation's result."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _elsewhere(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


# Operations that do not compute with values.
_PASSIVE = frozenset((
    "_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unfold", "unsqueeze", "view",
))  # fmt: skip
_UNSENT_LEAF = (
    "a tensor of the batch that was not sent to this process: its stages did not need it when the step was captured. "
    "If some batches need it here, or a hook or a callback, use AvgPipeStrategy(links=Links(send_batch='all'))"
)


# Equal objects of these types are interchangeable. A float may change with every micro-batch (or be -0.0), and other
# objects may change in place.
_ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)


class Constant:
    """An object other than a tensor that a node returned, to be sent to later stages.

    Tensors inside an object would lose their autograd history between processes. So they are sent as absent tensors:
    computing with them is an error, where otherwise a gradient would silently be missing.
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

    def reducer_override(self, obj: Any) -> Any:
        # a hook stays with its tensor, so elsewhere its handle gets an empty dict, and removes nothing
        return (RemovableHandle, (OrderedDict(),)) if isinstance(obj, RemovableHandle) else NotImplemented


class _HidingUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return Absent(pid, torch.device("cpu"), "an object that hides tensors")


def _unhide(pickled: bytes) -> Constant:
    return Constant(_HidingUnpickler(io.BytesIO(pickled)).load())


@dataclass(frozen=True, eq=True)
class Spec:
    """A hashable tree specification; its hash is the number of leaves, and specs are equal if their fields are."""

    spec: Any
    num_leaves: int

    def __hash__(self) -> int:
        return self.num_leaves


# The description of a node's result: that of one tensor, or a tree of descriptions and constants.
Description = TensorMeta | tuple[Spec, tuple[TensorMeta | Constant, ...]]


def described(result: Any) -> Description:
    """Return the description of a node's result, without the values of tensors."""
    if type(result) is Tensor:
        return TensorMeta.of(result)
    leaves, spec = tree.flatten(result)
    return Spec(spec, len(leaves)), tuple(TensorMeta.of(x) if isinstance(x, Tensor) else Constant(x) for x in leaves)


# -- attributes --------------------------------------------------------------------------------------------------------

_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_OTHERS = (
    "abs bool bytes call complex contains delitem enter eq exit float format ge getitem gt hash index int invert iter "
    "le len lt ne neg next pos round setitem str trunc"
)
_USES = (*_OTHERS.split(), *(f"{side}{name}" for name in _BINARY.split() for side in ("", "r", "i")))


class Elsewhere:
    """The value of an attribute that only the process or stage of its submodule has; using it is an error.

    Args:
        name: full name of the attribute.
        why: why the value is not available here, and what to do.
    """

    __slots__ = ("_name", "_why")

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def __repr__(self) -> str:
        return f"Elsewhere({self._name!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by tools, such as copy and inspect
            raise AttributeError(name)
        return self._used()

    def __reduce__(self) -> Any:
        return Elsewhere, (self._name, self._why)

    def _used(self, *_: Any) -> Any:
        raise AbsentValueError(f"{source_line()} uses '{self._name}', {self._why}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise the error for functions of torch too: parsing their arguments calls no other method of this class."""
        next(leaf for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, cls))._used()

    @property
    def __array__(self) -> Any:
        return self._used()


for _use in _USES:
    setattr(Elsewhere, f"__{_use}__", Elsewhere._used)
