"""Record which parameters and buffers user code writes into, and keep their earlier contents.

The schema of an operation says which arguments it writes into. So a write is seen before it happens, also through
views, ``.data`` and lists of tensors. Writes that the schema does not mention (the statistics of a batch normalisation)
are found by comparing contents. A tensor that gets other memory (``p.data = ...``) is found by its address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.utils.torch_compat import address, is_mutable, targets, untraced


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


def put_back(parameter: nn.Parameter, memory: Tensor, contents: Tensor | None) -> None:
    """Give a parameter its former memory, and the memory its former contents (None: they did not change)."""
    with torch.no_grad(), untraced():  # reading the data must not fetch absent weights
        if parameter.is_meta or memory.is_meta or parameter.device != memory.device:
            return  # the weight was released, fetched or moved meanwhile
        if address(parameter) != address(memory):
            parameter.data = memory
        if contents is not None and not torch.equal(memory, contents.to(memory.device)):
            memory.copy_(contents)
