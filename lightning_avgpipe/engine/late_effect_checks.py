"""Check that a step does not begin, after it was captured, to have effects that several stages would repeat.

Each process has its own copy of what the module holds, and every stage executes the code between units as far as it
gets. The cuts allow for the effects that were captured. Later ones (in a branch that is taken every hundredth batch)
would happen once per stage, with different results in each process. There is a class for each kind of effect, in
:mod:`~lightning_avgpipe.engine.late_effects` and :mod:`~lightning_avgpipe.engine.late_draws`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_avgpipe.engine.attestation import Attestation
from lightning_avgpipe.engine.late_draws import LateDraws
from lightning_avgpipe.engine.late_effects import (
    LateAssignments,
    LateBuffers,
    LateChanges,
    LateEffects,
    LateHooks,
    LateItems,
    SharedObjects,
)
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import is_generator
from lightning_avgpipe.state.outside import variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree


class LateEffectChecks:
    """All checks for effects of a stage's forwards that the captured step did not have.

    Args:
        program: program of the stage.
        module: the whole module.
        repeats: whether an earlier stage of this process also runs the code before this stage's part.

    Attributes:
        draws: the check of random draws, which watches each node.
        buffers: the check of buffers, which watches what code between units calls.
    """

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        self._iterations = 0
        self._has_run = False  # whether a forward has ended
        given = program, module, repeats
        self.draws, self._shared = LateDraws(*given), SharedObjects(*given)
        self._assignments, self.buffers = LateAssignments(*given), LateBuffers(*given)
        self._changes, others = LateChanges(*given), (LateHooks(*given), LateItems(*given))
        self._effects: tuple[LateEffects, ...] = (
            self.draws, self._shared, self._assignments, self._changes, *others, self.buffers
        )  # fmt: skip
        self._holders = list(variables(module, () if program.is_last else program.graph.mutated_between).values())

    def begin_iteration(self) -> None:
        """Begin an iteration. In the first one, effects of the captured step, which were undone, happen again."""
        self._iterations += 1
        for effects in self._effects:
            effects.begin_iteration()

    @contextlib.contextmanager
    def checked(self, args: Sequence[Any]) -> Iterator[None]:
        """Run a forward with these arguments within this context, and check its effects.

        Random generators in a micro-batch are restored, since stages of one process share the micro-batch.

        Raises:
            StepChangedError: it has an effect that the captured step did not have.
        """
        for effects in self._effects:
            effects.begin()
        given = [leaf for leaf in tree.leaves(tuple(args)) if is_generator(leaf)]
        with Snapshot(given, opaque="generators").restored() if given else contextlib.nullcontext():
            yield
        for effects in self._effects:
            self._check(effects, effects.end())
        self._has_run = True

    @contextlib.contextmanager
    def checked_program(self) -> Iterator[None]:
        """Run a flat program instead of a forward within this context, and check its changes of shared objects.

        Raises:
            StepChangedError: it has changed one, other than by new items of a dict, such as a cache.
        """
        self._shared.begin()
        yield
        self._check(self._shared, self._shared.end())

    def begin_part(self) -> None:
        """Begin the stage's part of the step, at its first node.

        Raises:
            StepChangedError: the code before has a late effect, which each stage of this process would repeat.
        """
        for effects in self._effects:
            self._check(effects, effects.begin_part())

    def note_assignment(self, module: nn.Module, name: str, before: bool, asked: Attestation) -> None:
        """Note that code between units is about to assign an attribute, before this stage's part or in it."""
        self._changes.note(module, name)
        self._assignments.note(module, name, before, asked)

    def held(self) -> Snapshot:
        """Return a snapshot of the objects that code between units changes, to be restored when the step has ended.

        After a stage has left the step, ``finally`` blocks and the like still run and may change these objects.
        """
        return Snapshot(self._holders, opaque=True)

    def _check(self, effects: LateEffects, late: str | None) -> None:
        learned = {"nothing": True, "forward": self._has_run, "iteration": self._has_run and self._iterations > 1}
        if learned[effects.grace_period]:
            effects.check(late)
