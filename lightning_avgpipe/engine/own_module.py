"""While a stage works, put the weights that it uses and its own values of attributes into the module.

Code between units runs on every stage that gets that far, so each stage keeps values of its own::

    training_step      n = self.count["steps"] += 1 | units of stage 0 | self.losses.append(loss) of the last stage
    stage 0            {"steps": 1}                                      ends before this line
    last stage         {"steps": 1}, the one that hooks see              [loss]

While an iteration runs, parallel models have values of their own too. So all stages of a model read the same values,
whatever other models do. After the iteration, the models' additions to lists, sets and dicts are merged.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import Variable
from lightning_avgpipe.state.outside import variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.placeholder import Elsewhere


class Weights(Protocol):
    """The weights that actions of stages use, where these are not the ones in the module."""

    @property
    def constant(self) -> bool:
        """Whether the weights do not change within an iteration."""

    def swaps(self, stage: int) -> bool:
        """Return whether anything is put into the module for an action of a stage."""

    def placed(self, stage: int) -> AbstractContextManager[dict[int, str]]:
        """Put the weights for a stage's action into the module within this context; yield their ``id -> full name``."""


class VersionedWeights(Weights, Protocol):
    """Several versions of the weights of a step function, for batches that overlap without draining the pipeline."""

    def divide(self, names: Mapping[int, Sequence[str]], here: Collection[int]) -> None:
        """Set which parameters the stages use, by their full names, and which stages this process hosts."""


_NOTHING: AbstractContextManager[dict[int, str]] = contextlib.nullcontext({})
_ELSEWHERE = (
    "which a submodule of another stage changes, and which was not read here when the step was captured. Read it in "
    "every step, so that it is sent, return it from the submodule, or keep both on one stage with split_points"
)
_COLLECTIONS = (list, deque, set, dict)


class OwnAttributes:
    """One stage's values of attributes and variables that a step assigns, or whose objects it changes in place.

    Code outside of stages, such as hooks, sees the values of the last stage of this process, of pipeline 0.

    Args:
        module: the whole module.
        names: path of a module and name of an attribute; or "" and the full name of a variable outside of modules.
        is_visible: whether this stage's values are the ones that code outside of stages sees.
    """

    def __init__(self, module: nn.Module, names: Collection[tuple[str, str]], is_visible: bool) -> None:
        self.variables = list(variables(module, names).values())
        self._is_visible = is_visible
        self._own = Snapshot(())
        self._seen = Snapshot(())  # values outside of stages when the last iteration ended
        self._begun = Snapshot(())

    def begin(self) -> None:
        """Begin an iteration: take over what hooks have assigned or changed since the last one."""
        if self._is_visible:
            return
        self._own.update(self._seen.changed())
        with self.placed():  # take up what a hook has added before any stage changes it
            pass
        self._begun = self._own

    def end(self) -> None:
        """End an iteration: remember the values outside of stages."""
        if not self._is_visible:
            self._seen = self._objects()

    def merge_additions(self) -> list[Any]:
        """Merge this stage's additions into the lists, sets and dicts outside of stages; return those that changed."""
        before = {id(obj): items for obj, items in self._begun.items()}
        found = []
        for obj, items in self._own.items():
            if isinstance(obj, _COLLECTIONS) and id(obj) in before and _add(obj, before[id(obj)], items):
                found.append(obj)
        return found

    def take_over(self, objects: Sequence[Any]) -> None:
        """Take over the state that these objects have outside of stages."""
        self._own.update(objects)

    def _objects(self) -> Snapshot:
        return Snapshot(self.variables, opaque=True, reuse=self._own)  # unchanged arrays are not copied again

    @property
    def are_shown(self) -> bool:
        """Whether the module always has this stage's values, so that nothing is to be placed."""
        return self._is_visible or not self.variables

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Put this stage's values into the module within this context; objects keep their identity."""
        if self.are_shown:
            yield
            return
        shown = self._objects()
        self._own.restore(shown)
        try:
            yield
        finally:
            self._own = self._objects()
            shown.restore(self._own)


