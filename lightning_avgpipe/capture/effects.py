"""Record the effects of a step on attributes, objects, variables and generators.

Each process has its own copy of an object that a step changes in place. Stages of other processes do not see a change
by a unit, unless the object is an argument, which is sent. They do see a change by code between units if they get that
far themselves. These rules derive from the changes and reads the positions where no cut may lie; for those of
attributes see ``events.py``:

=====================================================  ==========================================================
events of an object                                    no cut at
=====================================================  ==========================================================
read; later changed between units                      the positions between them, since the next micro-batch
                                                       reads what this one has changed
changed by a unit; read by another one                 the positions between the two
changed by a unit; read between units                  all positions from the first of them
=====================================================  ==========================================================
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import END_OF_STEP, Pin
from lightning_avgpipe.capture.events import AttributeEvents, attributes_of, is_alike
from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.reads import Key, Now, Read, VariableReads, as_free, in_order
from lightning_avgpipe.state.objects import ITEMS, Variable, is_generator, is_iterator
from lightning_avgpipe.state.outside import outside_variables
from lightning_avgpipe.state.snapshot import Snapshot, keys_leading_to
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address

Names = frozenset[Any] | None  # names of an object's attributes; None: all of its contents

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # flags of CPython: a class made at run time, a class that cannot be changed


class _OfNode(NamedTuple):
    """A change of an object by a node: its index, the names of the changed attributes, and what ran, for messages."""

    node: int
    names: Names
    by: str


class _Between(NamedTuple):
    """The changes of an object by code between units: first and last position, and names of the changed attributes."""

    obj: Any
    first: int
    last: int
    names: Names


class Effects:
    """A record of what a step does to attributes, objects and variables.

    Reads of an object's attributes are seen if its class was defined in Python. Otherwise each read of a module's
    attribute, or of a variable, that leads to the object counts as a read of the object.

    Args:
        module: module whose attributes, and whose code's variables, are watched.
        mutable: ids of objects that are known to change while the step runs; only these are watched.
        unseen: attributes that are assigned, as an earlier run has found, in a way that is not seen.
        now: returns the number of nodes so far, and whether a unit is running.
        ignore: modules that only observe; they are not watched.

    Attributes:
        held: what attributes by path and name, and variables by full name, held when the step began.
        objects: all objects that they lead to.
        mutable: the given ids, and those that were found since.
        attributes: reads and assignments of attributes.
        generators: draws from random generators that the model holds.
        by_nodes: id of an object -> its changes by nodes. Draws are changes of random generators.
        between: id of an object -> its changes by code between units.
        assigned_freely: attributes to which free units, which every stage runs, have assigned another object.
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
        self._module = module
        self._modules = {path: m for path, m in module.named_modules() if id(m) not in ignored}
        self._now = now
        self._next_look = 1  # position at which all objects are compared next
        self.mutable = set(mutable)
        named = outside_variables(module)
        self.held = attributes_of(self._modules) | {("", name): variable for name, variable in named.items()}
        self.objects = Snapshot(self.held.values(), opaque=True)
        self._empty = frozenset(id(obj) for obj, items in self.objects.items() if isinstance(obj, ITEMS) and not items)
        self._chosen = self.objects.restricted_to(
            {*mutable, *(id(one) for one in self.objects.opaque if is_generator(one))}
        )
        watched = list(self._chosen.items())
        self._seen = {
            id(obj): obj for obj, items in watched
            if items is None and not isinstance(obj, Variable)
            and type(obj).__flags__ & (_HEAP_TYPE | _IMMUTABLE) == _HEAP_TYPE
        }  # fmt: skip
        others = {id(obj) for obj, _ in watched if id(obj) not in self._seen and not is_generator(obj)}
        # attribute -> ids of the watched objects that it leads to and whose own reads are not seen
        found = {key: others & _reached(value) for key, value in self.held.items()} if others else {}
        self._leading = {key: ids for key, ids in found.items() if ids}
        self._of_variables = VariableReads(
            module, [key for key in self._leading if not key[0] and key[1] in named], now
        )
        self._reads: dict[int, dict[str, set[Read]]] = defaultdict(lambda: defaultdict(set))
        self.by_nodes: dict[int, list[_OfNode]] = defaultdict(list)
        self.between: dict[int, _Between] = {}
        self._once: dict[int, _Between] = {}  # changes that code between units makes in the first step only
        self.attributes = AttributeEvents(self._modules, unseen, now, self._empty)
        self.attributes.followed |= self._leading.keys()
        self.generators = GeneratorDraws(self)
        self._unseen = frozenset(unseen)
        self._reassigned: set[Key] = set()
        self.assigned_freely: set[Key] = set()
        self.assigned: tuple[Key, ...] = ()
        self.set_back: set[Key] = set()
        self.changed_by_units: set[Key] = set()
        self.changed_once_by_units: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads and assignments within this context."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.attributes.watched())
            for cls in {type(obj): None for obj in self._seen.values()}:
                undo.enter_context(self._watched(cls))
            undo.enter_context(self._of_variables.watched())
            yield

    def _watched(self, cls: Any) -> contextlib.AbstractContextManager[None]:
        read = cls.__getattribute__

        def watched_read(obj: Any, name: str) -> Any:
            if id(obj) in self._seen and not name.startswith("__"):
                self._reads[id(obj)][name].add(Read(*self._now(), source_line()))
            return read(obj, name)

        return replaced(cls, "__getattribute__", watched_read)

    # -- events -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note the effects of code between units that has just run.

        A few times in a step all objects are compared, to find those that the step changes and sets back.
        """
        if self._now()[0] >= self._next_look:
            self._next_look *= 2
            self.mutable |= self.found()
        self._look_at_objects()
        self.attributes.look()

    def _look_at_objects(self) -> None:
        differences = self.take()
        self._changed_between(differences)
        if differences:
            self._chosen.add_new(Snapshot([obj for obj, _ in differences], opaque=True), self.objects)

    def take(self) -> list[tuple[Any, Names]]:
        """Return the objects that have changed since the last call, and their changed attributes."""
        differences = self._chosen.differences()
        self._chosen.update(obj for obj, _ in differences)
        return differences

    def _changed_between(self, differences: Iterable[tuple[Any, Names]]) -> None:
        position = self._now()[0]
        for obj, names in differences:
            known = self.between.get(id(obj), _Between(obj, position, position, frozenset()))
            both = None if names is None or known.names is None else known.names | names
            self.between[id(obj)] = known._replace(last=position, names=both)

    @contextlib.contextmanager
    def watching_unit(self) -> Iterator[list[tuple[Any, Names]]]:
        """Run a unit within this context; the list then holds the objects that the unit has changed."""
        self._look_at_objects()
        changed: list[tuple[Any, Names]] = []
        yield changed
        changed += self.take()

    def ran(self, unit: str, changed: Iterable[tuple[Any, Names]], followed: Collection[int]) -> None:
        """Note the effects of a unit that has run as the next node; for the arguments see :meth:`changed_by`."""
        self.attributes.ran(unit)
        self.changed_by(f"unit '{unit}'", changed, followed)

    def changed_by(self, what: str, changed: Iterable[tuple[Any, Names]], followed: Collection[int] = ()) -> None:
        """Note the changes of objects by what has run as the next node.

        Args:
            what: what has run, for messages.
            changed: objects that it changed, with the names of the changed attributes.
            followed: ids of the objects among its arguments, which are sent to other stages.
        """
        for obj, names in changed:
            if id(obj) not in followed:
                self.by_nodes[id(obj)].append(_OfNode(self._now()[0], names, what))

    def ran_freely(self, module: nn.Module, changed: Iterable[tuple[Any, Names]]) -> None:
        """Count a unit as code between units: it is not a node, so every stage that gets that far runs it."""
        self.attributes.was_free()
        here = self._now()[0]
        for names in self._reads.values():
            names.update({name: set(as_free(reads, here)) for name, reads in names.items()})
        of_variables = self._of_variables.reads
        of_variables.update({key: as_free(reads, here) for key, reads in of_variables.items()})
        self._changed_between(changed)
        inner = {id(m) for m in module.modules()}
        self.assigned_freely |= self._reassigned_in({path: m for path, m in self._modules.items() if id(m) in inner})

    # -- after the step -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Note the state after the step has returned."""
        self.look()
        self.assigned = tuple(self.attributes.changed())
        self.generators.kept(vars(self._module.get_submodule(path)).get(name) for path, name in self.assigned)
        self.mutable |= self.found()
        self._reassigned = self._reassigned_in(self._modules)
        self.changed_by_units = self._of_units().difference(self.assigned)
        self.set_back = self._set_back()

    @cached_property
    def _reach(self) -> dict[Key, set[int]]:
        """The ids of the objects and tensors that each attribute and variable leads to after the step."""
        return {key: _reached(held) for key, held in self.held.items()}

    def found(self) -> frozenset[int]:
        """Return the ids of the objects that have changed since the step began, by any code."""
        return frozenset(id(obj) for obj in self.objects.changed() if not isinstance(obj, Tensor))

    def _of_units(self) -> set[Key]:
        """Return the attributes that units or glue assign, and those whose objects units change."""
        changed = self.found() - self.between.keys()
        leading = [key for key, ids in self._reach.items() if not ids.isdisjoint(changed)] if changed else []
        now = attributes_of(self._modules).keys() | {
            key for key, held in self.held.items() if isinstance(held, Variable)
        }
        return set(leading) & now | self._reassigned_in(self._modules)

    def _reassigned_in(self, modules: Mapping[str, nn.Module]) -> set[Key]:
        """Return the attributes that hold another object than when the step began, whatever code assigned them."""
        now, before = attributes_of(modules), self.held
        return {key for key, held in now.items() if key not in before or not is_alike(before[key], held, self._empty)}

    def _set_back(self) -> set[Key]:
        """Return the attributes and variables that the step has changed and set back, or whose objects it has.

        The changes of such objects by code between units are dropped from the events: the next micro-batch does not see
        them, provided that each stage that leaves the step before its end restores these objects.
        """
        attributes = self.attributes.set_back()
        changed = [obj for obj, change in self.between.items() if not is_generator(change.obj)]
        if not changed:
            return attributes
        lasting = self.found()
        leads = {obj: [key for key, ids in self._reach.items() if obj in ids] for obj in changed}
        passing = {
            obj for obj, keys in leads.items()
            if all(key in attributes or lasting.isdisjoint(self._reach[key]) for key in keys)
        }  # fmt: skip
        self.between = {obj: change for obj, change in self.between.items() if obj not in passing}
        return attributes.union(*(leads[obj] for obj in passing))

    @property
    def may_last(self) -> bool:
        """Whether the step must run once more to find out which changes it makes in every step."""
        lasts = self.changed_by_units or self.attributes.created() or self.holders() or any(self.attributes.kept())
        return bool(lasts or self.assigned_freely or self.generators.in_use)

    @property
    def unseen(self) -> frozenset[Key]:
        """The attributes whose assignment was not seen."""
        by_both = self.attributes.of_units.intersection(self.assigned)
        return self._unseen | ((self.changed_by_units | by_both) & self._reassigned)

    def repeated(self, again: Effects) -> None:
        """Compare with a repeated step: changes that it did not make again are made only once.

        Objects that are changed only once, such as a cache that is filled, are shared by all stages of a process. If
        each stage had a copy, it would also make again whatever was made along with them.
        """
        again.look()
        in_all = self.changed_by_units & {*again._of_units(), *again.attributes.of_units}
        self.changed_by_units, self.changed_once_by_units = in_all, self.changed_by_units - in_all
        self.assigned += tuple(sorted(self.assigned_freely & again.assigned_freely))
        made = self.attributes.created() - again.attributes.assigned()
        self.assigned = tuple(key for key in self.assigned if key not in made)
        # what changes again includes containers that the step makes anew
        changing = set(keys_leading_to({key: change.obj for key, change in self.between.items()}, again.found()))
        self._once = {key: change for key, change in self.between.items() if key not in changing}
        self.between = {key: change for key, change in self.between.items() if key in changing}
        # the first step may make an attribute of an object that later steps change and set back
        self.set_back |= again._set_back().difference(self.assigned, self.changed_by_units, self.holders())
        self.generators.compare_with_repeat(again.generators)

    def holders(self) -> dict[Key, int]:
        """Return the attributes that lead to objects changed between units, with the position of the first change."""
        found = {key: self._positions(ids) for key, ids in self._reach.items()} if self.between else {}
        return {key: min(first for first, _ in positions) for key, positions in found.items() if positions}

    def _positions(self, reached: Collection[int]) -> list[tuple[int, int]]:
        """Return the first and last position of the changes between units, for each changed one of these objects."""
        return [(change.first, change.last) for key, change in self.between.items() if key in reached]

    def last_change(self, key: Key) -> int:
        """Return the last node that assigned an attribute, or changed an object in it or a variable; -1: unknown."""
        reached = self.by_nodes.keys() & self._reach.get(key, ()) if self.by_nodes else ()
        last = max((change.node for obj in reached for change in self.by_nodes[obj]), default=-1)
        return max(last, self.attributes.last_assignment(key))

    def parts(self) -> dict[Key, frozenset[Any]]:
        """Return the attributes that hold an object of which units change only some attributes, with their names."""
        found: dict[Key, frozenset[Any]] = {}
        for key, held in self.held.items() if self.by_nodes else ():
            names = [change.names for change in self.by_nodes.get(id(held), ())]
            known = frozenset[Any]().union(*(each or () for each in names))
            reached = self.by_nodes.keys() & self._reach[key]
            only = id(held) in self._seen and reached == {id(held)} and None not in names
            if only and known <= getattr(held, "__dict__", {}).keys():
                found[key] = known
        return found

    def written(self, memory: Collection[int]) -> tuple[Key, ...]:
        """Return the attributes and variables that lead to tensors with memory at these addresses."""
        reached = {key: Snapshot([held]).tensors for key, held in self.held.items()} if memory else {}
        return tuple(key for key, tensors in reached.items() if any(address(t) in memory for t in tensors))

    # -- rules --------------------------------------------------------------------------------------------------------

    def pinned(self, nodes: list[Node]) -> Iterator[Pin]:
        """Yield where no cut may lie because of changed objects, unseen assignments and draws."""
        reads = {**self.attributes.reads, **self._of_variables.reads}
        yield from self._pinned_by_glue(reads)
        described = "{} is read at {}, and ".format
        for found, changes in self.by_nodes.items():
            for node, names, by in changes:
                for what, read in self._reads_of(found, names, reads):
                    yield *read.apart_from(node), f"{described(what, read.source)}{by} changes it"
        for found, change in self._once.items():
            for what, read in self._reads_of(found, change.names, reads):
                if read.position < change.first:
                    why = f"{described(what, read.source)}changed later, for the next micro-batch"
                    yield read.end, change.first - 1, why
        yield from self.attributes.pinned_by_units()
        yield from self.generators.pinned(nodes)

    def _pinned_by_glue(self, reads: Mapping[Key, list[Read]]) -> Iterator[Pin]:
        """Yield where no cut may lie because of objects that code between units changes for the next micro-batch.

        A stage that reads an object which the previous step changed must also execute the change.
        """
        for key in self.holders():
            # reads that bypass __getattribute__ are not seen
            unseen = Read(0, False, "a line that does not name it", self.held[key])
            for read in (read for read in reads.get(key, [unseen]) if not read.adds):
                change = max((last for _, last in self._positions(_reached(read.held))), default=-1)
                if read.end < change:
                    why = f"'{joined(*key)}' is read at {read.source}, and its contents are changed later"
                    where = "for the next micro-batch; change them before the first submodule is called"
                    yield read.end, change - 1, f"{why}, {where}"

    def _reads_of(self, found: int, names: Names, reads: Mapping[Key, list[Read]]) -> Iterator[tuple[str, Read]]:
        """Yield the reads of these attributes of an object, each with a description of what is read."""
        for name, own in self._reads.get(found, {}).items():
            if names is None or name in names:
                yield from ((f"the attribute '{name}' of an object", read) for read in in_order(own))
        for key, ids in self._leading.items():
            if found in ids:
                yield from ((f"what '{joined(*key)}' holds", read) for read in in_order(reads.get(key, ())))


def _reached(held: Any) -> set[int]:
    """Return the ids of the objects and tensors that an object leads to."""
    return Snapshot([held], opaque=True).reached()


# -- what a process cannot share with others: random generators and iterators that the model holds -------------------


class GeneratorDraws:
    """The draws from the generators that attributes and variables lead to.

    Each process has its own copy of such a generator. Its next draw depends on all earlier draws, including those of
    other micro-batches, so all nodes that draw must be on one stage. A generator that the step makes is sent with the
    micro-batch instead.

    Args:
        events: effects of the step, among them draws.
    """

    def __init__(self, events: Effects) -> None:
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
        for (path, name), held in self._events.held.items() if self._lasting else ():
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
