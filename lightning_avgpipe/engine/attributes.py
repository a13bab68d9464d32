"""What each stage has made of attributes of modules: code between units runs on every stage that comes so far.

::

    training_step      n = self.count["steps"] += 1 | units of stage 0 | self.losses.append(loss) of the last stage
    stage 0            {"steps": 1}                                      comes to its end before
    last stage         {"steps": 1}, the one that hooks see              [loss]

Parallel models, too, have values of their own while an iteration runs, so that all stages of a model read the same,
whatever the other models do meanwhile. When it has ended, what each has added to a list, set or dict is put together.
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

    Outside of stages, hooks see those of the last stage of this process, of pipeline 0.

    Args:
        module: the whole module.
        names: path of a module and name of an attribute; or nothing and the full name of a variable outside.
        shown: whether this stage's values are those that everybody sees.
    """

    def __init__(self, module: nn.Module, names: Sequence[tuple[str, str]], shown: bool) -> None:
        self.variables = [variable(module, *name) for name in dict.fromkeys(names)]
        self._shows = shown
        self._own = Objects(())
        self._seen = Objects(())  # what everybody saw when the last iteration ended
        self._begun = Objects(())
        self._has_run = False  # in any iteration

    def begin(self) -> None:
        """An iteration begins: what a hook has assigned or changed since the last one holds for all stages."""
        if self._shows:
            return
        if self._has_run:
            self._own.follow(self._seen.changed())
            with self.placed():  # what a hook has put into them is found now, before any stage changes it
                pass
        else:
            self._own, self._has_run = self._objects(), True
        self._begun = self._own

    def end(self) -> None:
        """An iteration has ended."""
        if not self._shows:
            self._seen = self._objects()

    def added(self) -> list[Any]:
        """Add to everybody's lists, sets and dicts what this stage has added to its own; returns which they are."""
        before = {id(obj): items for obj, items in self._begun.items()}
        found = []
        for obj, items in self._own.items():
            if isinstance(obj, _COLLECTIONS) and id(obj) in before and _add(obj, before[id(obj)], items):
                found.append(obj)
        return found

    def accept(self, objects: Sequence[Any]) -> None:
        """Of these this stage has what everybody sees."""
        self._own.follow(objects)

    def _objects(self) -> Objects:
        return Objects(self.variables, opaque=True)

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Within this context the module has this stage's values. Objects stay the same, whoever refers to them."""
        if self._shows or not self.variables:
            yield
            return
        shown = self._objects()
        self._own.restore()
        try:
            yield
        finally:
            self._own = self._objects()
            shown.restore()


def _add(collection: Any, before: Any, after: Any) -> bool:
    """Add what else there is after than before; tells whether there is anything."""
    if isinstance(collection, dict):
        new = [key for key in after if key not in before]
        for key in new:
            if key not in collection:
                collection[key] = after[key]
            elif collection[key] is not after[key] and isinstance(after[key], _COLLECTIONS):
                _add(collection[key], (), after[key])  # such as a list of a defaultdict
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
