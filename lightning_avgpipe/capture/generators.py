"""Watch what a process cannot share with others: random generators and iterators that the model holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_avgpipe.capture.attribute_events import Key
from lightning_avgpipe.capture.draft import ANYWHERE, Pin
from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.object_events import ObjectEvents
from lightning_avgpipe.state.objects import is_generator, is_iterator
from lightning_avgpipe.state.snapshot import Snapshot, leading
from lightning_avgpipe.utils.names import joined


class GeneratorDraws:
    """The draws from the generators that attributes and variables lead to.

    Each process has its own copy of such a generator. Its next draw depends on all earlier draws, also of other
    micro-batches, so all nodes that draw must be on one stage. A generator that the step makes travels with the
    micro-batch instead.

    Args:
        events: changes of objects, among them draws.
    """

    def __init__(self, events: ObjectEvents) -> None:
        self._events = events
        self._lasting = {id(one) for one in events.objects.opaque if is_generator(one)}
        self._given: dict[int, set[str]] = defaultdict(set)
        self._made: dict[int, Any] = {}
        self._renewed: set[int] = set()
        self._pinned: list[Pin] = []

    def given(self, objects: Snapshot, path: str) -> tuple[int, ...]:
        """Note that a unit is given the generators among these objects; return the numbers of the step's own."""
        found = objects.opaque
        for one in found:
            if id(one) in self._lasting:
                self._given[id(one)].add(path)
            else:
                self._made[id(one)] = one
        return tuple(i for i, one in enumerate(found) if id(one) not in self._lasting)

    def kept(self, held: Iterable[Any]) -> None:
        """Note the generators that the step has made and that are kept in these objects after it."""
        found = Snapshot(held, opaque="generators").opaque
        self._made |= {id(one): one for one in found if id(one) not in self._lasting}

    def _nodes(self, key: int) -> tuple[int, ...]:
        """Return the nodes that drew from a generator."""
        return tuple(change.node for change in self._events.by_nodes.get(key, ()))

    def _between(self, key: int) -> tuple[int | None, int]:
        """Return the first and last position at which code between nodes drew from a generator; None if it did not."""
        change = self._events.between.get(key)
        return (None, 0) if change is None else (change.first, change.last)

    def _drawn(self) -> set[int]:
        """Return the generators from which the step drew."""
        return self._lasting & {*self._events.by_nodes, *self._events.between}

    @property
    def in_use(self) -> bool:
        """Whether any generator is used, including those that the step makes."""
        return bool(self._made or self._given or self._drawn())

    def settle(self, again: GeneratorDraws) -> None:
        """Find out, from the draws of a repeated step, which generators are seeded in every step or made only once."""
        known = {lead for leads in self._leads().values() for lead in leads}
        self._renewed = again._drawn() - again._events.found()
        for use in again.uses():
            if use.leads[0] not in known and (use.between is not None or len(use.nodes) > 1 or use.given):
                name = joined(*use.leads[0][:2])
                what = f"the step makes '{name}', a generator of random numbers, once; do so in __init__"
                self._pinned.append((0, ANYWHERE, what))

    def uses(self) -> tuple[GeneratorUse, ...]:
        """Return the uses of all generators."""
        return tuple(
            GeneratorUse(
                tuple(leads), frozenset(self._given[key]), self._nodes(key), self._between(key)[0], key in self._renewed
            )
            for key, leads in self._leads().items()
        )  # fmt: skip

    def _leads(self) -> dict[int, list[tuple[str, str, int]]]:
        leads: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        for (path, name), held in self._events.attributes.items() if self._lasting else ():
            for number, one in enumerate(Snapshot([held], opaque="generators").opaque):
                leads[id(one)].append((path, name, number))
        return {key: sorted(found, key=lambda lead: (lead[1].startswith("_"), lead)) for key, found in leads.items()}

    def pinned(self, nodes: list[Node]) -> Iterator[Pin]:
        """Yield ``(first, last, reason)`` where no cut may lie, so that one stage makes all draws of a generator."""
        yield from self._pinned
        for key in filter(self._lasting.__contains__, self._events.by_nodes):
            drawing, (between, last) = self._nodes(key), self._between(key)
            first, unit = drawing[0], nodes[drawing[0]]
            if key in self._renewed and last <= first:
                between = None  # every stage seeds it before the first draw of a node
            if between is not None:
                what = f"{unit} and code between units draw from one generator of random numbers"
                yield max(1, min(between, first + 1)), ANYWHERE, what
            elif drawing[-1] > first:
                what = f"{unit} and others draw from one generator of random numbers; give each its own"
                yield first + 1, drawing[-1], what


class Iterators:
    """The iterators that attributes and variables lead to, with their positions at the time of construction.

    Such an iterator outlives the step, and nothing can put its items back. Following a step, measuring it, and each
    stage would take items of their own, so that each process would see other items. A step that is divided must
    therefore take none.

    Args:
        attributes: attributes of modules, by path and name, and variables.
    """

    def __init__(self, attributes: Mapping[Key, Any]) -> None:
        self._attributes = attributes
        self._objects = Snapshot(attributes.values(), opaque="iterators")

    def advanced(self) -> str:
        """Return the full name of what leads to an iterator that has advanced; "" if none has."""
        found = self._leading(one for one in self._objects.changed() if is_iterator(one))
        path, name = min(found, key=lambda key: (key[1].startswith("_"), key), default=("", ""))
        return joined(path, name)

    def leads(self) -> tuple[Key, ...]:
        """Return the attributes and variables that lead to any iterator."""
        return self._leading(self._objects.opaque)

    def _leading(self, found: Iterable[Any]) -> tuple[Key, ...]:
        return leading(self._attributes, set(map(id, found)), "iterators")
