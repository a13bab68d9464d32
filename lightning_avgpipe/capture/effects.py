"""Record the effects of a step on attributes, objects, variables and generators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_avgpipe.capture.draft import END_OF_STEP, Pin
from lightning_avgpipe.capture.events import AttributeEvents, Names, ObjectEvents
from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.reads import Key, Now
from lightning_avgpipe.state.objects import is_generator, is_iterator
from lightning_avgpipe.state.snapshot import Snapshot, keys_leading_to
from lightning_avgpipe.utils.names import joined


class Effects:
    """A record of what a step does to attributes, objects and variables.

    Args:
        module: module whose attributes, and whose code's variables, are watched.
        mutable: ids of objects that are known to change.
        unseen: attributes that are assigned, as an earlier run has found, in a way that is not seen.
        now: returns the number of nodes so far, and whether a unit is running.
        ignore: modules that only observe; they are not watched.

    Attributes:
        mutable: these ids, and those that were found since.
        attributes: reads and assignments of attributes.
        objects: changes of objects in place.
        generators: draws from random generators that the model holds.
        assigned: after the step, the attributes that code between units assigns in every step.
        set_back: after the step, the attributes and variables that it changed and set back, or whose objects it did.
        changed_by_units: after the step, the attributes that units assign in every step, or whose objects they change.
        changed_once_by_units: after the step, those that units assign or change in the first step only.
    """

    def __init__(
        self, module: nn.Module, mutable: Collection[int], unseen: Collection[Key], now: Now,
        ignore: Collection[nn.Module],
    ) -> None:  # fmt: skip
        ignored = {id(m) for observer in ignore for m in observer.modules()}
        modules = {path: m for path, m in module.named_modules() if id(m) not in ignored}
        self.mutable = set(mutable)
        self.objects = ObjectEvents(module, modules, mutable, now)
        self.attributes = AttributeEvents(modules, unseen, now, self.objects.empty)
        self.attributes.followed |= self.objects.leading.keys()
        self.generators = GeneratorDraws(self.objects)
        self._module = module
        self._unseen = frozenset(unseen)
        self._reassigned: set[Key] = set()
        self.assigned: tuple[Key, ...] = ()
        self.set_back: set[Key] = set()
        self.changed_by_units: set[Key] = set()
        self.changed_once_by_units: set[Key] = set()
        self._now = now
        self._next_look = 1  # position at which all objects are compared next

    # -- events -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note the effects of code between units that has just run.

        A few times in a step all objects are compared, to find those that the step changes and sets back.
        """
        if self._now()[0] >= self._next_look:
            self._next_look *= 2
            self.mutable |= self.objects.changed_so_far()
        self.objects.look()
        self.attributes.look()

    def ran(self, unit: str, changed: Iterable[tuple[Any, Names]], followed: Collection[int]) -> None:
        """Note the effects of a unit that has run as the next node, see :meth:`ObjectEvents.ran`."""
        self.attributes.ran(unit)
        self.objects.ran(f"unit '{unit}'", changed, followed)

    def ran_freely(self, module: nn.Module, changed: Iterable[tuple[Any, Names]]) -> None:
        """Note that a free unit, which every stage runs, has changed these objects."""
        self.attributes.was_free()
        self.objects.was_free(module, changed)

    # -- after the step -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Note the state after the step has returned."""
        self.look()
        self.assigned = tuple(self.attributes.changed())
        self.generators.kept(vars(self._module.get_submodule(path)).get(name) for path, name in self.assigned)
        self.mutable |= self.objects.found()
        self._reassigned = self.objects.reassigned()
        self.changed_by_units = set(self.objects.of_units()).difference(self.assigned)
        self.set_back = self._set_back()

    def _set_back(self) -> set[Key]:
        attributes = self.attributes.set_back()
        return attributes | self.objects.set_back(attributes)

    def last_change(self, key: Key) -> int:
        """Return the last node that assigned an attribute, or changed an object in it or a variable; -1: unknown."""
        return max(self.objects.last_change(key), self.attributes.last_assignment(key))

    @property
    def may_last(self) -> bool:
        """Whether the step must run once more to find out which changes it makes in every step."""
        lasts = (
            self.changed_by_units or self.attributes.created() or self.objects.holders() or any(self.attributes.kept())
        )
        return bool(lasts or self.objects.assigned or self.generators.in_use)

    @property
    def unseen(self) -> frozenset[Key]:
        """The attributes whose assignment was not seen."""
        by_both = self.attributes.of_units.intersection(self.assigned)
        return self._unseen | ((self.changed_by_units | by_both) & self._reassigned)

    def repeated(self, again: Effects) -> None:
        """Compare with a repeated step: changes that it did not make again are made only once."""
        again.look()
        in_all = self.changed_by_units & {*again.objects.of_units(), *again.attributes.of_units}
        self.changed_by_units, self.changed_once_by_units = in_all, self.changed_by_units - in_all
        self.assigned += tuple(sorted(self.objects.assigned & again.objects.assigned))
        made = self.attributes.created() - again.attributes.assigned()
        self.assigned = tuple(key for key in self.assigned if key not in made)
        self.objects.keep(again.objects.found())
        # the first step may make an attribute of an object that later steps change and set back
        self.set_back |= again._set_back().difference(self.assigned, self.changed_by_units, self.objects.holders())
        self.generators.compare_with_repeat(again.generators)

    def pinned(self, nodes: list[Node]) -> Iterator[Pin]:
        """Yield where no cut may lie because of changed objects, unseen assignments and draws."""
        yield from self.objects.pinned(self.attributes.reads)
        yield from self.attributes.pinned_by_units()
        yield from self.generators.pinned(nodes)


