"""Unnamed state: what outlives a step besides parameters and buffers, in attributes, objects and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from lightning_avgpipe.capture.attributes import Assignments, Mutations
from lightning_avgpipe.capture.generator_use import GeneratorWatch
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.held_tensors import Key
from lightning_avgpipe.capture.shared_objects import Names, SharedObjects


class UnnamedState:
    """What a step does to it, while it is recorded.

    Args:
        module: whose attributes, and whose code's variables.
        mutable: ids of objects that are known to change.
        position: how many nodes there are.
        in_unit: whether a unit runs.
        ignore: modules that only observe.

    Attributes:
        mutable: the same, and those of which that has been found out.
        mutations: of objects, in place.
        shared: objects that several modules hold.
        assignments: of attributes.
        generators: of random numbers, the model's own: who draws from them.
        assigned: attributes that code between units assigns in every step, once the step has run.
        of_units: those that units assign in every step, or that lead to objects which they change.
    """

    def __init__(
        self,
        module: nn.Module,
        mutable: Collection[int],
        position: Callable[[], int],
        in_unit: Callable[[], bool],
        ignore: Collection[nn.Module],
    ) -> None:
        self.mutable = set(mutable)
        self.mutations = Mutations(module, mutable, position, ignore)
        self.shared = SharedObjects(self.mutations.attributes, self.mutations.chosen, position, in_unit)
        self.assignments = Assignments(module, lambda: None if in_unit() else position(), ignore, self.shared.was_read)
        self.generators = GeneratorWatch(self.mutations.attributes)
        self._module = module
        self._position = position
        self._freely: set[Key] = set()  # attributes that units assign which every stage runs that comes so far
        self.assigned: tuple[Key, ...] = ()
        self.of_units: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context the step runs."""
        with self.assignments.watched(), self.shared.watched():
            yield

    def ran_freely(self, module: nn.Module, changed: Iterable[tuple[Any, Names]]) -> None:
        """A unit has run that every stage runs which comes so far, and has changed these objects."""
        self.shared.was_free()
        self.mutations.between(changed)
        self._freely |= self.mutations.assigned_in(module)
        self.generators.look(self._position())

    def finish(self) -> None:
        """The step has returned."""
        self.assignments.settle()
        self.assigned = tuple(self.assignments.changed())
        self.mutations.look()
        self.generators.look(self._position())
        self.generators.kept(vars(self._module.get_submodule(path)).get(name) for path, name in self.assigned)
        self.mutable |= self.mutations.found()
        self.of_units = set(self.mutations.of_units()).difference(self.assigned)

    @property
    def may_last(self) -> bool:
        """Whether it must be seen what of it the step does again when it runs once more."""
        lasts = self.of_units or self.assignments.created() or self.mutations.holders()
        return bool(lasts or self._freely or self.generators.in_use)

    def repeated(self, again: UnnamedState) -> None:
        """The step has run once more: what it did not do again, it has done for good."""
        self.of_units &= set(again.mutations.of_units())
        self.assigned += tuple(sorted(self._freely & again._freely))
        made = self.assignments.created() - again.assignments.assigned()
        self.assigned = tuple(key for key in self.assigned if key not in made)
        self.mutations.keep(again.mutations.found())
        self.generators.settle(again.generators)

    def pinned(self, nodes: list[Node]) -> Iterator[tuple[int, int, str]]:
        """Where no cut may lie among these nodes, because of objects that change."""
        yield from self.mutations.pinned(self.assignments)
        yield from self.shared.pinned(self.mutations.once)
        yield from self.generators.pinned(nodes)
