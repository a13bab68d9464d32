"""Watch which attributes and objects a step reads and changes, as events between nodes.

::

    position        0                         1                        2
                      | unit 'a'                | unit 'b'               | loss
    between units   n = self.n + 1            1 + max(self.b.load)     self.n = n      each stage that gets there
    inside of units                             self.load = [3, 1]                     one stage

Each process has its own copy of an object that a step changes in place. Stages of other processes do not see a change
by a unit, unless the object is an argument, which is sent. They do see a change by code between units if they get that
far themselves. These rules derive from the events the positions where no cut may lie:

=====================================================  ==========================================================
events of an attribute                                 no cut at
=====================================================  ==========================================================
read; later assigned between units                     the positions between them, since the next micro-batch
                                                       reads what this one has assigned
assigned by a unit; read later, and not sent along     all positions from the assignment to the read
read; later assigned by a unit                         the positions between them, for the next micro-batch
-----------------------------------------------------  ----------------------------------------------------------
events of an object                                    no cut at
-----------------------------------------------------  ----------------------------------------------------------
read; later changed between units                      the positions between them, since the next micro-batch
                                                       reads what this one has changed
changed by a unit; read by another one                 the positions between the two
changed by a unit; read between units                  all positions from the first of them
=====================================================  ==========================================================
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import Pin
from lightning_avgpipe.capture.reads import Key, Now, Read, VariableReads, as_free, in_order, only_adds
from lightning_avgpipe.state.objects import ATOMS, BASE_MODULE_ATTRIBUTES, ITEMS, Variable, is_generator
from lightning_avgpipe.state.outside import outside_variables
from lightning_avgpipe.state.snapshot import Snapshot, keys_leading_to
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within, joined
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import KnownTensors
from lightning_avgpipe.utils.torch_compat import REGISTRIES, address, untraced

Names = frozenset[Any] | None  # names of an object's attributes; None: all of its contents

_MISSING = object()


class _Assignment(NamedTuple):
    """An assignment of an attribute by code between units.

    The fields are: how many nodes came before, the line, the layout of the tensors in the assigned value, whether any
    of them has a gradient history, and whether the value differs from the one before the step.
    """

    position: int
    source: str
    layout: Any
    has_history: bool
    is_other: bool


class HeldTensors:
    """A record of tensors in attributes, followed through glue that computes other tensors from them.

    Attributes:
        uses: attribute -> index of the first node that takes its tensor, or one that was computed from it.
    """

    def __init__(self) -> None:
        self._holders = KnownTensors[frozenset[Key]]()
        self.uses: dict[Key, int] = {}

    def add(self, tensors: Iterable[Tensor], *keys: Key) -> None:
        """Note that these attributes hold these tensors."""
        for tensor in tensors:
            self._holders.learn(tensor, self._keys([tensor]).union(keys))

    def taken(self, tensors: Iterable[Tensor], node: int) -> None:
        """Note that a node takes these tensors, which no node of this step has made."""
        for key in self._keys(tensors):
            self.uses.setdefault(key, node)

    def computed(self, tensors: Iterable[Tensor], result: Any, position: int) -> None:
        """Note that free glue computed this result from these tensors, at a position before the next node."""
        keys = self._keys(tensors)
        if not keys:
            return
        if all(isinstance(leaf, Tensor) for leaf in tree.flatten(result)[0]):
            self.add(tree.tensors(result), *keys)
            return
        for key in keys:  # plain numbers are not followed, so they count as used here
            self.uses.setdefault(key, position - 1)

    def _keys(self, tensors: Iterable[Tensor]) -> frozenset[Key]:
        return frozenset[Key]().union(*(self._holders.own_value_of(tensor) or () for tensor in tensors))


class AttributeEvents:
    """The reads and assignments of modules' attributes in one step.

    Of an assignment inside of a unit only the name is noted when it happens, since it is not known yet whether the unit
    becomes a node. An assignment that bypasses ``nn.Module.__setattr__`` is not seen at all. The attributes for which
    an earlier execution has found this are ``unseen``: their values are compared before and after each node.

    Args:
        modules: modules to watch, by path.
        unseen: attributes whose assignments are known not to be seen.
        now: returns the position, and whether a unit is running.
        empty: ids of the containers that were empty when the step began.

    Attributes:
        followed: attributes of which all reads are noted, not only the first; these include ``unseen``.
        held: the tensors that attributes hold, and the tensors that are computed from them.
        reads: attribute -> its reads.
        first_reads: attribute -> number of nodes before its first read.
        read_between: attribute that code between units reads -> number of nodes before its last read.
        of_units: attributes that units have assigned, even if the value is the same as before.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], unseen: Collection[Key], now: Now, empty: Collection[int]
    ) -> None:
        self._modules = modules
        self._empty = empty
        self._paths = {id(m): path for path, m in modules.items()}
        self._now = now
        self._unseen = {key: self._value(key) for key in unseen if key[0] in modules}
        self.followed = set(self._unseen)
        self.reads: dict[Key, list[Read]] = {}
        self._assignments: dict[Key, list[_Assignment]] = defaultdict(list)
        self._by_units: dict[Key, dict[int, str]] = defaultdict(dict)  # node -> name of the unit
        self._before: dict[Key, Any] = {}
        self.held = HeldTensors()
        self.first_reads: dict[Key, int] = {}
        self.read_between: dict[Key, int] = {}
        self.of_units: set[Key] = set()

    def _value(self, key: Key) -> Any:
        return vars(self._modules[key[0]]).get(key[1], _MISSING)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads and assignments of attributes within this context."""
        assign = nn.Module.__setattr__
        read = nn.Module.__getattribute__

        def watched_assign(module: nn.Module, name: str, value: Any) -> None:
            with untraced():
                self._assigned(module, name, value)
            assign(module, name, value)

        def watched_read(module: nn.Module, name: str) -> Any:
            if name not in BASE_MODULE_ATTRIBUTES and name not in ("__dict__", "__class__"):
                with untraced():
                    self._was_read(module, name)
            return read(module, name)

        watching_reads = replaced(nn.Module, "__getattribute__", watched_read)
        with replaced(nn.Module, "__setattr__", watched_assign), watching_reads:
            yield

    def _key(self, module: nn.Module, name: str) -> Key | None:
        path = self._paths.get(id(module))
        return None if path is None or self._modules[path] is not module else (path, name)

    # -- events -------------------------------------------------------------------------------------------------------

    def _was_read(self, module: nn.Module, name: str) -> None:
        key = self._key(module, name)
        if key is None:
            return
        position, in_unit = self._now()
        if name in vars(module):
            held = vars(module)[name]
            self.first_reads.setdefault(key, position)
        else:  # a class attribute, until an instance assigns its own
            held = getattr(type(module), name, _MISSING)
            if held is _MISSING or hasattr(held, "__get__"):
                return
        if not in_unit:
            self.read_between[key] = position
        reads, carried = self.reads.setdefault(key, []), key not in self._assignments
        adds = only_adds(sys._getframe(2), held)
        known = adds or any(r.held is held and r.carried >= carried and not r.adds for r in reads)
        if carried and not known:
            self.held.add(Snapshot((held,)).tensors, key)
        if not known or key in self.followed:
            own = key in self._unseen and self._value(key) is not self._unseen[key]
            reads.append(Read(position, in_unit, source_line(), held, carried, adds, own))

    def _assigned(self, module: nn.Module, name: str, value: Any) -> None:
        (position, in_unit), key = self._now(), self._key(module, name)
        if key is None or any(name in vars(module)[register] for register in REGISTRIES):
            return
        if in_unit:
            self.of_units.add(key)
            return
        is_other = value is not self._before.setdefault(key, self._value(key))
        self._note(key, position, source_line(), value, is_other)

    def _note(self, key: Key, position: int, source: str, value: Any, is_other: bool) -> None:
        tensors = Snapshot((value,)).tensors
        has_history = any(tensor.grad_fn is not None for tensor in tensors)
        self._assignments[key].append(_Assignment(position, source, _layout(value), has_history, is_other))
        self.held.add(tensors, key)

    def look(self) -> None:
        """Note the assignments by code between units that bypassed ``nn.Module.__setattr__``."""
        position = self._now()[0]
        for key, before in self.ignore_unseen():
            if all(known.position != position for known in self._assignments[key]):
                self._before.setdefault(key, before)
                value = None if self._value(key) is _MISSING else self._value(key)
                self._note(key, position, "a line that goes past nn.Module.__setattr__", value, True)

    def ignore_unseen(self) -> list[tuple[Key, Any]]:
        """Ignore unseen assignments since the last call; return their attributes, and what these held before."""
        found = [(key, held) for key, held in self._unseen.items() if self._value(key) is not held]
        self._unseen.update((key, self._value(key)) for key, _ in found)
        return found

    def ran(self, unit: str) -> None:
        """Note the unseen assignments of a unit that has run as the next node, but those of tensors."""
        for key, _ in self.ignore_unseen():
            if not Snapshot((self._unseen[key],)).tensors:
                self._by_units[key][self._now()[0]] = unit

    def was_free(self) -> None:
        """Count the last unit as code between units: it is not a node, so every stage that gets that far runs it."""
        self.ignore_unseen()
        here = self._now()[0]
        self.reads = {key: as_free(reads, here) for key, reads in self.reads.items()}

    # -- after the step -----------------------------------------------------------------------------------------------

    def changed(self) -> list[Key]:
        """Return the attributes whose value is another object than before the step; empty containers count as equal."""
        return [key for key, old in self._before.items() if not _is_alike(old, self._value(key), self._empty)]

    def set_back(self) -> set[Key]:
        """Return the attributes that the step changes and sets back, such as a flag, or a list that is empty again."""
        return self._given_others().difference(self.changed())

    def _given_others(self) -> set[Key]:
        """Return the attributes to which code between units has assigned another object than before the step."""
        return {key for key, found in self._assignments.items() if any(one.is_other for one in found)}

    def created(self) -> set[Key]:
        """Return the attributes that did not exist before the step."""
        return {key for key in self.changed() if self._before[key] is _MISSING}

    def assigned(self) -> set[Key]:
        """Return all attributes that code between units assigned, even if the value is the same as before."""
        return set(self._assignments)

    def _first(self, key: Key) -> Read | None:
        """Return the first read that may see a value of the previous step; None if there is none."""
        reads = (read for read in self.reads.get(key, ()) if read.carried and not read.adds)
        return min(reads, key=lambda read: read.end, default=None)

    def kept(self, mutated: Iterable[Key] = ()) -> Iterator[Key]:
        """Yield attributes that the step reads, and in which it leaves tensors with two or more dimensions.

        Args:
            mutated: attributes that hold objects in which the step changes something.
        """
        for key in dict.fromkeys((*self.changed(), *mutated)):
            held = Snapshot((self._value(key) if key[0] in self._modules else None,)).tensors
            if self._first(key) and any(tensor.ndim > 1 for tensor in held):
                yield key

    def carried(self, mutated: Iterable[Key]) -> Iterator[str]:
        """Yield the full names of the kept attributes from which the step takes tensors of the previous micro-batch."""
        return (joined(*key) for key in self.kept(mutated) if key in self.held.uses)

    def last_assignment(self, key: Key) -> int:
        """Return the last node that assigned an attribute; -1: none that is known."""
        return max(self._by_units.get(key, ()), default=-1)

    def exports(self) -> set[str]:
        """Return the units whose attributes are read later, and must therefore be sent along with the unit's result."""
        return {unit for key, _, _, unit in self._read_later() if is_within(joined(*key), unit)}

    def _read_later(self) -> Iterator[tuple[Key, Read, int, str]]:
        """Yield each read after an assignment by a unit, with the last node that assigned before, and its unit."""
        for key, by in self._by_units.items():
            for read in self._reads_of(key):
                node = max((node for node in by if node < read.position), default=None)
                if node is not None:
                    yield key, read, node, by[node]

    def _reads_of(self, key: Key) -> list[Read]:
        return in_order(read for read in self.reads.get(key, ()) if not read.own)

    # -- rules --------------------------------------------------------------------------------------------------------

    def pinned(self) -> Iterator[Pin]:
        """Yield where no cut may lie because code between units assigns what the next micro-batch reads.

        A stage that reads an attribute which the previous step assigned must also execute the assignment.

        ::

            training_step    if h is None: h = zeros | embed | rnn(x, h) | decoder | h = ... of rnn
            stage 0          reads h, which stays zeros here; no node of this stage takes it
            stage 1                                    takes h, and reaches the last assignment
        """
        # an attribute that was assigned the object that it had may get another one in another micro-batch
        yield from self._pinned((*self.changed(), *(self._assigned_same() - self._constants())))

    def pinned_by_constants(self) -> Iterator[Pin]:
        """Yield the same for attributes that were assigned the number, text or None that they had.

        These may be constants, so the rule may be dropped. Then each stage checks in training that they stay the same.
        """
        yield from self._pinned(sorted(self._constants()))

    def _assigned_same(self) -> set[Key]:
        return self._assignments.keys() - self._given_others()

    def _constants(self) -> set[Key]:
        return {key for key in self._assigned_same() if type(self._before[key]) in ATOMS}

    def _pinned(self, keys: Iterable[Key]) -> Iterator[Pin]:
        for key in keys:
            first, found = self._first(key), self._assignments[key]
            if first is None:
                continue
            last = found[-1]
            reason = (
                f"the attribute '{joined(*key)}' is read at {first.source} and assigned at {last.source}, for the next "
                "micro-batch; assign it before the first submodule is called, or in on_train_batch_start. Keep hidden "
                "states in one attribute for each layer, which is read and assigned beside its call"
            )
            for end in range(first.end, last.position):
                held = next((one for one in reversed(found) if one.position <= end), None)
                alike = held is not None and held.layout is not None and held.layout == last.layout
                if held is not None and held.has_history > last.has_history:
                    alike = False  # a later micro-batch would extend a graph that this one's backward has freed
                if not alike or self.held.uses.get(key, last.position) < end:
                    yield end, end, reason

    def pinned_by_units(self) -> Iterator[Pin]:
        """Yield where no cut may lie because units assign attributes.

        Values that a unit leaves in another module, or for the next micro-batch, are not sent.
        """
        reason = "the attribute '{}' is read at {}, and unit '{}' assigns it"
        for key, read, node, unit in self._read_later():
            if not is_within(joined(*key), unit):
                yield *read.apart_from(node), reason.format(joined(*key), read.source, unit)
        for key, by in self._by_units.items():
            for read in self._reads_of(key):
                if read.carried and read.position <= min(by):  # reads the value of the previous micro-batch
                    why = reason.format(joined(*key), read.source, by[max(by)])
                    yield *read.apart_from(max(by)), f"{why} for the next micro-batch"


