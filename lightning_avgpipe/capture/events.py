"""Watch which attributes a step reads and assigns, as events between nodes.

::

    position        0                         1                        2
                      | unit 'a'                | unit 'b'               | loss
    between units   n = self.n + 1            1 + max(self.b.load)     self.n = n      each stage that gets there
    inside of units                             self.load = [3, 1]                     one stage

These rules derive from the events the positions where no cut may lie; for those of objects see ``effects.py``:

=====================================================  ==========================================================
events of an attribute                                 no cut at
=====================================================  ==========================================================
read; later assigned between units                     the positions between them, since the next micro-batch
                                                       reads what this one has assigned
assigned by a unit; read later, and not sent along     all positions from the assignment to the read
read; later assigned by a unit                         the positions between them, for the next micro-batch
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
from lightning_avgpipe.capture.reads import Key, Now, Read, as_free, in_order, only_adds
from lightning_avgpipe.state.objects import ATOMS, BASE_MODULE_ATTRIBUTES, ITEMS
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within, joined
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import KnownTensors
from lightning_avgpipe.utils.torch_compat import REGISTRIES, untraced

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
        return [key for key, old in self._before.items() if not is_alike(old, self._value(key), self._empty)]

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


def is_alike(before: Any, now: Any, empty: Collection[int]) -> bool:
    """Return whether an attribute holds the same object as before, or again an empty container of the same type."""
    return before is now or (type(before) is type(now) and isinstance(now, ITEMS) and not now and id(before) in empty)


def _layout(value: Any) -> Any:
    """Return the tree structure of a value that holds tensors only; None if it holds anything else."""
    try:
        leaves, spec = tree.flatten(value)
    except RecursionError:  # a value that contains itself is not a tree
        return None
    return spec if leaves and all(isinstance(leaf, Tensor) for leaf in leaves) else None


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[Key, Any]:
    """Return the attributes of modules by path and name."""
    return {
        (path, name): held for path, m in modules.items() for name, held in vars(m).items()
        if name not in BASE_MODULE_ATTRIBUTES
    }  # fmt: skip
