"""Use of state: which nodes need which parameters and buffers, as far as they must be where others change these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from lightning_avgpipe.capture.draft import ANYWHERE
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.named_state import NamedState


class StateUse:
    """What nodes use and change, while a step is recorded.

    Args:
        state: of the module.
        owned: ``id -> full name`` of tensors whose use is a node.
        by_glue: buffers that glue is known to change.

    Attributes:
        by_glue: these, and those of which that has been found out.
    """

    def __init__(self, state: NamedState, owned: Mapping[int, str], by_glue: Iterable[str]) -> None:
        self._state = state
        self._owned = owned
        self.by_glue = set(by_glue)
        self._seen: set[str] = set()  # by glue
        self._in_units: set[str] = set()  # changed there

    def parameters(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Names of the parameters among tensors."""
        names = dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned)
        return tuple(name for name in names if name not in self._state.buffers)

    def of_unit(self, used: Sequence[Tensor], changed: Sequence[str]) -> tuple[str, ...]:
        """What a node changes; and what it uses of that which other nodes change where glue sees it."""
        self._in_units.update(changed)
        seen = [self._owned[id(t)] for t in used if self._owned.get(id(t)) in self.by_glue]
        return tuple(dict.fromkeys((*changed, *seen)))

    def seen(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The state among tensors that glue is given, by name."""
        found = {name: t for t in tensors if (name := self._state.name_of(t)) is not None}
        self._seen.update(found)
        return found

    def of_glue(self, used: Sequence[Tensor], changed: Sequence[str]) -> tuple[str, ...]:
        """The same of a node that is glue; what it changes, :attr:`by_glue` has."""
        names = (self._owned[id(t)] for t in used if id(t) in self._owned)
        return tuple(dict.fromkeys((*changed, *(name for name in names if name in self.by_glue))))

    def reassigned(self, nodes: Sequence[Node]) -> Iterator[tuple[int, int, str]]:
        """A buffer that glue replaces by a new tensor must be replaced on the last stage only."""
        for name, buffer in self._state.buffers.items():
            if name not in self._in_units and self._state.buffer(name) is not buffer:
                self.by_glue.add(name)
                first = next((node.index for node in nodes if name in node.states), 0)
                yield first + 1, ANYWHERE, f"the step assigns a new tensor to the buffer '{name}'"

    def find_shared(self, nodes: Sequence[Node]) -> None:
        """What a unit changes and other nodes use must be on one stage with all of them."""
        users = Counter(name for node in nodes for name in node.parameters)
        self.by_glue |= {name for name in self._in_units if users[name] > 1 or name in self._seen}
