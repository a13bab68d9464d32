"""Check that the step makes the same request to each node on the stage that executes it and on the last stage.

::

    stage 0        free glue: t = x / 3     unit 'a' takes (t: div 3 of the batch), training, with gradients
    last stage     free glue: t = x / 4     unit 'a' takes (t: div 4 of the batch): an error

A request is what the step passes to a node: arguments and modes. Every stage runs the step's Python up to the end of
its own part. The last stage computes the loss, so its run is the reference. If the run of another stage requested
something else, for instance because its counter differs by one, the result would silently differ from that of a single
process.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import KnownTensors

_PLAIN = frozenset((bool, int, str, bytes, type(None), complex, torch.dtype, torch.memory_format, torch.layout))
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)

_COPYING = "__deepcopy__"  # its second argument, the memo, has ids as keys, which differ between processes

# Request for one node: modes, values by index, scalars, and descriptions of other tensors and of objects.
Asked = tuple[Any, ...]


class Request(NamedTuple):
    """The request of the step to a node, on the stage that executed it.

    Attributes:
        position: position of the node in the step.
        stage: stage that executed the node.
        request: description of the request.
    """

    position: int
    stage: int
    request: Asked


class Made(NamedTuple):
    """A tensor that free glue made.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        digest: digest of the operations that made it from the batch; 0 if unknown, as for a tensor kept from an earlier
            step.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int


class Owned(NamedTuple):
    """A parameter or buffer. It is compared by name alone, since it changes on the stage that uses it.

    Attributes:
        name: full name.
    """

    name: str


class Attestation:
    """The requests of a step on one micro-batch, which one stage collects, and the last stage compares.

    Args:
        known: tensors of the step, and their values.
        stage: number of the stage that runs the step.
        told: requests that earlier stages have collected.
        compares: whether this is the last stage, which compares.
        owned: ``id -> full name`` of parameters, and of buffers that glue changes.
    """

    def __init__(
        self,
        known: KnownTensors[int],
        stage: int,
        told: tuple[Request, ...],
        compares: bool,
        owned: Mapping[int, str],
    ) -> None:
        self._known = known
        self._owned = owned
        self._stage = stage
        self._told = {request.position: request for request in told} if compares else {}
        self._compares = compares
        self._own: list[Request] = []
        self._before = told
        self._free = KnownTensors[int]()  # tensors made by free glue, with their digests

    def batch(self, tensors: Iterable[Tensor]) -> None:
        """Number the tensors of the batch, in this order."""
        for number, tensor in enumerate(tensors, 1):
            self._free.learn(tensor, number)

    def made(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note by which free operation a tensor was made or changed."""
        if not isinstance(result, Tensor):
            return
        found: list[Any] = [name]
        self._describe(args[:1] if name == _COPYING else args, found)
        self._describe(kwargs, found)
        is_known = not any(type(item) is Owned or (type(item) is Made and item.digest == 0) for item in found)
        self._free.learn(result, zlib.crc32(repr(found).encode()) if is_known else 0)

    def is_of_held(self, tensor: Tensor) -> bool:
        """Return whether free glue made a tensor from one of unknown origin, such as one in an attribute."""
        return self._free.value_of(tensor) == 0

    def node(self, position: int, operation: Operation, here: bool) -> None:
        """Collect or compare the request to a node.

        Args:
            position: position of the node in the step.
            operation: operation that the step requests.
            here: whether this stage executes it.
        Raises:
            StepChangedError: the request to the stage that executed the node was different.
        """
        if self._compares:
            told = self._told.get(position)
            if told is not None and (asked := self._asked(operation)) != told.request:
                self._check(operation, asked, told)
        elif here:
            self._own.append(Request(position, self._stage, self._asked(operation)))

    def told(self) -> tuple[Request, ...]:
        """Return the requests that all stages so far have collected."""
        return (*self._before, *self._own) if self._own else self._before

    def _asked(self, operation: Operation) -> Asked:
        module = operation.module
        found: list[Any] = [torch.is_grad_enabled(), torch.is_autocast_enabled(), operation.name]
        if module is not None:
            found.append(module.training)
        self._describe(operation.args[:1] if operation.name == _COPYING else operation.args, found)
        if operation.kwargs:
            self._describe(operation.kwargs, found)
        return tuple(found)

    def _describe(self, item: Any, found: list[Any]) -> None:
        """Append to ``found`` a description of an argument that can be compared between processes."""
        kind = type(item)
        if kind in _PLAIN:
            found.append(item)
        elif isinstance(item, Tensor):
            value = self._known.value_of(item)
            if value is None and id(item) in self._owned:
                found.append(Owned(self._owned[id(item)]))
            elif value is None:
                found.append(Made(tuple(item.shape), item.dtype, self._free.value_of(item) or 0))
            else:
                found.append(("value", value))
        elif kind is float:
            found.append(item if item == item else "nan")  # NaN is not equal to itself
        elif isinstance(item, (tuple, list)):
            found.append(len(item))
            for part in item:
                self._describe(part, found)
        elif kind is dict:
            found.append(len(item))
            for name, part in item.items():
                found.append(name if type(name) in _PLAIN else type(name).__qualname__)
                self._describe(part, found)
        elif kind is slice:
            self._describe((item.start, item.stop, item.step), found)
        else:
            found.append(item.__qualname__ if isinstance(item, _CODE) else kind.__qualname__)

    def _check(self, operation: Operation, asked: Asked, told: Request) -> None:
        """Compare two requests item by item. If a tensor's digest is unknown on a stage, only shape and dtype count."""
        mine: Any = f"{len(asked)} arguments"
        theirs: Any = f"{len(told.request)} arguments"
        if len(asked) == len(told.request):
            different = ((a, b) for a, b in zip(asked, told.request, strict=True) if not _alike(a, b))
            mine, theirs = next(different, (None, None))
            if mine is theirs is None:
                return
        if type(mine) is type(theirs) is Made and mine[:2] == theirs[:2]:
            mine, theirs = "a tensor that was computed from the batch with certain numbers", "one with others"
        raise StepChangedError(
            f"at {source_line()} the step asks {operation} for {mine}, and asked for {theirs} where stage "
            f"{told.stage} executed it. Each stage runs the step's Python up to its own part, so what the step reads "
            "there must not depend on what it did later in the step before, on the process or on the time; compute it "
            "in a hook (on_train_batch_start), or keep these lines on one stage with split_points"
        )


def _alike(one: Any, other: Any) -> bool:
    if type(one) is type(other) is Made and 0 in (one.digest, other.digest):
        return bool(one[:2] == other[:2])
    return bool(one == other)