def _add(collection: Any, before: Any, after: Any) -> bool:
    """Add to a collection the items that are in ``after`` and not in ``before``; return whether there are any."""
    if isinstance(collection, dict):
        new = [key for key in after if key not in before]
        for key in new:
            if key not in collection:
                collection[key] = after[key]
            elif collection[key] is not after[key] and isinstance(after[key], _COLLECTIONS):
                _add(collection[key], (), after[key])  # such as a list in a defaultdict
        return bool(new)
    if isinstance(collection, set):
        collection |= after.difference(before)
        return bool(after.difference(before))
    number = len(before)
    begins_alike = len(after) > number and all(a is b for a, b in zip(before, after, strict=False))
    if begins_alike and getattr(collection, "maxlen", None) is None:
        collection.extend(list(after)[number:])
        return True
    return False


def _changed_elsewhere(program: StageProgram, module: nn.Module) -> Iterator[tuple[Variable, Elsewhere]]:
    """Yield the variables that only units of other stages change, each with a placeholder to put there.

    A variable is an attribute of a module or, if units change only parts of the object in it, of that object.
    """
    for key, held in variables(module, program.changed_elsewhere).items():
        name, parts = joined(*key), program.graph.parts_changed.get(key, frozenset())
        own: dict[str, Any] = getattr(held.state().get("value"), "__dict__", {})
        if parts and parts <= own.keys():
            yield from ((Variable(own, part), Elsewhere(f"{name}.{part}", _ELSEWHERE)) for part in sorted(parts))
        else:
            yield held, Elsewhere(name, _ELSEWHERE)


class OwnModule:
    """The module as one stage sees it.

    Args:
        program: program of the stage.
        module: the whole module; parameters of other stages may be absent.
        weights: weights that the stage's actions use.
        of_units: values of the attributes that units of its pipeline change.
        is_visible: whether code outside of stages, such as hooks, sees this stage's values of attributes.

    Attributes:
        program: as given.
        module: as given.
        attributes: this stage's values of attributes.
        swaps: whether anything is put into the module while the stage works.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        weights: Weights,
        of_units: OwnAttributes | None,
        is_visible: bool,
    ) -> None:
        self.program = program
        self.module = module
        self._weights = weights
        self._of_units = of_units or OwnAttributes(module, (), True)
        self.attributes = OwnAttributes(module, (*program.graph.assigned_between, *program.holders), is_visible)
        self._set_back = [] if program.is_last else list(variables(module, program.graph.set_back).values())
        own = not (self._of_units.are_shown and self.attributes.are_shown)
        own = own or bool(self._set_back or program.changed_elsewhere)
        self.swaps = own or weights.swaps(program.stage)

    def placed(self) -> AbstractContextManager[dict[int, str]]:
        """Put the stage's weights and attributes into the module in this context; yield ``id -> name`` of copies."""
        return self._placed() if self.swaps else _NOTHING

    @contextlib.contextmanager
    def _placed(self) -> Iterator[dict[int, str]]:
        with self._weights.placed(self.program.stage) as copies, self._of_units.placed(), self.attributes.placed():
            passing = self._to_set_back()
            elsewhere = _changed_elsewhere(self.program, self.module)  # looked up now, since hooks may replace objects
            hidden = [(one, one.state(), placeholder) for one, placeholder in elsewhere]
            for one, _, placeholder in hidden:
                one.put({"value": placeholder})
            try:
                yield copies
            finally:
                for one, state, placeholder in hidden:
                    if one.state().get("value") is placeholder:
                        one.put(state)
                passing.restore()  # a stage that leaves the step early does not reach the code that sets it back

    def _to_set_back(self) -> Snapshot:
        """Return a snapshot of what the step changes and sets back, without objects that it changes for good."""
        if not self._set_back:
            return Snapshot(())
        lasting = Snapshot((*self.attributes.variables, *self._of_units.variables), opaque=True)
        passing = Snapshot(self._set_back, opaque=True)
        return passing.restricted_to(passing.reached() - lasting.reached())

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the stage's forwards change, by name."""
        return {name: self.module.get_buffer(name) for name in self.program.states}
