"""Check that a step has no effects that it did not have when it was captured, and that stages would have several times.

Each process has its own copy of what the module holds, and every stage executes the code between units as far as it
gets. Effects that were captured are known to the cuts. Later ones (a branch that is taken every hundredth batch) would
happen once per stage, with other results in each process:

============================  ======================================================================================
buffers                       code between units of a stage that is not the last one must not change them, nor must
                              units that several stages call
generators of random numbers  units may begin to draw where no other stage may; code between units of the last stage
                              where no stage before comes to it
iterators                     nobody can put their items back, so nothing may take any
attributes                    code between units must not assign one that an earlier stage reads; nor, where an earlier
                              stage of the same process has run this code before, give one another value once more
shared objects                no stage may begin to change one that units of other stages hold
============================  ======================================================================================
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.effects import Iterators
from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.attestation import Attestation
from lightning_avgpipe.engine.late_effects import LateAssignments, LateChanges, LateEffects, LateHooks, SharedObjects
from lightning_avgpipe.engine.tensor_use import registers_of
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import Variable, is_generator
from lightning_avgpipe.state.outside import outside, variable
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within, joined, listed
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import version_of

_WRITES = re.compile(
    r"\w*[a-z0-9]_|__setitem__|data\.__set__|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
_PLAIN = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str))
_NOTHING = contextlib.nullcontext()


class Unforeseen:
    """A check for effects of a stage's forwards that the captured step did not have.

    Args:
        program: program of the stage.
        module: the whole module.
        repeats: whether an earlier stage of this process has run this code before.
    """

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        self._program = program
        self._module = module
        self._iterations = 0
        self._has_run = False  # whether a forward has ended
        self._assignments = LateAssignments(program, module, repeats)
        self._shared = SharedObjects(program, module, repeats)
        others = LateChanges(program, module, repeats), LateHooks(program, module, repeats)
        self._late: tuple[LateEffects, ...] = (self._assignments, *others)
        self._generators = _Generators(program, module)
        graph = program.graph
        self._called = program.called & program.called_elsewhere
        read = {**graph.buffers_read, **{joined(*key): position for key, position in graph.reads.items()}}
        # in one process all stages have the same buffers
        self._read_before = {name for name, position in read.items() if position < program.start and not repeats}
        names = [
            name
            for name, _ in module.named_buffers()
            if name not in graph.changed
            and (
                self._is_shared(name)
                or name in self._read_before
                or not (program.is_last or any(is_within(name, unit) for unit in graph.units))
            )
        ]
        # buffers that no forward of this stage may change: register and name
        self._constants = dict(zip(names, registers_of(module, names), strict=True))
        elsewhere = [name for name, _ in module.named_buffers() if name in program.buffers_elsewhere]
        self._elsewhere = dict(zip(elsewhere, registers_of(module, elsewhere), strict=True))
        self._absent: dict[int, str] = {}  # id of a buffer -> its name, while a forward runs
        self._holders = [variable(module, *key) for key in program.graph.mutated_between if not program.is_last]

    def begin_iteration(self) -> None:
        """Begin an iteration. What is done in the first one, and was put back in the captured step, is not late."""
        self._iterations += 1

    @contextlib.contextmanager
    def checked(self, args: Sequence[Any]) -> Iterator[None]:
        """Run a forward with these arguments within this context, and check its effects.

        Generators in a micro-batch are restored, since stages of one process share the micro-batch.

        Raises:
            StepChangedError: it has changed a buffer, other than by one of another size, such as a larger table; it has
                made a draw that other stages do not take into account; or it has taken items from an iterator.
        """
        buffers = [(name, *self._buffer(name)) for name in self._constants]
        self._absent = {id(register.get(leaf)): name for name, (register, leaf) in self._elsewhere.items()}
        iterators = self._iterators()
        for effects in self._late:
            effects.begin()
        given = [leaf for leaf in tree.leaves(tuple(args)) if is_generator(leaf)]
        generators = Snapshot(given, opaque="generators").restored() if given else _NOTHING
        with self.sharing(), self._generators.watched(), generators:
            yield
        for effects in self._late:
            self._check_late(effects, effects.end())
        self._has_run = True
        if iterators is not None and (taken := iterators.advanced()):
            raise self._changed(
                f"takes items from the iterator '{taken}', and did not when it was followed to be divided; each stage "
                f"would take others (stage {self._program.stage}). Make it a part of the batch (CombinedLoader), or "
                "count in an attribute"
            )
        for name, tensor, version in buffers:
            now, changes = self._buffer(name)
            if (now is tensor and changes != version) or (now is not tensor and _is_like(now, tensor)):
                raise self._changed_buffer(name)

    def check_write(self, function: str, tensor: Tensor) -> None:
        """Check that code between units does not write into a buffer by calling this function with this first argument.

        Raises:
            StepChangedError: it does.
        """
        if self._program.is_last or _WRITES.fullmatch(function) is None:
            return
        for name, buffer in self._module.named_buffers():
            if buffer is tensor:
                raise self._changed_buffer(name)

    def check_read(self, function: str, tensors: Sequence[Tensor]) -> None:
        """Check that code between units does not take a buffer that a unit of another stage changes.

        Raises:
            StepChangedError: it does.
        """
        for tensor in tensors if self._absent else ():
            if (name := self._absent.get(id(tensor))) is not None:
                raise self._changed(
                    f"reads the buffer '{name}' in {function}() at {source_line()}, which it did not do when it was "
                    f"captured, and which a submodule of another stage changes (stage {self._program.stage}). Read it "
                    "in every step, return it from the submodule, or keep both on one stage with split_points"
                )

    def note_assignment(self, module: nn.Module, name: str, before: bool, asked: Attestation | None) -> None:
        """Note that code between units is about to assign an attribute, before this stage's part or in it."""
        self._assignments.note(module, name, before, asked)

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Run a forward, or a program in its place, within this context, and check what it does to shared objects.

        Raises:
            StepChangedError: it has changed one, other than by new items of a dict, such as a table that is kept.
        """
        self._shared.begin()
        yield
        self._check_late(self._shared, self._shared.end())

    def begin_part(self) -> None:
        """Begin the stage's part of the step, whose earlier nodes are those of other stages.

        Raises:
            StepChangedError: code before it has changed what each stage of this process would change again.
        """
        for effects in (self._shared, *self._late):
            self._check_late(effects, effects.begin_part())

    def node(self, operation: Operation, node: Node) -> contextlib.AbstractContextManager[None]:
        """Run a node of this stage within this context, and check its draws."""
        return self._generators.node(operation, node)

    def held(self) -> Snapshot:
        """Return a snapshot of the objects that code between units changes.

        When a stage leaves the step, ``finally`` and the like still run and may change these objects again.
        """
        return Snapshot(self._holders, opaque=True)

    def _iterators(self) -> Iterators | None:
        held = {}
        for key in self._program.graph.iterators:
            with contextlib.suppress(KeyError, AttributeError):  # only rank 0 may have what leads there
                held[key] = variable(self._module, *key)
        return Iterators(held) if held else None

    def _buffer(self, name: str) -> tuple[Tensor | None, int]:
        register, leaf = self._constants[name]
        return register.get(leaf), version_of(register.get(leaf))

    def _is_shared(self, name: str) -> bool:
        return any(is_within(name, unit) for unit in self._called)

    def _changed_buffer(self, name: str) -> StepChangedError:
        if self._is_shared(name):
            return self._changed(
                f"changes the buffer '{name}', which it did not do when it was captured, in a unit that other stages "
                f"call too (stage {self._program.stage}). Let the first batch change it too, so that no cut lies "
                "between these calls, or keep them on one stage with split_points"
            )
        why = "an earlier stage would not see it" if name in self._read_before else "each stage would do it"
        return self._changed(
            f"changes the buffer '{name}', which it did not do when it was captured, and {why} (stage "
            f"{self._program.stage}). Change it in a hook such as on_train_batch_end, within a submodule, or with "
            "every micro-batch (by nothing, if need be)"
        )

    def _check_late(self, effects: LateEffects, late: str | None) -> None:
        if late is not None and self._has_run and (self._iterations > 1 or not effects.learns_for_iteration):
            raise self._changed(late)

    def _changed(self, what: str) -> StepChangedError:
        return StepChangedError(f"{self._program.graph.step} {what}")


def _is_like(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape


class _Generators:
    """A check for stages that begin to draw from a random generator that the model holds.

    The draws in the captured step are known, and the cuts allow for them. Code between units runs on every stage that
    gets that far, so draws that it begins later would be made by several stages; only the last stage runs all of it. A
    unit runs on one stage and may begin to draw, unless other units may draw from the same generator.

    Args:
        program: program of the stage.
        module: the whole module.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._program = program
        self._module = module
        self._uses = program.graph.generators if program.num_stages > 1 else ()
        self._roots: dict[tuple[str, str], Variable] = {}  # found once: variables outside of modules take long
        self._own = program.own - program.called_elsewhere
        self._units = [_reaching(use, program, module) for use in self._uses]
        self._found: dict[int, tuple[Any, int]] = {}  # id of a generator -> the generator, and the index of its use
        self._before = Snapshot(())
        self._position = -1  # position up to which code between nodes was checked

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Run a forward within this context, and check the draws in it.

        Raises:
            StepChangedError: this stage has made a draw that other stages do not take into account.
        """
        return self._watched() if self._uses else _NOTHING

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._position = -1
        for number, use in enumerate(self._uses):
            one = self._generator(use)
            if one is not None:
                self._found[id(one)] = one, number
        self._before = Snapshot((one for one, _ in self._found.values()), opaque="generators")
        yield
        self._look(self._program.end)
        self._found = {}

    def _generator(self, use: GeneratorUse) -> Any:
        """Return the generator of a use; None if only rank 0 holds what leads to it."""
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
        self._look(node.index)
        yield
        for one in self._changed():
            self._check_node(self._uses[one], self._units[one], node)
        if made is not None and any(id(one) not in self._found for one in made.changed() if is_generator(one)):
            self._refuse(f"a generator that the step makes, in {node}")

    def _made(self, operation: Operation, node: Node) -> Snapshot | None:
        """Return generators that the step may have made and that are not sent with the micro-batch; None if none."""
        given = (*operation.args, *operation.kwargs.values())
        if self._program.is_last or node.generators or _PLAIN.issuperset(map(type, given)):
            return None
        return Snapshot(given, opaque="generators")

    def _changed(self) -> list[int]:
        """Return the indices of the uses whose generators have drawn since the last call."""
        changed = self._before.changed() if self._found else []
        self._before.follow(changed)
        return [self._found[id(one)][1] for one in changed if id(one) in self._found]

    def _check_node(self, use: GeneratorUse, units: frozenset[str], node: Node) -> None:
        """Check that all draws from a generator are on this stage, after a node of it has drawn."""
        program = self._program
        if use.nodes:
            allowed = program.start <= use.nodes[0] < program.end
        elif use.between is not None:
            allowed = program.is_last and use.between > program.start
        else:
            allowed = units <= self._own and node.name in units
        if not allowed:
            others = [path for path in sorted(units) if path != node.name]
            beside = f", which others may draw from too ({listed(list(map(repr, others)))})" if others else ""
            self._refuse(f"{self._name(use)} in {node}{beside}")

    def _look(self, position: int) -> None:
        """Check the draws of code between nodes up to this position."""
        program, before, self._position = self._program, self._position, position
        for number in self._changed():
            use = self._uses[number]
            if use.renewed and (not use.nodes or before < program.start):
                allowed = True
            elif use.nodes:
                allowed = program.is_last and use.nodes[0] >= program.start
            elif use.between is None:
                allowed = program.is_last and self._units[number] <= self._own
            elif program.stage == 0 or use.between > program.start:  # no stage before comes to it
                allowed = program.is_last or use.between <= program.end
            else:
                allowed = before < program.start
            if not allowed:
                self._refuse(f"{self._name(use)} between submodules")

    def _name(self, use: GeneratorUse) -> str:
        path, name, _ = use.leads[0]
        held = variable(self._module, path, name).state().get("value")
        return f"'{joined(path, name)}'" if is_generator(held) else f"a generator in '{joined(path, name)}'"

    def _refuse(self, where: str) -> None:
        raise StepChangedError(
            f"{self._program.graph.step} draws random numbers from {where}, and did not when it was followed to be "
            f"divided, so each stage would draw its own (stage {self._program.stage}); draw from it in the first step "
            "too, so that no cut lies before the last draw, or draw from torch's, Python's or NumPy's common "
            "generator, which gives all stages the same"
        )


def _reaching(use: GeneratorUse, program: StageProgram, module: nn.Module) -> frozenset[str]:
    """Return the units that may draw from a generator: those that hold it, name it, or were given it."""
    found = set(use.given)
    for path, name, _ in use.leads:
        for unit in program.graph.units:
            if (path and is_within(path, unit)) or (
                not path and " " in name and name in outside(module.get_submodule(unit))
            ):
                found.add(unit)
    return frozenset(found)
