"""Detours: what a step does with a micro-batch that it did not do when it was captured.

::

    captured   embed | sdpa                    | block1 | head, loss
    now        embed | expand, reshape, sdpa   | block1 | head, loss
                       ^                         ^
                       here the step leaves      a unit of a later stage: there the stage ends, wherever it was
                       the captured path         captured, and says what it did instead

Every stage executes the same step on the same micro-batch, so the later stages come to the same nodes, and find them
described in the message. Units must still come in the order of the stages; there may be none of a stage. A value is
known by the number that it got where it was made, so a later stage can lack a value, and say so, but never take one for
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.parcel import Parcel
from lightning_avgpipe.utils.placeholder import Absent, Description
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address

# What a node gave: described, or what it wrote into objects too.
Entry = Description | Parcel


class Step(NamedTuple):
    """A node off the captured path, and what it gave."""

    node: Node
    entry: Entry


class Path(NamedTuple):
    """What the stages so far did with a micro-batch, if it was not what was captured.

    Attributes:
        entries: of captured nodes what they gave; then steps.
        values: the numbers of those that are sent.
        shared: those of them that share memory.
        ended: whether the step has returned None.
    """

    entries: tuple[Entry | Step, ...]
    values: tuple[int, ...]
    shared: frozenset[int]
    ended: bool = False


class Detour:
    """One stage's part of a detour.

    Args:
        program: of the stage.
        before: what the stages before did.
        shared: values from them that share memory.

    Attributes:
        values: the numbers of those that are sent.
        sent: these.
        shared: those that share memory, here or as they were sent.
    """

    def __init__(
        self, program: StageProgram, before: Sequence[Entry | Step], shared: frozenset[int] = frozenset()
    ) -> None:
        self.shared = shared
        self._program = program
        self._steps = [entry.node for entry in before if isinstance(entry, Step)]
        self._numbers = self._unused_numbers()
        self.values: tuple[int, ...] = ()
        self.sent: tuple[Tensor, ...] = ()

    def _unused_numbers(self) -> Iterator[int]:
        number = len(self._program.graph.values)
        taken = {value for node in self._steps for value in (*node.outputs, *(v for _, v, _ in node.writes))}
        while True:
            if number not in taken:
                yield number
            number += 1

    def is_later(self, names: set[str]) -> bool:
        """Whether units or parameters of these names are those of a later stage."""
        return not self._program.is_last and not self._is_stateful and not names.isdisjoint(self._program.later)

    def may_run(self, kind: str, names: set[str]) -> bool:
        """Whether this stage can run a node that uses these; the last one may use what no stage has used."""
        if self._program.is_last:
            return names.isdisjoint(self._program.earlier)
        return not self._is_stateful and kind != "region" and names <= self._program.own

    @property
    def _is_stateful(self) -> bool:
        """Whether the step changes state between units: it is not known which node would."""
        return bool(self._program.graph.upkeep or self._program.graph.glue_states)

    def may_write(self, value: int | None, is_owned: bool) -> bool:
        """Whether nobody holds what a node has written into, a value or another tensor; weights are never free."""
        if value is None:
            return self._program.is_last and not is_owned
        return value not in self.shared

    def share(self, values: Sequence[int]) -> None:
        """These values may be views of weights."""
        self.shared |= set(values)

    def node(self, position: int, kind: Any, name: str) -> Node:
        """A node like the captured ones that do the same."""
        like = self._program.alike.get((kind, name))
        if like is None:
            return Node(position, kind, name, source_line())
        return replace(like, index=position, source=source_line(), inputs=(), outputs=(), writes=())

    def number(self) -> int:
        """Of a value that is made now."""
        return next(self._numbers)

    def note(self, node: Node) -> None:
        """A node was executed."""
        self._steps.append(node)

    def leave(self, names: set[str], needed: Sequence[int], alive: dict[int, Tensor]) -> None:
        """Choose what is sent when a node of a later stage is reached, or the end.

        Args:
            names: of what the node uses; none at the end.
            needed: values that it takes, or that the last stage will look at.
            alive: all values that there are.
        """
        wanted = [*needed, *(now for value in self._captured_at(names) for now in self._now(value))]
        self.values = tuple(v for v in dict.fromkeys(wanted) if v in alive and not isinstance(alive[v], Absent))
        self.sent = tuple(alive[value] for value in self.values)
        owners = Counter(map(address, self.sent))
        self.shared |= {v for v, tensor in zip(self.values, self.sent, strict=True) if owners[address(tensor)] > 1}

    def _captured_at(self, names: set[str]) -> tuple[int, ...]:
        """The values that crossed a cut before the node of a later stage, and after this stage, when captured."""
        graph, end = self._program.graph, self._program.end
        reached = next((n.index for n in graph.nodes[end:] if not names.isdisjoint((n.name, *n.parameters))), end)
        return (*graph.live(end), *graph.live(reached))

    def _now(self, value: int) -> Iterator[int]:
        """The same value on this path: that of the last node in the same line of the user's code."""
        yield value
        graph = self._program.graph
        made = graph.nodes[graph.born[value]]
        for node in reversed(self._steps):
            if (node.kind, node.name, node.source) == (made.kind, made.name, made.source):
                yield from (number for number in node.outputs if number >= 0)
                yield from (number for _, number, _ in node.writes)
                return
