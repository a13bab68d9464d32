"""Attributes of modules that the code between units assigns: counters, hidden states, running values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_avgpipe.source import source_line

__all__ = ["Assignments"]

_MISSING = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"__dict__", "__class__"}

_REGISTERS = ("_parameters", "_buffers", "_modules")

Key = tuple[str, str]  # path of a module, name of the attribute


class Assignments:
    """Watches which attributes are read and assigned, and when.

    Args:
        module: whose submodules are watched.
        position: how many nodes there are; None: a unit runs, whose attributes are its own.
    """

    def __init__(self, module: nn.Module, position: Callable[[], int | None]) -> None:
        self._modules = {id(m): (path, m) for path, m in module.named_modules()}
        self._position = position
        self._reads: dict[Key, tuple[int, str]] = {}  # of what the step before has assigned
        self._writes: dict[Key, tuple[int, str]] = {}  # the last ones
        self._before: dict[Key, Any] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context attributes are watched."""
        if any(_is_compiled(m) for _, m in self._modules.values()):  # which would be compiled anew
            yield
            return
        assign = nn.Module.__setattr__
        read = nn.Module.__getattribute__

        def watched_assign(module: nn.Module, name: str, value: Any) -> None:
            self._assigned(module, name)
            assign(module, name, value)

        def watched_read(module: nn.Module, name: str) -> Any:
            if name not in _OF_EVERY_MODULE:
                self._was_read(module, name)
            return read(module, name)

        nn.Module.__setattr__ = watched_assign  # type: ignore[method-assign, assignment]
        nn.Module.__getattribute__ = watched_read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            del nn.Module.__getattribute__

    def _key(self, module: nn.Module, name: str) -> Key | None:
        known = self._modules.get(id(module))
        return None if known is None or known[1] is not module else (known[0], name)

    def _assigned(self, module: nn.Module, name: str) -> None:
        position, key = self._position(), self._key(module, name)
        if position is None or key is None or any(name in vars(module)[register] for register in _REGISTERS):
            return
        self._before.setdefault(key, vars(module).get(name, _MISSING))
        self._writes[key] = (position, source_line())

    def _was_read(self, module: nn.Module, name: str) -> None:
        if name not in vars(module):
            return
        position, key = self._position(), self._key(module, name)
        if position is not None and key is not None and key not in self._writes and key not in self._reads:
            self._reads[key] = (position, source_line())

    def changed(self) -> list[Key]:
        """Attributes that are something else than before."""
        modules = dict(self._modules.values())
        return [key for key, before in self._before.items() if vars(modules[key[0]]).get(key[1]) is not before]

    def pinned(self) -> Iterator[tuple[int, int, str]]:
        """Where no cut may lie: a stage that reads what a step before assigned must come to the assignment."""
        for key in self.changed():
            if key in self._reads and self._reads[key][0] < self._writes[key][0]:
                (first, place), (last, where) = self._reads[key], self._writes[key]
                name = ".".join(part for part in key if part)
                yield (
                    first,
                    last - 1,
                    f"the attribute '{name}' is read at {place} and assigned at {where}, for the next micro-batch; "
                    "assign it before the first submodule is called, or in on_train_batch_start",
                )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
