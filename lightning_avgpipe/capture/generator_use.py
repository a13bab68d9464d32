"""Find out, while a step is captured, which nodes draw from random generators that the model holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.hidden import ANYWHERE
from lightning_avgpipe.utils.objects import Objects


class GeneratorWatch:
    """A watch for the generators that attributes and variables lead to.

    Each process has its own copy of such a generator. Its next draw depends on all earlier draws, also of other
    micro-batches, so all nodes that draw must be on one stage. A generator that the step makes travels with the
    micro-batch instead.

    Args:
        attributes: attributes of modules, by path and name, and variables.
    """

    def __init__(self, attributes: Mapping[tuple[str, str], Any]) -> None:
        self._attributes = attributes
        self._objects = Objects(attributes.values(), opaque="generators")
        self._lasting = {id(one): one for one in self._objects.opaque}
        self._given: dict[int, set[str]] = defaultdict(set)
        self._nodes: dict[int, list[int]] = defaultdict(list)
        self._between: dict[int, tuple[int, int]] = {}  # first and last position of draws between nodes
        self._made: dict[int, Any] = {}
        self._renewed: set[int] = set()
        self._pinned: list[tuple[int, int, str]] = []
        self._begun = Objects(self._lasting.values(), opaque="generators")

    def given(self, objects: Objects, path: str) -> tuple[int, ...]:
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
        found = Objects(held, opaque="generators").opaque
        self._made |= {id(one): one for one in found if id(one) not in self._lasting}

    def look(self, position: int) -> None:
        """Note draws of code that every stage runs, up to this position."""
        for key in self._changed():
            self._between[key] = self._between.get(key, (position,))[0], position

    def drew(self, node: int) -> None:
        """Note draws of a node that has run."""
        for key in self._changed():
            self._nodes[key].append(node)

    def pass_over(self) -> None:
        """Ignore draws of code that runs only once, such as a logging call."""
        self._changed()

    def _changed(self) -> list[int]:
        changed = self._objects.changed() if self._lasting else []
        self._objects.follow(changed)
        return [id(one) for one in changed if id(one) in self._lasting]

    @property
    def in_use(self) -> bool:
        """Whether any generator is used, including those that the step makes."""
        return bool(self._made or self._used)

    @property
    def _used(self) -> set[int]:
        return {*self._given, *self._nodes, *self._between}

    def settle(self, again: GeneratorWatch) -> None:
        """Find out, from the watch of a repeated step, which generators are seeded in every step or made only once."""
        changed = set(map(id, again._begun.changed()))
        known = {lead for leads in self._leads().values() for lead in leads}
        self._renewed = {key for key in again._nodes.keys() | again._between.keys() if key not in changed}
        for use in again.uses():
            if use.leads[0] not in known and (use.between is not None or len(use.nodes) > 1 or use.given):
                name = ".".join(part for part in use.leads[0][:2] if part)
                what = f"the step makes '{name}', a generator of random numbers, once; do so in __init__"
                self._pinned.append((0, ANYWHERE, what))

    def uses(self) -> tuple[GeneratorUse, ...]:
        """Return the uses of all generators."""
        return tuple(
            GeneratorUse(
                tuple(leads), frozenset(self._given[key]), tuple(self._nodes[key]), self._between.get(key, (None,))[0],
                key in self._renewed,
            )
            for key, leads in self._leads().items()
        )  # fmt: skip

    def _leads(self) -> dict[int, list[tuple[str, str, int]]]:
        leads: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        for (path, name), held in self._attributes.items() if self._lasting else ():
            for number, one in enumerate(Objects([held], opaque="generators").opaque):
                leads[id(one)].append((path, name, number))
        return {key: sorted(found, key=lambda lead: (lead[1].startswith("_"), lead)) for key, found in leads.items()}

    def pinned(self, nodes: list[Node]) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` where no cut may lie, so that one stage makes all draws of a generator."""
        yield from self._pinned
        for key, drawing in self._nodes.items():
            first, unit = drawing[0], nodes[drawing[0]]
            between, last = self._between.get(key, (None, 0))
            if key in self._renewed and last <= first:
                between = None  # every stage seeds it before the first draw of a node
            if between is not None:
                what = f"{unit} and code between units draw from one generator of random numbers"
                yield max(1, min(between, first + 1)), ANYWHERE, what
            elif drawing[-1] > first:
                what = f"{unit} and others draw from one generator of random numbers; give each its own"
                yield first + 1, drawing[-1], what
