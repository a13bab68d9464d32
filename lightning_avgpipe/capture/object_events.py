"""Watch objects that a step changes in place, and the code that reads them, as events at positions between nodes.

Each process has its own copy of such an object. Stages of other processes do not see a change by a unit, unless the
object is an argument, which is sent. They do see a change by code between units if they get that far themselves.

=====================================================  ==========================================================
events                                                 no cut at
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
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_avgpipe.capture.attribute_events import Key, Names, Now, Read, as_free, in_order
from lightning_avgpipe.capture.draft import Pin
from lightning_avgpipe.state.objects import OF_EVERY_MODULE, Variable, is_generator
from lightning_avgpipe.state.outside import outside, places
from lightning_avgpipe.state.snapshot import Snapshot, leading
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address

_HEAP_TYPE = 1 << 9  # flag of a class that Python code has defined, whose methods can be replaced


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[Key, Any]:
    """Return the attributes of modules by path and name."""
    return {
        (path, name): held for path, m in modules.items() for name, held in vars(m).items()
        if name not in OF_EVERY_MODULE
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

    Reads of an object's attributes are seen if Python code has defined its class. Otherwise each read of a module's
    attribute that leads to the object counts.

    Args:
        module: module whose code names the variables.
        modules: modules whose attributes lead to the objects, by path.
        chosen: ids of the objects that are known to change while the step runs; only these are watched.
        now: tells the position.

    Attributes:
        attributes: attributes by path and name, and variables outside of modules by full name.
        objects: all objects that attributes and variables lead to.
        by_nodes: id of an object -> its changes by nodes. Draws are changes of random generators.
        between: id of an object -> its changes by code between units.
        leading: attribute -> ids of the watched objects that it leads to, if their own reads are not seen.
        assigned: attributes that hold another object since units ran that every stage runs.
    """

    def __init__(self, module: nn.Module, modules: Mapping[str, nn.Module], chosen: Collection[int], now: Now) -> None:
        self._module = module
        self._modules = modules
        self._now = now
        self.attributes = attributes_of(modules)
        self.attributes |= {("", name): variable for name, variable in outside(module).items()}
        self.objects = Snapshot(self.attributes.values(), opaque=True)
        self._chosen = self.objects.among({*chosen, *(id(one) for one in self.objects.opaque if is_generator(one))})
        watched = list(self._chosen.items())
        self._seen = {id(obj): obj for obj, items in watched if items is None and type(obj).__flags__ & _HEAP_TYPE}
        others = {id(obj) for obj, _ in watched if id(obj) not in self._seen and not is_generator(obj)}
        reached = {key: Snapshot([held], opaque=True) for key, held in self.attributes.items() if others}
        found = {key: {one for one in others if snapshot.reach({one})} for key, snapshot in reached.items()}
        self.leading = {key: ids for key, ids in found.items() if ids}
        self._reads: dict[int, dict[str, set[Read]]] = defaultdict(lambda: defaultdict(set))
        self.by_nodes: dict[int, list[_OfNode]] = defaultdict(list)
        self.between: dict[int, _Between] = {}
        self._once: dict[int, _Between] = {}  # changes between units in the first step only
        self.assigned: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads of the objects within this context."""
        with contextlib.ExitStack() as undo:
            for cls in {type(obj): None for obj in self._seen.values()}:
                undo.enter_context(self._watched(cls))
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
        differences = self._take()
        self._changed_between(differences)
        if differences:
            self._chosen.adopt(Snapshot([obj for obj, _ in differences], opaque=True), self.objects)

    def _take(self) -> list[tuple[Any, Names]]:
        """Return the objects that have changed since the last call, and their changed attributes."""
        differences = self._chosen.differences()
        self._chosen.follow(obj for obj, _ in differences)
        return differences

    def _changed_between(self, differences: Iterable[tuple[Any, Names]]) -> None:
        position = self._now()[0]
        for obj, names in differences:
            known = self.between.get(id(obj), _Between(obj, position, position, frozenset()))
            both = None if names is None or known.names is None else known.names | names
            self.between[id(obj)] = known._replace(last=position, names=both)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[list[tuple[Any, Names]]]:
        """Run a unit within this context; the list then holds the objects that the unit has changed."""
        self.look()
        changed: list[tuple[Any, Names]] = []
        yield changed
        changed += self._take()

    def pass_over(self) -> None:
        """Ignore all changes so far: code between units did not make them."""
        self._take()

    def glue_ran(self, name: str) -> None:
        """Note the changes of a glue operation that has run as the next node."""
        self.ran(f"{name}()", self._take())

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
        """Count the last unit as code between units: it is no node, so every stage that gets that far runs it."""
        here = self._now()[0]
        for names in self._reads.values():
            names.update({name: set(as_free(reads, here)) for name, reads in names.items()})
        self._changed_between(changed)
        inner = {id(m) for m in module.modules()}
        self.assigned |= self._reassigned({path: m for path, m in self._modules.items() if id(m) in inner})

    # -- after the step -----------------------------------------------------------------------------------------------

    def found(self) -> frozenset[int]:
        """Return the ids of the objects that have changed since the step began, by any code."""
        return frozenset(id(obj) for obj in self.objects.changed() if not isinstance(obj, Tensor))

    def keep(self, lasting: Collection[int]) -> None:
        """Forget objects that do not change again when the step runs once more, such as a cache that is filled once.

        Such objects are shared by all stages of a process. A copy per stage would also repeat all that was made along
        with them.

        Args:
            lasting: ids of the objects that changed again, including containers that the step makes anew.
        """
        changing = set(leading({key: change.obj for key, change in self.between.items()}, lasting))
        self._once = {key: change for key, change in self.between.items() if key not in changing}
        self.between = {key: change for key, change in self.between.items() if key in changing}

    def holders(self) -> dict[Key, int]:
        """Return the attributes that lead to objects changed between units, with the position of the first change."""
        found = {key: self._positions(held) for key, held in self.attributes.items()} if self.between else {}
        return {key: min(first for first, _ in positions) for key, positions in found.items() if positions}

    def _positions(self, held: Any) -> list[tuple[int, int]]:
        """Return the first and last positions of changes between units of what an object leads to."""
        reached = Snapshot([held], opaque=True)
        return [(change.first, change.last) for key, change in self.between.items() if reached.reach({key})]

    def of_units(self) -> tuple[Key, ...]:
        """Return the attributes that units or glue assign, and those whose objects units change."""
        before = self.attributes
        now = attributes_of(self._modules).keys() | {key for key, held in before.items() if isinstance(held, Variable)}
        return tuple(sorted(set(leading(before, self.found() - self.between.keys())) & now | self.reassigned()))

    def reassigned(self) -> set[Key]:
        """Return the attributes that hold another object than when the step began, whoever assigned them."""
        return self._reassigned(self._modules)

    def _reassigned(self, modules: Mapping[str, nn.Module]) -> set[Key]:
        now = attributes_of(modules)
        return {key for key, held in now.items() if self.attributes.get(key) is not held}

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
        variables = {("", name) for name in outside(self._module)}
        for key in self.holders():
            lines = places(self._module, key[1]) if key in variables else []
            if len(lines) == 1:
                continue  # a single line: it reads the variable, if at all, where it changes it
            if key in reads:
                loads = [read for read in reads[key] if not read.adds]
            else:  # reads of variables, and reads that bypass __getattribute__, are not watched
                loads = [Read(0, False, " or ".join(lines[:2]) or "a line that does not name it", self.attributes[key])]
            for read in loads:
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
        through = (read for key, ids in self.leading.items() if found in ids for read in reads.get(key, ()))
        yield from (("an object", read) for read in in_order(through))
