"""Record which nodes use which parameters and buffers that other nodes change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from lightning_avgpipe.capture.draft import ANYWHERE
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.named_state import NamedState
from lightning_avgpipe.utils.names import is_within


class StateUse:
    """The uses and changes of parameters and buffers by nodes, while a step is recorded.

    Args:
        state: parameters and buffers of the module.
        owned: ``id -> full name`` of the tensors whose use makes a node.
        by_glue: names of buffers that glue is known to change.

    Attributes:
        by_glue: these, and those that were found since.
    """

    def __init__(self, state: NamedState, owned: Mapping[int, str], by_glue: Iterable[str]) -> None:
        self._state = state
        self._owned = owned
        self.by_glue = set(by_glue)
        self._seen: set[str] = set()  # names of the state that glue was given
        self._in_units: set[str] = set()  # names of the state that units change

    def parameters(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the names of the parameters among tensors."""
        names = dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned)
        return tuple(name for name in names if name not in self._state.buffers)

    def of_unit(self, used: Sequence[Tensor], changed: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the state that a unit changes, or that it uses and :attr:`by_glue` holds."""
        self._in_units.update(changed)
        seen = [self._owned[id(t)] for t in used if self._owned.get(id(t)) in self.by_glue]
        return tuple(dict.fromkeys((*changed, *seen)))

    def seen(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameters and buffers among the arguments of glue, by name."""
        found = {name: t for t in tensors if (name := self._state.name_of(t)) is not None}
        self._seen.update(found)
        return found

    def of_glue(self, used: Sequence[Tensor], changed: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the state that a glue node changes, or that it uses and :attr:`by_glue` holds."""
        names = (self._owned[id(t)] for t in used if id(t) in self._owned)
        return tuple(dict.fromkeys((*changed, *(name for name in names if name in self.by_glue))))

    def reassigned(self, nodes: Sequence[Node]) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` so that only the last stage replaces a buffer that glue assigns anew."""
        for name, buffer in self._state.buffers.items():
            if name not in self._in_units and self._state.buffer(name) is not buffer:
                self.by_glue.add(name)
                first = next((node.index for node in nodes if name in node.states), 0)
                yield first + 1, ANYWHERE, f"the step assigns a new tensor to the buffer '{name}'"

    def find_shared(self, nodes: Sequence[Node]) -> None:
        """Find buffers that a unit changes and that glue, another unit or another call of the unit uses too."""
        users = Counter(name for node in nodes for name in node.parameters)
        calls = Counter(node.name for node in nodes if node.kind == "call")
        changes = Counter((node.name, name) for node in nodes for name in node.changes)
        reads = {name for (unit, name), count in changes.items() if is_within(name, unit) and count < calls[unit]}
        self.by_glue |= {name for name in self._in_units if users[name] > 1 or name in self._seen or name in reads}
