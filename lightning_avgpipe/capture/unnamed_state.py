"""Record state that outlives a step besides parameters and buffers: in attributes, objects and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from lightning_avgpipe.capture.attributes import Assignments, Mutations
from lightning_avgpipe.capture.generator_use import GeneratorWatch
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.held_tensors import Key
from lightning_avgpipe.capture.left_attributes import LeftAttributes
from lightning_avgpipe.capture.shared_objects import Names, SharedObjects


class UnnamedState:
    """A record of what a step does to attributes, objects and variables.

    Args:
        module: module whose attributes, and whose code's variables, are watched.
        mutable: ids of objects that are known to change.
        left: attributes whose assignment is known to be unseen.
        position: return the number of nodes so far.
        in_unit: return whether a unit is running.
        ignore: modules that only observe; they are not watched.

    Attributes:
        mutable: these ids, and those that were found since.
        mutations: changes of objects in place.
        left: attributes whose assignment is not seen when it happens.
        shared: objects that several modules hold.
        assignments: reads and assignments of attributes.
        generators: draws from random generators that the model holds.
        assigned: after the step, the attributes that code between units assigns in every step.
        of_units: after the step, the attributes that units assign in every step, or whose objects they change.
    """

    def __init__(
        self,
        module: nn.Module,
        mutable: Collection[int],
        left: Collection[Key],
        position: Callable[[], int],
        in_unit: Callable[[], bool],
        ignore: Collection[nn.Module],
    ) -> None:
        self.mutable = set(mutable)
        self._known_left = frozenset(left)
        self._reassigned: set[Key] = set()
        self.mutations = Mutations(module, mutable, position, ignore)
        self.shared = SharedObjects(self.mutations.attributes, self.mutations.chosen, position, in_unit)
        self.left = LeftAttributes(dict(module.named_modules()), left, position, in_unit)
        readers = self.shared.was_read, self.left.was_read  # no method of self: a cycle would keep tensors alive
        self.assignments = Assignments(module, lambda: None if in_unit() else position(), ignore, readers)
        self.generators = GeneratorWatch(self.mutations.attributes)
        self._module = module
        self._position = position
        self._freely: set[Key] = set()  # attributes that free units assign
        self.assigned: tuple[Key, ...] = ()
        self.of_units: set[Key] = set()

    def look(self) -> None:
        """Note the changes of code between units that has just run."""
        self.mutations.look()
        self.generators.look(self._position())
        for key, before in self.left.changed():
            self.assignments.was_assigned(key, before, self._position())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads and assignments within this context, while the step runs."""
        with self.assignments.watched(), self.shared.watched():
            yield

    def ran_freely(self, module: nn.Module, changed: Iterable[tuple[Any, Names]]) -> None:
        """Note that a free unit, which every stage runs, has changed these objects."""
        self.shared.was_free()
        self.left.was_free()
        self.assignments.was_free()
        self.mutations.between(changed)
        self._freely |= self.mutations.assigned_in(module)
        self.generators.look(self._position())

    def finish(self) -> None:
        """Note the state after the step has returned."""
        self.look()
        self.assigned = tuple(self.assignments.changed())
        self.generators.kept(vars(self._module.get_submodule(path)).get(name) for path, name in self.assigned)
        self.mutable |= self.mutations.found()
        self._reassigned = self.mutations.reassigned()
        self.of_units = set(self.mutations.of_units()).difference(self.assigned)

    @property
    def may_last(self) -> bool:
        """Whether the step must run once more to find out which changes it makes in every step."""
        lasts = self.of_units or self.assignments.created() or self.mutations.holders()
        return bool(lasts or self._freely or self.generators.in_use)

    @property
    def known_left(self) -> frozenset[Key]:
        """The attributes whose assignment was not seen."""
        return self._known_left | (self.of_units & self._reassigned)

    def repeated(self, again: UnnamedState) -> None:
        """Compare with a repeated step: changes that it did not make again are made only once."""
        self.of_units &= {*again.mutations.of_units(), *again.assignments.of_units}
        self.assigned += tuple(sorted(self._freely & again._freely))
        made = self.assignments.created() - again.assignments.assigned()
        self.assigned = tuple(key for key in self.assigned if key not in made)
        self.mutations.keep(again.mutations.found())
        self.generators.settle(again.generators)

    def pinned(self, nodes: list[Node]) -> Iterator[tuple[int, int, str]]:
        """Yield ``(first, last, reason)`` where no cut may lie because of changed objects."""
        yield from self.mutations.pinned(self.assignments)
        yield from self.shared.pinned(self.mutations.once)
        yield from self.left.pinned()
        yield from self.generators.pinned(nodes)