# -- what a process cannot share with others: random generators and iterators that the model holds -------------------


class GeneratorDraws:
    """The draws from the generators that attributes and variables lead to.

    Each process has its own copy of such a generator. Its next draw depends on all earlier draws, including those of
    other micro-batches, so all nodes that draw must be on one stage. A generator that the step makes is sent with the
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
        """Note that a unit is given the generators among these objects; return the indices of those the step made."""
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
        """Return the ids of the generators that outlive the step and from which it drew."""
        return self._lasting & {*self._events.by_nodes, *self._events.between}

    @property
    def in_use(self) -> bool:
        """Whether any generator is used, including those that the step makes."""
        return bool(self._made or self._given or self._drawn())

    def compare_with_repeat(self, again: GeneratorDraws) -> None:
        """Find out, from the draws of a repeated step, which generators are seeded in every step or made only once."""
        known = {lead for leads in self._leads().values() for lead in leads}
        self._renewed = again._drawn() - again._events.found()
        for use in again.uses():
            if use.leads[0] not in known and (use.between is not None or len(use.nodes) > 1 or use.given):
                name = joined(*use.leads[0][:2])
                what = f"the step makes '{name}', a generator of random numbers, once; do so in __init__"
                self._pinned.append((0, END_OF_STEP, what))

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
                yield max(1, min(between, first + 1)), END_OF_STEP, what
            elif drawing[-1] > first:
                what = f"{unit} and others draw from one generator of random numbers; give each its own"
                yield first + 1, drawing[-1], what


class Iterators:
    """The iterators that attributes and variables lead to, with their positions at the time of construction.

    Such an iterator outlives the step, and its items cannot be put back. Capture, measurement and each stage would
    take different items. A step that is divided must therefore take none.

    Args:
        attributes: attributes of modules, by path and name, and variables.
    """

    def __init__(self, attributes: Mapping[Key, Any]) -> None:
        self._attributes = attributes
        self._objects = Snapshot(attributes.values(), opaque="iterators")

    def advanced(self) -> str:
        """Return the full name of an attribute or variable that leads to an advanced iterator; "" if there is none."""
        found = self._leading(one for one in self._objects.changed() if is_iterator(one))
        path, name = min(found, key=lambda key: (key[1].startswith("_"), key), default=("", ""))
        return joined(path, name)

    def leads(self) -> tuple[Key, ...]:
        """Return the attributes and variables that lead to any iterator."""
        return self._leading(self._objects.opaque)

    def _leading(self, found: Iterable[Any]) -> tuple[Key, ...]:
        return keys_leading_to(self._attributes, set(map(id, found)), "iterators")
