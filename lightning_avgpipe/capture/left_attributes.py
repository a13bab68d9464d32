"""Watch attributes that are assigned inside of units, or without ``nn.Module.__setattr__``, and their readers.

Such an assignment is not seen when it happens, so the attribute's value is compared before and after each node::

    unit 'b'                self.load = [3, 1]              on the stage of 'b'
    code between units      1 + max(self.b.load)            on every stage that comes so far: [3, 1] must travel
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_avgpipe.capture.draft import ANYWHERE
from lightning_avgpipe.capture.held_tensors import Key
from lightning_avgpipe.utils.names import is_within, joined
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.source import source_line

_MISSING = object()


class _Read(NamedTuple):
    """A read of an attribute: number of nodes before, whether the running node reads it, and the line."""

    position: int
    in_unit: bool
    source: str


class LeftAttributes:
    """A watch for attributes of modules that are assigned where the assignment cannot be seen.

    Args:
        modules: modules by path.
        keys: attributes to watch, known from an earlier execution of the step.
        position: return the number of nodes so far.
        in_unit: return whether a unit is running.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        keys: Collection[Key],
        position: Callable[[], int],
        in_unit: Callable[[], bool],
    ) -> None:
        self._modules = modules
        self._position = position
        self._in_unit = in_unit
        self._held = {(path, name): self._now(path, name) for path, name in keys if path in modules}
        self._reads: dict[Key, set[_Read]] = defaultdict(set)
        self._writes: dict[Key, dict[int, str]] = defaultdict(dict)  # node -> name of the unit

    def _now(self, path: str, name: str) -> Any:
        return vars(self._modules[path]).get(name, _MISSING)

    def was_read(self, key: Key) -> None:
        """Note that an attribute was read, unless the running unit has assigned it itself."""
        if key in self._held and self._now(*key) is self._held[key]:
            self._reads[key].add(_Read(self._position(), self._in_unit(), source_line()))

    def changed(self) -> list[tuple[Key, Any]]:
        """Return the attributes that have changed since the last call, with the values that they held before."""
        found = [(key, held) for key, held in self._held.items() if self._now(*key) is not held]
        self._held.update((key, self._now(*key)) for key, _ in found)
        return found

    def ran(self, unit: str) -> None:
        """Note the assignments of a unit that has run as the next node; tensors are followed elsewhere."""
        for key, _ in self.changed():
            if not Objects((self._held[key],)).tensors:
                self._writes[key][self._position()] = unit

    def was_free(self) -> None:
        """Count the last unit as code between units: it is no node, so every stage that gets that far runs it."""
        self.changed()
        here = self._position()
        for key, reads in self._reads.items():
            self._reads[key] = {r._replace(in_unit=False) if r.position == here else r for r in reads}

    def exports(self) -> set[str]:
        """Return the units whose attributes are read later, so that these must be sent along with their results."""
        return {unit for key, _, _, unit in self._followed() if is_within(joined(*key), unit)}

    def _followed(self) -> Iterator[tuple[Key, _Read, int, str]]:
        """Yield each read after an assignment, with the last node that assigned before, and its unit."""
        for key, writes in self._writes.items():
            for read in sorted(self._reads[key]):
                node = max((node for node in writes if node < read.position), default=None)
                if node is not None:
                    yield key, read, node, writes[node]

    def pinned(self) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` where no cut may lie because of attributes that units assign.

        Values that a unit leaves outside of itself, or for the next micro-batch, are not sent.
        """
        reason = "the attribute '{}' is read at {}, and unit '{}' assigns it"
        for key, read, node, unit in self._followed():
            if not is_within(joined(*key), unit):
                end = read.position if read.in_unit else ANYWHERE
                yield node + 1, end, reason.format(joined(*key), read.source, unit)
        for key, writes in self._writes.items():
            last = max(writes)
            for read in sorted(self._reads[key]):
                if read.position <= min(writes):  # reads the value of the previous micro-batch
                    first, end = (read.position + 1, last) if read.in_unit else (max(1, read.position), ANYWHERE)
                    yield (
                        first,
                        end,
                        f"{reason.format(joined(*key), read.source, writes[last])} for the next micro-batch",
                    )
