"""What each stage has assigned to attributes of modules: code between units runs on every stage that comes so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["OwnAttributes"]

_MISSING = object()


class OwnAttributes:
    """One stage's values of attributes that a step assigns; others see those of the last stage of pipeline 0.

    Args:
        module: the whole module.
        names: path of a module, name of the attribute.
        shown: whether this stage's values are those that everybody sees.
    """

    def __init__(self, module: nn.Module, names: Sequence[tuple[str, str]], shown: bool) -> None:
        self._places = [] if shown else [(vars(module.get_submodule(path)), name) for path, name in names]
        self._own: list[Any] = []
        self._seen: list[Any] = []  # what everybody saw when the last iteration ended

    def begin(self) -> None:
        """An iteration begins: what a hook has assigned since the last one holds for all stages."""
        for i, (before, now) in enumerate(zip(self._seen, self._shown(), strict=False)):
            if now is not before and self._own:
                self._own[i] = now

    def end(self) -> None:
        """An iteration has ended."""
        self._seen = self._shown()

    def _shown(self) -> list[Any]:
        return [attributes.get(name, _MISSING) for attributes, name in self._places]

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Within this context the module has this stage's values."""
        shown = self._shown()
        self._put(self._own or shown)
        try:
            yield
        finally:
            self._own = self._shown()
            self._put(shown)

    def _put(self, values: Sequence[Any]) -> None:
        for (attributes, name), value in zip(self._places, values, strict=True):
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value
