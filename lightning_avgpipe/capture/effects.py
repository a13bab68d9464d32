"""Record the effects of a step besides those on parameters and buffers: on attributes, objects and variables."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from lightning_avgpipe.capture.attribute_events import AttributeEvents, Key, Names, Now
from lightning_avgpipe.capture.draft import Pin
from lightning_avgpipe.capture.generators import GeneratorDraws
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.object_events import ObjectEvents


class Effects:
    """A record of what a step does to attributes, objects and variables.

    Args:
        module: module whose attributes, and whose code's variables, are watched.
        mutable: ids of objects that are known to change.
        unseen: attributes whose assignment is known to be unseen.
        now: tells the number of nodes so far, and whether a unit is running.
        ignore: modules that only observe; they are not watched.

    Attributes:
        mutable: these ids, and those that were found since.
        attributes: reads and assignments of attributes.
        objects: changes of objects in place.
        generators: draws from random generators that the model holds.
        assigned: after the step, the attributes that code between units assigns in every step.
        of_units: after the step, the attributes that units assign in every step, or whose objects they change.
    """

    def __init__(
        self, module: nn.Module, mutable: Collection[int], unseen: Collection[Key], now: Now,
        ignore: Collection[nn.Module],
    ) -> None:  # fmt: skip
        ignored = {id(m) for observer in ignore for m in observer.modules()}
        modules = {path: m for path, m in module.named_modules() if id(m) not in ignored}
        self.mutable = set(mutable)
        self.objects = ObjectEvents(module, modules, mutable, now)
        self.attributes = AttributeEvents(modules, unseen, now)
        self.attributes.followed |= self.objects.leading.keys()
        self.generators = GeneratorDraws(self.objects)
        self._module = module
        self._unseen = frozenset(unseen)
        self._reassigned: set[Key] = set()
        self.assigned: tuple[Key, ...] = ()
        self.of_units: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads and assignments within this context, while the step runs."""
        with self.attributes.watched(), self.objects.watched():
            yield

    # -- events -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note the effects of code between units that has just run."""
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

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Run code within this context that only looks at values, and whose effects do not count."""
        with self.objects.elsewhere():
            yield
        self.attributes.pass_over()

    # -- after the step -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Note the state after the step has returned."""
        self.look()
        self.assigned = tuple(self.attributes.changed())
        self.generators.kept(vars(self._module.get_submodule(path)).get(name) for path, name in self.assigned)
        self.mutable |= self.objects.found()
        self._reassigned = self.objects.reassigned()
        self.of_units = set(self.objects.of_units()).difference(self.assigned)

    @property
    def may_last(self) -> bool:
        """Whether the step must run once more to find out which changes it makes in every step."""
        lasts = self.of_units or self.attributes.created() or self.objects.holders()
        return bool(lasts or self.objects.assigned or self.generators.in_use)

    @property
    def unseen(self) -> frozenset[Key]:
        """The attributes whose assignment was not seen."""
        by_both = self.attributes.of_units.intersection(self.assigned)
        return self._unseen | ((self.of_units | by_both) & self._reassigned)

    def repeated(self, again: Effects) -> None:
        """Compare with a repeated step: changes that it did not make again are made only once."""
        self.of_units &= {*again.objects.of_units(), *again.attributes.of_units}
        self.assigned += tuple(sorted(self.objects.assigned & again.objects.assigned))
        made = self.attributes.created() - again.attributes.assigned()
        self.assigned = tuple(key for key in self.assigned if key not in made)
        self.objects.keep(again.objects.found())
        self.generators.settle(again.generators)

    def pinned(self, nodes: list[Node]) -> Iterator[Pin]:
        """Yield where no cut may lie because of changed objects, unseen assignments and draws."""
        yield from self.objects.pinned(self.attributes.reads)
        yield from self.attributes.pinned_by_units()
        yield from self.generators.pinned(nodes)
