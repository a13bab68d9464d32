"""Keep values of modules' attributes per stage, since code between units runs on every stage that gets that far.

::

    training_step      n = self.count["steps"] += 1 | units of stage 0 | self.losses.append(loss) of the last stage
    stage 0            {"steps": 1}                                      comes to its end before
    last stage         {"steps": 1}, the one that hooks see              [loss]

Parallel models have values of their own too while an iteration runs, so that all stages of a model read the same
values, whatever the other models do meanwhile. When the iteration has ended, their additions to lists, sets and dicts
are merged.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.utils.objects import Objects

_COLLECTIONS = (list, deque, set, dict)


class OwnAttributes:
    """One stage's values of attributes and variables that a step assigns, or whose objects it changes in place.

    Code outside of stages, such as hooks, sees the values of the last stage of this process, of pipeline 0.

    Args:
        module: the whole module.
        names: path of a module and name of an attribute; or "" and the full name of a variable outside of modules.
        shown: whether this stage's values are the ones that code outside of stages sees.
    """

    def __init__(self, module: nn.Module, names: Sequence[tuple[str, str]], shown: bool) -> None:
        self.variables = [variable(module, *name) for name in dict.fromkeys(names)]
        self._shows = shown
        self._own = Objects(())
        self._seen = Objects(())  # values outside of stages when the last iteration ended
        self._begun = Objects(())
        self._has_run = False  # whether any iteration has begun

    def begin(self) -> None:
        """Begin an iteration: take over what hooks have assigned or changed since the last one."""
        if self._shows:
            return
        if self._has_run:
            self._own.follow(self._seen.changed())
            with self.placed():  # find now what a hook has added, before any stage changes it
                pass
        else:
            self._own, self._has_run = self._objects(), True
        self._begun = self._own

    def end(self) -> None:
        """End an iteration: remember the values outside of stages."""
        if not self._shows:
            self._seen = self._objects()

    def added(self) -> list[Any]:
        """Add this stage's additions to the lists, sets and dicts outside of stages; return the changed ones."""
        before = {id(obj): items for obj, items in self._begun.items()}
        found = []
        for obj, items in self._own.items():
            if isinstance(obj, _COLLECTIONS) and id(obj) in before and _add(obj, before[id(obj)], items):
                found.append(obj)
        return found

    def accept(self, objects: Sequence[Any]) -> None:
        """Take over the values outside of stages for these objects."""
        self._own.follow(objects)

    def _objects(self) -> Objects:
        return Objects(self.variables, opaque=True, like=self._own)  # unchanged arrays are not copied again

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Put this stage's values into the module within this context; objects keep their identity."""
        if self._shows or not self.variables:
            yield
            return
        shown = self._objects()
        self._own.restore(shown)
        try:
            yield
        finally:
            self._own = self._objects()
            shown.restore(self._own)


def _add(collection: Any, before: Any, after: Any) -> bool:
    """Add to a collection what ``after`` has more than ``before``; return whether there was anything."""
    if isinstance(collection, dict):
        new = [key for key in after if key not in before]
        for key in new:
            if key not in collection:
                collection[key] = after[key]
            elif collection[key] is not after[key] and isinstance(after[key], _COLLECTIONS):
                _add(collection[key], (), after[key])  # such as a list in a defaultdict
        return bool(new)
    if isinstance(collection, set):
        collection |= after.difference(before)
        return bool(after.difference(before))
    number = len(before)
    begins_alike = len(after) > number and all(a is b for a, b in zip(before, after, strict=False))
    if begins_alike and getattr(collection, "maxlen", None) is None:
        collection.extend(list(after)[number:])
        return True
    return False
