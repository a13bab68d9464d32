"""What each stage has made of attributes of modules: code between units runs on every stage that comes so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_avgpipe.objects import Objects

__all__ = ["OwnAttributes"]

_MISSING = object()


class OwnAttributes:
    """One stage's values of attributes that a step assigns, and what it made of objects that the step changes in place.

    Outside of stages, hooks see those of the last stage of this process, of pipeline 0.

    Args:
        module: the whole module.
        names: path of a module, name of an attribute that the step assigns.
        holders: the same of attributes that lead to objects which it changes.
        shown: whether this stage's values are those that everybody sees.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[tuple[str, str]],
        holders: Sequence[tuple[str, str]],
        shown: bool,
    ) -> None:
        self._places = [] if shown else [(vars(module.get_submodule(path)), name) for path, name in names]
        self._shows = shown
        self._holders = [(vars(module.get_submodule(path)), name) for path, name in holders]
        self._own: list[Any] = []
        self._own_objects = Objects(())
        self._seen: list[Any] = []  # what everybody saw when the last iteration ended
        self._seen_objects = Objects(())

    def begin(self) -> None:
        """An iteration begins: what a hook has assigned or changed since the last one holds for all stages."""
        for i, (before, now) in enumerate(zip(self._seen, self._shown(), strict=False)):
            if now is not before and self._own:
                self._own[i] = now
        self._own_objects.follow(self._seen_objects.changed())

    def end(self) -> None:
        """An iteration has ended."""
        self._seen = self._shown()
        if not self._shows:
            self._seen_objects = self.objects()

    def _shown(self) -> list[Any]:
        return [attributes.get(name, _MISSING) for attributes, name in self._places]

    def objects(self) -> Objects:
        """Those that the step changes in place, as they are now."""
        return Objects((attributes.get(name) for attributes, name in self._holders), opaque=True)

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Within this context the module has this stage's values. Objects stay the same, whoever refers to them."""
        if self._shows or not (self._places or self._holders):
            yield
            return
        shown, objects = self._shown(), self.objects()
        self._put(self._own or shown)
        self._own_objects.restore()
        try:
            yield
        finally:
            self._own, self._own_objects = self._shown(), self.objects()
            self._put(shown)
            objects.restore()

    def _put(self, values: Sequence[Any]) -> None:
        for (attributes, name), value in zip(self._places, values, strict=True):
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value
