"""Check that a step does not begin, after it was captured, to have effects that several stages would repeat.

Each process has its own copy of what the module holds, and every stage executes the code between units as far as it
gets. The cuts allow for the effects that were captured. Later ones (in a branch that is taken every hundredth batch)
would happen once per stage, with different results in each process. There is a class for each kind of effect, in
:mod:`~lightning_avgpipe.engine.late_effects`, and here for draws from random generators of the model. Code between
units runs on every stage that gets that far, so several stages would make draws that it begins to make later; only the
last stage runs all of it. A unit runs on one stage, so it may begin to draw, unless units of other stages may draw from
the same generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.attestation import Attestation
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
from lightning_avgpipe.state.objects import Variable, is_generator
from lightning_avgpipe.state.outside import outside_variables, variable, variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within, joined, listed

_PLAIN = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str))
_NOTHING = contextlib.nullcontext()


class LateDraws(LateEffects):
    """A check for late draws from random generators that the model holds, or that the step makes."""

    grace_period = "nothing"

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        self._uses = program.graph.generators if program.num_stages > 1 else ()
        self._roots: dict[tuple[str, str], Variable] = {}  # cached: to find variables takes long
        self._own = program.own - program.called_elsewhere
        self._units = [_reaching(use, program, module) for use in self._uses]
        self._found: dict[int, tuple[Any, int]] = {}  # id of a generator -> the generator, and the index of its use
        self._before = Snapshot(())
        self._position = -1  # code between nodes was checked up to this position

    def begin(self) -> None:
        self._position, self._found = -1, {}
        for number, use in enumerate(self._uses):
            one = self._generator(use)
            if one is not None:
                self._found[id(one)] = one, number
        self._before = Snapshot((one for one, _ in self._found.values()), opaque="generators")

    def end(self) -> str | None:
        late = self._between(self._program.end)
        self._found = {}
        return late

    def _generator(self, use: GeneratorUse) -> Any:
        """Return the generator of a use; None if it cannot be reached here, as where only rank 0 has the objects."""
        for path, name, number in use.leads:
            with contextlib.suppress(KeyError, IndexError, AttributeError):
                if (path, name) not in self._roots:
                    self._roots[path, name] = variable(self._module, path, name)
                return Snapshot([self._roots[path, name]], opaque="generators").opaque[number]
        return None

    def node(self, operation: Operation, node: Node) -> contextlib.AbstractContextManager[None]:
        """Run a node of this stage within this context, and check its draws."""
        made = self._made(operation, node)
        return _NOTHING if made is None and not self._uses else self._node(node, made)

    @contextlib.contextmanager
    def _node(self, node: Node, made: Snapshot | None) -> Iterator[None]:
        self.check(self._between(node.index))
        yield
        for one in self._changed():
            self.check(self._in_node(self._uses[one], self._units[one], node))
        if made is not None and any(id(one) not in self._found for one in made.changed() if is_generator(one)):
            self.check(self._draws(f"a generator that the step makes, in {node}"))

    def _made(self, operation: Operation, node: Node) -> Snapshot | None:
        """Return generators in the arguments, which the step may have made and does not send; None if none matter."""
        given = (*operation.args, *operation.kwargs.values())
        if self._program.is_last or node.generators or _PLAIN.issuperset(map(type, given)):
            return None
        return Snapshot(given, opaque="generators")

    def _changed(self) -> list[int]:
        """Return the indices of the uses whose generators have drawn since the last call."""
        changed = self._before.changed() if self._found else []
        self._before.update(changed)
        return [self._found[id(one)][1] for one in changed if id(one) in self._found]

    def _in_node(self, use: GeneratorUse, units: frozenset[str], node: Node) -> str | None:
        """Return a description of a node's draws if other stages may draw from the same generator; else None."""
        program = self._program
        if use.nodes:
            allowed = program.start <= use.nodes[0] < program.end
        elif use.between is not None:
            allowed = program.is_last and use.between > program.start
        else:
            allowed = units <= self._own and node.name in units
        if allowed:
            return None
        others = [repr(path) for path in sorted(units) if path != node.name]
        beside = f", which others may draw from too ({listed(others)})" if others else ""
        return self._draws(f"{self._name(use)} in {node}{beside}")

    def _between(self, position: int) -> str | None:
        """Return a description of draws by code between nodes, up to here, if other stages would make them too."""
        program, before, self._position = self._program, self._position, position
        for number in self._changed():
            use = self._uses[number]
            if use.renewed and (not use.nodes or before < program.start):
                allowed = True
            elif use.nodes:
                allowed = program.is_last and use.nodes[0] >= program.start
            elif use.between is None:
                allowed = program.is_last and self._units[number] <= self._own
            elif program.stage == 0 or use.between > program.start:  # no earlier stage reaches it
                allowed = program.is_last or use.between <= program.end
            else:
                allowed = before < program.start
            if not allowed:
                return self._draws(f"{self._name(use)} between submodules")
        return None

    def _name(self, use: GeneratorUse) -> str:
        path, name, _ = use.leads[0]
        held = variable(self._module, path, name).state().get("value")
        return f"'{joined(path, name)}'" if is_generator(held) else f"a generator in '{joined(path, name)}'"

    def _draws(self, where: str) -> str:
        return (
            f"draws random numbers from {where}, and did not when it was captured, so each stage would draw different "
            f"ones (stage {self._program.stage}); draw from it in the first step too, so that no cut lies before the "
            "last draw, or draw from torch's, Python's or NumPy's global generator, which gives all stages the same"
        )


def _reaching(use: GeneratorUse, program: StageProgram, module: nn.Module) -> frozenset[str]:
    """Return the units that may draw from a generator: they hold it, refer to it, or got it as an argument."""
    found = set(use.given)
    for path, name, _ in use.leads:
        for unit in program.graph.units:
            if (path and is_within(path, unit)) or (
                not path and " " in name and name in outside_variables(module.get_submodule(unit))
            ):
                found.add(unit)
    return frozenset(found)


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