def _is_alike(before: Any, now: Any, empty: Collection[int]) -> bool:
    """Return whether an attribute holds the same object as before, or again an empty container of the same type."""
    return before is now or (type(before) is type(now) and isinstance(now, ITEMS) and not now and id(before) in empty)


def _layout(value: Any) -> Any:
    """Return the tree structure of a value that holds tensors only; None if it holds anything else."""
    try:
        leaves, spec = tree.flatten(value)
    except RecursionError:  # a value that contains itself is not a tree
        return None
    return spec if leaves and all(isinstance(leaf, Tensor) for leaf in leaves) else None


# -- objects that a step changes in place ----------------------------------------------------------------------------

_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # flags of CPython: a class made at run time, a class that cannot be changed


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[Key, Any]:
    """Return the attributes of modules by path and name."""
    return {
        (path, name): held for path, m in modules.items() for name, held in vars(m).items()
        if name not in BASE_MODULE_ATTRIBUTES
    }  # fmt: skip


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


class ObjectEvents:
    """The changes and reads, in one step, of objects in attributes and variables.

    Reads of an object's attributes are seen if its class was defined in Python. Otherwise each read of a module's
    attribute, or of a variable, that leads to the object counts as a read of the object.

    Args:
        module: module whose code names the variables.
        modules: modules whose attributes lead to the objects, by path.
        chosen: ids of the objects that are known to change while the step runs; only these are watched.
        now: returns the position, and whether a unit is running.

    Attributes:
        attributes: attributes by path and name, and variables outside of modules by full name.
        objects: all objects that attributes and variables lead to.
        empty: ids of the containers among them that were empty when the step began.
        by_nodes: id of an object -> its changes by nodes. Draws are changes of random generators.
        between: id of an object -> its changes by code between units.
        leading: attribute -> ids of the watched objects that it leads to and whose own reads are not seen.
        assigned: attributes to which free units, which every stage runs, have assigned another object.
    """

    def __init__(self, module: nn.Module, modules: Mapping[str, nn.Module], chosen: Collection[int], now: Now) -> None:
        self._modules = modules
        self._now = now
        self.attributes = attributes_of(modules)
        named = outside_variables(module)
        self.attributes |= {("", name): variable for name, variable in named.items()}
        self.objects = Snapshot(self.attributes.values(), opaque=True)
        self.empty = frozenset(id(obj) for obj, items in self.objects.items() if isinstance(obj, ITEMS) and not items)
        self._chosen = self.objects.restricted_to(
            {*chosen, *(id(one) for one in self.objects.opaque if is_generator(one))}
        )
        opaque = set(map(id, self.objects.opaque))
        self._compared = self.objects.restricted_to(self.objects.indices.keys() - opaque)
        watched = list(self._chosen.items())
        self._seen = {
            id(obj): obj for obj, items in watched
            if items is None and not isinstance(obj, Variable)
            and type(obj).__flags__ & (_HEAP_TYPE | _IMMUTABLE) == _HEAP_TYPE
        }  # fmt: skip
        others = {id(obj) for obj, _ in watched if id(obj) not in self._seen and not is_generator(obj)}
        held = self.attributes if others else {}
        found = {key: others & Snapshot([value], opaque=True).reached() for key, value in held.items()}
        self.leading = {key: ids for key, ids in found.items() if ids}
        self._of_variables = VariableReads(module, [key for key in self.leading if not key[0] and key[1] in named], now)
        self._reads: dict[int, dict[str, set[Read]]] = defaultdict(lambda: defaultdict(set))
        self.by_nodes: dict[int, list[_OfNode]] = defaultdict(list)
        self.between: dict[int, _Between] = {}
        self._once: dict[int, _Between] = {}  # changes that code between units makes in the first step only
        self.assigned: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads of the objects within this context."""
        with contextlib.ExitStack() as undo:
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
        """Note the changes of code between units that has just run."""
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
        self.look()
        changed: list[tuple[Any, Names]] = []
        yield changed
        changed += self.take()

    def ran(self, by: str, changed: Iterable[tuple[Any, Names]], followed: Collection[int] = ()) -> None:
        """Note the changes of a unit that has run as the next node.

        Args:
            by: what has run, for messages.
            changed: objects that it changed, with the names of the changed attributes.
            followed: ids of the objects among its arguments, which are sent to other stages.
        """
        for obj, names in changed:
            if id(obj) not in followed:
                self.by_nodes[id(obj)].append(_OfNode(self._now()[0], names, by))

    def was_free(self, module: nn.Module, changed: Iterable[tuple[Any, Names]]) -> None:
        """Count the last unit as code between units: it is not a node, so every stage that gets that far runs it."""
        here = self._now()[0]
        for names in self._reads.values():
            names.update({name: set(as_free(reads, here)) for name, reads in names.items()})
        of_variables = self._of_variables.reads
        of_variables.update({key: as_free(reads, here) for key, reads in of_variables.items()})
        self._changed_between(changed)
        inner = {id(m) for m in module.modules()}
        self.assigned |= self._reassigned({path: m for path, m in self._modules.items() if id(m) in inner})

    # -- after the step -----------------------------------------------------------------------------------------------

    def found(self) -> frozenset[int]:
        """Return the ids of the objects that have changed since the step began, by any code."""
        return frozenset(id(obj) for obj in self.objects.changed() if not isinstance(obj, Tensor))

    def changed_so_far(self) -> frozenset[int]:
        """Return the ids of the objects, except arrays, that now differ from the beginning of the step."""
        return frozenset(id(obj) for obj, *_ in self._compared.modified())

    def set_back(self, attributes: Collection[Key]) -> set[Key]:
        """Return the attributes and variables that lead to objects which the step has changed and set back.

        The changes of such objects by code between units are dropped from the events: the next micro-batch does not see
        them, provided that each stage that leaves the step before its end restores these objects.

        Args:
            attributes: attributes that the step has set back.
        """
        changed = [obj for obj, change in self.between.items() if not is_generator(change.obj)]
        if not changed:
            return set()
        lasting = self.found()
        reached = {key: Snapshot([held], opaque=True).reached() for key, held in self.attributes.items()}
        leads = {obj: [key for key, ids in reached.items() if obj in ids] for obj in changed}
        passing = {
            obj
            for obj, keys in leads.items()
            if all(key in attributes or lasting.isdisjoint(reached[key]) for key in keys)
        }
        self.between = {obj: change for obj, change in self.between.items() if obj not in passing}
        return {key for obj in passing for key in leads[obj]}

    def keep(self, lasting: Collection[int]) -> None:
        """Forget objects that do not change again when the step runs once more, such as a cache that is filled once.

        Such objects are shared by all stages of a process. If each stage had a copy, it would also make again whatever
        was made along with them.

        Args:
            lasting: ids of the objects that changed again, including containers that the step makes anew.
        """
        changing = set(keys_leading_to({key: change.obj for key, change in self.between.items()}, lasting))
        self._once = {key: change for key, change in self.between.items() if key not in changing}
        self.between = {key: change for key, change in self.between.items() if key in changing}

    def holders(self) -> dict[Key, int]:
        """Return the attributes that lead to objects changed between units, with the position of the first change."""
        found = {key: self._positions(held) for key, held in self.attributes.items()} if self.between else {}
        return {key: min(first for first, _ in positions) for key, positions in found.items() if positions}

    def _positions(self, held: Any) -> list[tuple[int, int]]:
        """Return the first and last position of the changes between units, for each changed object in an attribute."""
        reached = Snapshot([held], opaque=True).reached()
        return [(change.first, change.last) for key, change in self.between.items() if key in reached]

    def of_units(self) -> tuple[Key, ...]:
        """Return the attributes that units or glue assign, and those whose objects units change."""
        before = self.attributes
        now = attributes_of(self._modules).keys() | {key for key, held in before.items() if isinstance(held, Variable)}
        return tuple(sorted(set(keys_leading_to(before, self.found() - self.between.keys())) & now | self.reassigned()))

    def last_change(self, key: Key) -> int:
        """Return the last node that changed what an attribute or variable leads to; -1: none that is known."""
        if not self.by_nodes or key not in self.attributes:
            return -1
        reached = Snapshot([self.attributes[key]], opaque=True).reached().intersection(self.by_nodes)
        return max((change.node for obj in reached for change in self.by_nodes[obj]), default=-1)

    def parts(self) -> dict[Key, frozenset[Any]]:
        """Return the attributes that hold an object of which units change only some attributes, with their names."""
        found: dict[Key, frozenset[Any]] = {}
        for key, held in self.attributes.items() if self.by_nodes else ():
            names = [change.names for change in self.by_nodes.get(id(held), ())]
            known = frozenset[Any]().union(*(each or () for each in names))
            reached = self.by_nodes.keys() & Snapshot([held], opaque=True).reached()
            only = id(held) in self._seen and reached == {id(held)} and None not in names
            if only and known <= getattr(held, "__dict__", {}).keys():
                found[key] = known
        return found

    def reassigned(self) -> set[Key]:
        """Return the attributes that hold another object than when the step began, whatever code assigned them."""
        return self._reassigned(self._modules)

    def _reassigned(self, modules: Mapping[str, nn.Module]) -> set[Key]:
        now, before = attributes_of(modules), self.attributes
        return {key for key, held in now.items() if key not in before or not _is_alike(before[key], held, self.empty)}

    def written(self, memory: Collection[int]) -> tuple[Key, ...]:
        """Return the attributes and variables that lead to tensors with memory at these addresses."""
        reached = {key: Snapshot([held]).tensors for key, held in self.attributes.items()} if memory else {}
        return tuple(key for key, tensors in reached.items() if any(address(t) in memory for t in tensors))

    # -- rules --------------------------------------------------------------------------------------------------------

    def pinned(self, reads: Mapping[Key, list[Read]]) -> Iterator[Pin]:
        """Yield where no cut may lie because of changed objects.

        Args:
            reads: reads of the attributes of modules.
        """
        reads = {**reads, **self._of_variables.reads}
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

    def _pinned_by_glue(self, reads: Mapping[Key, list[Read]]) -> Iterator[Pin]:
        """Yield where no cut may lie because of objects that code between units changes for the next micro-batch.

        A stage that reads an object which the previous step changed must also execute the change.
        """
        for key in self.holders():
            # reads that bypass __getattribute__ are not seen
            unseen = Read(0, False, "a line that does not name it", self.attributes[key])
            for read in (read for read in reads.get(key, [unseen]) if not read.adds):
                change = max((last for _, last in self._positions(read.held)), default=-1)
                if read.end < change:
                    why = f"'{joined(*key)}' is read at {read.source}, and its contents are changed later"
                    where = "for the next micro-batch; change them before the first submodule is called"
                    yield read.end, change - 1, f"{why}, {where}"

    def _reads_of(self, found: int, names: Names, reads: Mapping[Key, list[Read]]) -> Iterator[tuple[str, Read]]:
        """Yield the reads of these attributes of an object, each with a description of what is read."""
        for name, own in self._reads.get(found, {}).items():
            if names is None or name in names:
                yield from ((f"the attribute '{name}' of an object", read) for read in in_order(own))
        for key, ids in self.leading.items():
            if found in ids:
                yield from ((f"what '{joined(*key)}' holds", read) for read in in_order(reads.get(key, ())))
