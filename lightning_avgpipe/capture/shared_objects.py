"""Find changes of objects that several modules may hold, and the code that reads these objects.

Each process has its own copy of such an object. Stages of other processes do not see a write of a unit, unless the
object is an argument, which is sent. They do see a write of code between units if they get that far themselves.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning_avgpipe.capture.draft import ANYWHERE
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.source import source_line

_HEAP_TYPE = 1 << 9  # flag of a class that Python code has defined, whose methods can be replaced

Names = frozenset[str] | None  # names of an object's attributes; None: all of its contents
Key = tuple[str, str]  # path of a module, name of the attribute


class _Read(NamedTuple):
    """A read of an object: number of nodes before, whether the running node reads it, and the line."""

    position: int
    in_unit: bool
    source: str


class SharedObjects:
    """A watch for objects that change while the step runs.

    Reads of an object's attributes are seen if Python code has defined its class. Otherwise each read of a module's
    attribute that leads to the object counts.

    Args:
        attributes: attributes of modules, by path and name.
        changing: the objects that change.
        position: return the number of nodes so far.
        in_unit: return whether a unit is running.
    """

    def __init__(
        self, attributes: Mapping[Key, Any], changing: Objects, position: Callable[[], int], in_unit: Callable[[], bool]
    ) -> None:
        self._position = position
        self._in_unit = in_unit
        items = list(changing.items())
        self._seen = {id(obj): obj for obj, held in items if held is None and type(obj).__flags__ & _HEAP_TYPE}
        others = {id(obj) for obj, _ in items if id(obj) not in self._seen}
        self._leading: dict[Key, set[int]] = {}
        for key, held in attributes.items() if others else ():
            reached = Objects([held], opaque=True)
            if found := {key for key in others if reached.reach({key})}:
                self._leading[key] = found
        self._reads: dict[int, dict[str, set[_Read]]] = defaultdict(lambda: defaultdict(set))
        self._writes: dict[int, list[tuple[int, Names, str]]] = defaultdict(list)
        self._looking = True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads of the objects within this context."""
        with contextlib.ExitStack() as undo:
            for cls in {type(obj): None for obj in self._seen.values()}:
                undo.enter_context(self._watched(cls))
            self._looking = False
            try:
                yield
            finally:
                self._looking = True

    @contextlib.contextmanager
    def _watched(self, cls: Any) -> Iterator[None]:
        own, read = vars(cls).get("__getattribute__"), cls.__getattribute__

        def watched_read(obj: Any, name: str) -> Any:
            if not self._looking and id(obj) in self._seen and not name.startswith("__"):
                self._note(id(obj), name)
            return read(obj, name)

        cls.__getattribute__ = watched_read
        try:
            yield
        finally:
            if own is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = own

    def was_read(self, key: Key) -> None:
        """Note that an attribute of a module was read."""
        for found in self._leading.get(key, ()) if not self._looking else ():
            self._note(found, "")

    def _note(self, found: int, name: str) -> None:
        self._reads[found][name].add(_Read(self._position(), self._in_unit(), source_line()))

    def was_free(self) -> None:
        """Count the reads of the last unit as reads between units: every stage that gets that far runs it."""
        here = self._position()
        for names in self._reads.values():
            for name, reads in names.items():
                names[name] = {r._replace(in_unit=False) if r.position == here else r for r in reads}

    def wrote(self, node: int, name: str, changed: Iterable[tuple[Any, Names]], followed: Collection[int]) -> None:
        """Note the changes of a unit that has run as a node.

        Args:
            node: index of the node.
            name: name of the unit.
            changed: objects that the unit changed, with the names of the changed attributes.
            followed: ids of the objects among its arguments, which are sent to other stages.
        """
        for obj, names in changed:
            if id(obj) not in followed:
                self._writes[id(obj)].append((node, names, name))

    def pinned(self, once: Mapping[int, tuple[int, Names]]) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` where no cut may lie because of changed objects.

        Args:
            once: id of an object that glue changes in the first step only -> the position, and the names of the changed
                attributes.
        """
        for found, writes in self._writes.items():
            for node, names, unit in writes:
                for name, read in self._reads_of(found, names):
                    what = f"{_described(name)} is read at {read.source}, and unit '{unit}' changes it"
                    if not read.in_unit:  # every stage that gets that far reads it
                        yield max(1, min(read.position, node + 1)), ANYWHERE, what
                    elif read.position != node:
                        yield min(node, read.position) + 1, max(node, read.position), what
        for found, (position, names) in once.items():
            for name, read in self._reads_of(found, names):
                if read.position < position:
                    what = f"{_described(name)} is read at {read.source}, and changed later, for the next micro-batch"
                    yield read.position + read.in_unit, position - 1, what

    def _reads_of(self, found: int, names: Names) -> Iterator[tuple[str, _Read]]:
        for name, reads in self._reads.get(found, {}).items():
            if names is None or not name or name in names:
                yield from ((name, read) for read in sorted(reads))


def _described(name: str) -> str:
    return f"the attribute '{name}' of an object" if name else "an object"
