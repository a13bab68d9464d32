"""Record which parameters and buffers user code writes into, and keep their earlier contents.

The schema of an operation says which arguments it writes into. So a write is seen before it happens, also through
views, ``.data`` and lists of tensors. Writes that the schema does not mention (the statistics of a batch normalisation)
are found by comparing contents. A tensor that gets other memory (``p.data = ...``) is found by its address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.tensors import tensor_arguments
from lightning_avgpipe.utils.torch_compat import address, is_mutable, targets, untraced

_LIFT = torch.ops.aten.lift_fresh.default  # returns the tensor that torch.tensor() has made


def _is_equal(tensor: Tensor, memory: Tensor) -> bool:
    """Return whether a tensor has the contents of its former memory, as after a move (``flatten_parameters()``)."""
    if tensor.is_meta or memory.is_meta or tensor.shape != memory.shape:
        return False
    return torch.equal(tensor.to(memory.device), memory)


class Writes(TorchDispatchMode):
    """A context that records writes into a module's parameters and buffers, also those on the meta device.

    Attributes:
        written: full names of the tensors that were written into; in the end also of those that have other
            memory with other contents.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.written: set[str] = set()
        self._module = module
        self._names: dict[int, list[str]] = {}  # by address
        self._places: list[tuple[str, Tensor, int]] = []  # name, tensor and address at the beginning
        self._memory: dict[str, Tensor] = {}  # held, so that no other tensor gets the same address

    def __enter__(self) -> Self:
        named = dict((*self._module.named_parameters(), *self._module.named_buffers()))
        with untraced():  # reading the data must not fetch absent weights
            self._memory = {name: tensor.detach() for name, tensor in named.items()}
        self._places = list(zip(named, named.values(), self._locate(named.items()), strict=True))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with torch.no_grad(), untraced():
            self.written.update(
                name for name, tensor, place in self._places
                if address(tensor) != place and not _is_equal(tensor, self._memory[name])
            )  # fmt: skip

    def _locate(self, named: Iterable[tuple[str, Tensor]]) -> list[int]:
        places = []
        for name, tensor in named:
            places.append(address(tensor))
            self._names.setdefault(places[-1], []).append(name)
        return places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with untraced():  # function modes do not see Tensor.set_ when the user calls it, and must not see it here
            if is_mutable(func):
                for tensor in targets(func, args, kwargs):
                    self._wrote(tensor, self._names.get(address(tensor), ()))
            return func(*args, **kwargs)

    def _wrote(self, tensor: Tensor, names: Sequence[str]) -> None:
        self.written.update(names)


class Changes(Writes):
    """A context that also restores the parameters at its end, and records writes into tensors without a name.

    Args:
        module: module whose parameters and buffers are watched.
        others: other tensors that may be written to, such as the batch.

    Attributes:
        wrote_unknown: whether, since :meth:`begin`, the step has written into a tensor without a name that it did not
            make.
        unnamed: memory addresses of all tensors without a name that were written to, also through views.
        unnamed_views: those of ``unnamed`` that were written to through a view since :meth:`begin`.
    """

    def __init__(self, module: nn.Module, others: Iterable[Tensor] = ()) -> None:
        super().__init__(module)
        self.wrote_unknown = False
        self.unnamed: set[int] = set()
        self.unnamed_views: set[int] = set()
        self._made = {address(tensor) for tensor in others}
        self._found: set[int] = set()  # addresses of what operations have used and none has made
        self._parameters: dict[str, nn.Parameter] = {}
        self._contents: dict[str, Tensor] = {}  # former contents, by name of a parameter that was written to
        self._paused = False

    def __enter__(self) -> Self:
        self._parameters = dict(self._module.named_parameters())
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for name, parameter in self._parameters.items():
            put_back(parameter, self._memory[name], self._contents.get(name))

    def begin(self) -> None:
        """Forget all writes so far."""
        self.written, self.wrote_unknown, self.unnamed_views = set(), False, set()

    def keep(self, before: Iterable[tuple[str, Tensor]]) -> None:
        """Keep the contents of parameters that were given other memory, to restore them at the end."""
        for name, contents in before:
            self._contents.setdefault(name, contents.clone())

    @contextlib.contextmanager
    def visiting(self, visit: AbstractContextManager[None], named: Collection[tuple[str, Tensor]]) -> Iterator[None]:
        """Enter ``visit``, which moves these tensors to another device, and record writes into them there."""
        with replaced(self, "_paused", True):
            visit.__enter__()
        places: list[int] = []
        try:
            places = self._locate(named)
            yield
        finally:
            for (name, _), place in zip(named, places, strict=False):  # none if they could not be located
                self._names[place].remove(name)
                if not self._names[place]:
                    del self._names[place]
            with replaced(self, "_paused", True):
                visit.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        given = set(map(address, tensor_arguments(args, kwargs or {})))
        if func is not _LIFT:
            self._found |= given.difference(self._made, self._names)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        places = set(map(address, tensor_arguments(result)))
        self._made |= places.difference(self._names)
        self._found -= places - given  # new memory at the address of an earlier tensor
        return result

    def _wrote(self, tensor: Tensor, names: Sequence[str]) -> None:
        super()._wrote(tensor, names)
        place = address(tensor)
        if not names and (place in self._found or place not in self._made):
            self.unnamed.add(place)
            if place in self._made:  # a view counts as made
                self.unnamed_views.add(place)
            else:
                self.wrote_unknown = True
        for name in names:
            if name in self._parameters and name not in self._contents:
                self.keep([(name, self._parameters[name].detach())])


def put_back(parameter: nn.Parameter, memory: Tensor, contents: Tensor | None) -> None:
    """Give a parameter its former memory, and the memory its former contents (None: they did not change)."""
    with torch.no_grad(), untraced():  # reading the data must not fetch absent weights
        if parameter.is_meta or memory.is_meta or parameter.device != memory.device:
            return  # the weight was released, fetched or moved meanwhile
        if address(parameter) != address(memory):
            parameter.data = memory
        if contents is not None and not torch.equal(memory, contents.to(memory.device)):
            memory.copy_(contents)
