"""Unnamed state: what outlives a step besides parameters and buffers, in attributes, objects and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from torch import nn

from lightning_avgpipe.capture.attributes import Assignments, Mutations
from lightning_avgpipe.capture.held_tensors import Key
from lightning_avgpipe.capture.shared_objects import SharedObjects


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
        self.assigned: tuple[Key, ...] = ()
        self.of_units: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context the step runs."""
        with self.assignments.watched(), self.shared.watched():
            yield

    def finish(self) -> None:
        """The step has returned."""
        self.assignments.settle()
        self.mutations.look()
        self.mutable |= self.mutations.found()
        self.assigned = tuple(self.assignments.changed())
        self.of_units = set(self.mutations.of_units()).difference(self.assigned)

    @property
    def may_last(self) -> bool:
        """Whether it must be seen what of it the step does again when it runs once more."""
        return bool(self.of_units or self.assignments.created() or self.mutations.holders())

    def repeated(self, again: UnnamedState) -> None:
        """The step has run once more: what it did not do again, it has done for good."""
        self.of_units &= set(again.mutations.of_units())
        made = self.assignments.created() - again.assignments.assigned()
        self.assigned = tuple(key for key in self.assigned if key not in made)
        self.mutations.keep(again.mutations.found())

    def pinned(self) -> Iterator[tuple[int, int, str]]:
        """Where no cut may lie, because of objects that change."""
        yield from self.mutations.pinned(self.assignments)
        yield from self.shared.pinned(self.mutations.once, self.mutations.often())
