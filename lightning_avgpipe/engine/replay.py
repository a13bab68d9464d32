"""Replay: run the step function so that only one stage's part of it is executed.

::

    stage 1 of 3:     embed   block0 | block1   block2 | block3   head   loss
                      skipped        | executed        | not reached
    values:           absent or      | real            | the step ends with an exception
                      received       |                 |

Nodes of earlier stages return the values that were received, or absent ones. The nodes of this stage run. The step ends
before the first node of a later stage. Free glue runs on every stage that reaches it. If the step does something else
than when it was captured, it takes a detour.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import HOOKING, Operation
from lightning_avgpipe.capture.tracer import StepTracer, function_name, watching
from lightning_avgpipe.engine.attestation import Attestation
from lightning_avgpipe.engine.detour import Detour
from lightning_avgpipe.engine.flat_program import ProgramWriter
from lightning_avgpipe.engine.part import (
    OffPathNode,
    Part,
    Path,
    ReplayContext,
    Replayed,
    ResultDescription,
    Runner,
    Tapped,
)
from lightning_avgpipe.engine.recompute import is_repeating
from lightning_avgpipe.engine.stage_values import AnswerCache, StageValues, modes_of
from lightning_avgpipe.errors import AbsentValueError, StepChangedError
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.random_streams import peek_host
from lightning_avgpipe.utils.source import caught_line, source_line
from lightning_avgpipe.utils.tensors import tensor_arguments

_NOTHING = contextlib.nullcontext()
_DIFFERENTIATING = frozenset(("grad", "backward", *HOOKING))


class _StageEnd(BaseException):
    """The exception that ends the step function on a stage. It is no ``Exception``, which user code might catch."""


def replay(part: Part, context: ReplayContext, writer: ProgramWriter, answers: AnswerCache) -> Replayed:
    """Execute one stage's part of a step on one micro-batch.

    Args:
        part: part of the step.
        context: data that all replays of the stage share.
        writer: writes down a flat program of what the stage does.
        answers: results for calls of earlier stages' units, known from earlier micro-batches.
    Raises:
        StepChangedError: the step did something else than when it was captured, or than on an earlier stage.
        AbsentValueError: the step needs a value that was not sent.
    """
    runner = Runner(part, context, context.late_effect_checks.draws.node)
    replayer = _Replayer(part, context, runner, writer, answers)
    # Stages of one process share the batch, and the step may change it: its containers, or even its tensors.
    args = tree.map_tensors(torch.clone if part.program.graph.batch_writes else lambda tensor: tensor, tuple(part.args))
    replayer.attestation.batch(tree.tensors(args))
    begun = runner.draws.begin_on_host()
    with (
        runner.draws.stream(),
        watching(runner.draws),
        replayer.following(compiled=context.compiled),
        writer.checked(replayer.is_inside),
    ):
        try:
            result = replayer.with_state_copied(part.run(*args))
        except _StageEnd:
            result = None
        except AbsentValueError as error:
            replayer.explain(error)
            raise
        else:
            replayer.check_finished(result)
        finally:
            replayer.close()
    began_on_host = begun is not None and begun != peek_host()
    sent = replayer.sent()
    told = replayer.attestation.told()
    replayed = Replayed(result, sent, replayer.descriptions(), replayer.tapped, began_on_host, told)
    writer.end(replayed, complete=replayer.is_complete(result))
    return replayed


class _Replayer(StepTracer):
    """The state of a replay; the arguments are those of :func:`replay`."""

    def __init__(
        self,
        part: Part,
        context: ReplayContext,
        runner: Runner,
        writer: ProgramWriter,
        answers: AnswerCache,
    ) -> None:
        # weights of other stages, which may be absent here, are on the device of this one for the step
        super().__init__(context.units, context.owned, context.device, context.owned.keys())
        program, before = part.program, part.descriptions
        self.attestation = Attestation(self.known, program.stage, part.requests, program.is_last, context.owned)
        self.tapped: Tapped | None = None
        self._program = program
        self._tap = part.tap
        self._observe = part.observe
        self._writer = writer
        self._late_effect_checks = context.late_effect_checks
        self._runner = runner
        self._answers = answers
        self._answered = answers.begin(part)  # by position
        self._position = 0
        # what the nodes of earlier stages returned: fewer if the step ended on one of them, more after a detour
        self._before: tuple[ResultDescription | OffPathNode, ...]
        self._detour: Detour | None = None  # None while the step is on the captured path
        if isinstance(before, Path):
            self._before, self._start, values = before.descriptions, len(before.descriptions), before.values
            self._ended_before = before.ended
            self._detour = self._new_detour(before.shared)
        else:
            self._before, self._start, values = before, program.start, program.receives
            self._ended_before = len(before) < program.start
        self._own: list[ResultDescription] = []  # what the nodes of this stage have returned
        self._end: _StageEnd | None = None  # the exception that has ended the step on this stage
        self._observed: list[Tensor] = []  # tensors that the last stage will observe
        self._runs_everywhere = False  # whether a unit that depends on the batch alone is running
        self._held = Snapshot(())  # lasting objects as they were where the stage left the step
        self.values = StageValues(part, context, values, self.known)

    @property
    def mutes(self) -> bool:
        """Whether output of code between units is muted: it appears on the last stage only."""
        return not self._program.is_last or is_repeating()

    def is_muted(self) -> bool:
        """Return whether output is muted now; that of a unit appears where the unit runs."""
        return not self._inside or self._runs_everywhere or is_repeating()

    def answer(self, module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
        position = self._position
        if position >= len(self._answered) or (known := self._answered[position]) is None or self._end is not None:
            return None
        if known.module is not module or module._forward_hooks or modes_of(module) != known.modes:
            return None
        if self._before[position] != known.entry:
            return None
        if known.given is not None:
            if kwargs or len(args) != len(known.given):
                return None
            stand_ins = self.values.stand_ins
            for value, given in zip(known.given, args, strict=True):
                if stand_ins.get(value) is not given:
                    return None
        self._position = position + 1
        self._runner.draws.skip(known.calls)
        self._writer.skipped(self._program.graph.nodes[position])
        return self.values.stand_in(known.value, known.make)

    def on_assign(self, module: nn.Module, name: str) -> None:
        self._late_effect_checks.note_assignment(module, name, self._position < self._start, self.attestation)

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree.tensors((args, kwargs))
        is_free = path not in self._program.graph.resident and all(self.known.value_of(t) is None for t in tensors)
        # a unit that was not captured may have weights, which one stage must train
        if is_free and not any(True for _ in module.parameters()):
            self._runner.draws.begin_unit(elsewhere=True)
            with replaced(self, "_runs_everywhere", True), self.executing():
                result = run(*args, **kwargs)
            self._writer.call(module, args, kwargs, result)
            return result
        return self._at_node(Operation("call", path, run, args, kwargs, tensors, module))

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, name = tensor_arguments(args, kwargs), function_name(func)
        self._writer.draw = self._runner.draws.function(name)
        for tensor in tensors:
            if id(tensor) in self._owned or self.known.value_of(tensor) is not None:
                return self._at_node(Operation("glue", name, func, args, kwargs, tensors))
        if any(isinstance(tensor, Absent) for tensor in tensors):  # left over from the previous micro-batch
            with Absent.flowing():
                result = func(*args, **kwargs)
        else:
            if tensors:
                self._late_effect_checks.buffers.check_call(name, tensors)
            result = func(*args, **kwargs)
        self.attestation.made(name, args, kwargs, result)
        self._writer.glue(func, args, kwargs, result, tensors)
        return result

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._writer.refuse(f"{function_name(func)}() makes a tensor like a parameter")
        return super()._like(func, args, kwargs)

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        self._writer.refuse("it checkpoints a region")
        return super().region(generator)

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._at_node(Operation("region", "", run, args, kwargs, tensor_arguments(args, kwargs)))

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._program.is_last:
            self._observed += tree.tensors((args, kwargs))
            return Absent(TensorMeta((), torch.get_default_dtype(), False, False), self.values.device, "a metric")
        with self.executing():
            result = run(*args, **kwargs) if self._observe is None else self._observe(run, args, kwargs)
        self._writer.observed(run, args, kwargs, result)
        return result

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _at_node(self, operation: Operation) -> Any:
        """Skip, execute or end at the step's next node."""
        if self._end is not None:
            raise self._caught(self._end)
        position, start = self._position, self._start
        if position == start:
            self._late_effect_checks.begin_part()
        if position == self._tap > start and self._detour is None:
            values = tuple(self.values.to_send(v).detach().clone() for v in self._program.graph.live(position))
            self.tapped = values, self._entries
        if position == len(self._before) and self._ended_before:
            raise self._changed(operation, None)
        node, entry = self._expected(position)
        if position >= start:
            if not operation.matches(node):
                return self._off_path(operation, node)
            if position == self._program.end:
                raise self._ended()
            if entry is not None and not self._program.is_last:
                self._own.append(entry)
        elif not operation.matches(node):
            raise self._changed(operation, node)
        assert node is not None
        self.attestation.node(position, operation, position >= start and entry is None)
        self._position += 1
        if entry is not None:
            return self._skip(operation, node, entry)
        if operation.kind == "glue":
            self._check_trained(operation)
        return self._execute(operation, node)

    def _check_trained(self, operation: Operation) -> None:
        """Check that this stage, and no other, trains the parameters that an operation of this stage uses."""
        program = self._program
        trained = {self._owned[id(t)] for t in operation.tensors if t.requires_grad and id(t) in self._owned}
        if trained <= program.own or (program.is_last and trained.isdisjoint(program.earlier)):
            return
        raise StepChangedError(
            f"{operation} at {source_line()} uses the parameter '{min(trained - program.own)}' on stage "
            f"{program.stage}, which {program.graph.step} did not when it was captured, so that its gradient from this "
            "stage would be lost. Use it in the first batch too (times zero), or keep it in a ParameterList or "
            "ParameterDict beside one that is used there"
        )

    def _expected(self, position: int) -> tuple[Node | None, ResultDescription | None]:
        """Return the node that is expected next, if known, and its result's description if it does not run here."""
        nodes, program = self._program.graph.nodes, self._program
        entry = program.foreign_upkeep.get(position)
        if position < self._start:
            before = self._before[position]
            if isinstance(before, OffPathNode):
                return before
            return nodes[position], before if entry is None and position not in program.upkeep else entry
        if self._detour is not None or position >= len(nodes):
            return None, None
        return nodes[position], entry

    def _skip(self, operation: Operation, node: Node, entry: ResultDescription) -> Any:
        if (mode := self.mode()) is not None:
            raise StepChangedError(
                f"at {source_line()} the step is in a {mode}, and was in none when it was captured; stage "
                f"{self._program.stage} cannot show it {operation}, which runs on an earlier stage. Enter it in "
                "the forward of a submodule, or in each step"
            )
        if node.drawn:
            self._runner.draws.skip(node.drawn)
        self._writer.skipped(node)
        is_received = node.index < self._start and self._before[node.index] is entry
        if is_received and self._answered and self._bare:
            self._answers.learn(operation, node, entry, self.known)
        return self.values.result(node, entry, *operation.with_objects(node))

    def _execute(self, operation: Operation, node: Node) -> Any:
        taken, objects = operation.with_objects(node)
        self._writer.begin_node(operation)
        with _NOTHING if operation.kind == "glue" else self.executing():
            outcome = self._runner.run(operation, node, objects)
        if not outcome.is_as_captured(node, taken, self.known):
            is_here = node.index >= self._start and node.index not in self._program.upkeep
            detour = self._new_detour()
            detour.begin(node, outcome, taken, is_here)
            self._detour = detour
            return outcome.result
        whole = outcome
        if objects is None:
            outcome = outcome.separated(node, taken)
        self._writer.node(operation, node, outcome, separated=whole is not outcome)
        for value, tensor in zip(node.outputs, outcome.tensors, strict=True):
            if value >= 0:
                self.values.made(tensor, value)
        for target, value in node.written(taken):
            self.values.made(target, value)
        if (not self._program.is_last or node.index < self._tap) and node.index >= self._start:
            self._own.append(outcome.entry)
        return outcome.result

    # -- detours ----------------------------------------------------------------------------------------------------

    def explain(self, error: AbsentValueError) -> None:
        """Add a note to an error if the step has left the captured path here or on an earlier stage."""
        if self._detour is None:
            return
        if any(isinstance(node, OffPathNode) for node in self._before):
            remedy = "What only that needs of an earlier stage must be in a local variable where that stage ends"
        else:  # earlier stages did not leave the captured path, and sent what it needs
            remedy = "Let the first batch use that value too (times zero), or keep both units on one stage"
        error.add_note(
            f"With this micro-batch {self._program.graph.step} does something else than with the first one, by which "
            f"it was divided. {remedy}"
        )

    def _new_detour(self, shared: frozenset[int] = frozenset()) -> Detour:
        self._writer.refuse("it does something else than when it was captured")
        received, values = self._program.receives, self._program.graph.values
        storages = Counter(values[number].storage for number in received)  # each has arrived in memory of its own
        shared |= {number for number in received if storages[values[number].storage] > 1}
        return Detour(self._program, self.known, self._owned, self._before, shared)

    def _off_path(self, operation: Operation, expected: Node | None) -> Any:
        """Handle a node that was not captured."""
        if operation.kind == "glue" and operation.name in _DIFFERENTIATING:
            self._check_complete(operation)
        detour, names = self._detour or self._new_detour(), operation.uses(self._owned)
        is_later = detour.is_later(names)
        if not (is_later or detour.may_run(operation.kind, names)):
            raise self._changed(operation, expected)
        self._detour = detour
        if is_later:
            detour.leave(names, [*operation.tensors, *self._observed, *_variables()])
            raise self._ended()
        self._position += 1
        with self.executing():
            return detour.run(operation, self._position - 1, self._runner)

    def _check_complete(self, operation: Operation) -> None:
        """Check that a derivative that the step takes off the captured path depends on this stage alone."""
        if operation.name in HOOKING:
            asked = [operation.args[0]]
        else:
            given = operation.args[1:2] if operation.name == "grad" else ()
            asked = tree.tensors(operation.kwargs.get("inputs", given))
        if asked and all(id(t) in self._owned or self.values.is_made_here(self.known.value_of(t)) for t in asked):
            return
        if operation.name not in HOOKING and not self.values.leads_to_received(tree.tensors(operation.args[:1]), asked):
            return
        program = self._program
        raise StepChangedError(
            f"{operation} at {source_line()} asks for a derivative with respect to what stage {program.stage} has not "
            f"made, which {program.graph.step} did not do when it was captured: what earlier stages add to it would be "
            "missing. Compute it in the forward of a submodule; or let the first batch do so too, so that no cut lies "
            "there"
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Clean up after the step; the exception that ended it must go, since its frames keep all activations alive."""
        self.values.restore()
        self._end = None
        self._held.restore()

    def sent(self) -> tuple[Tensor, ...]:
        """Return the tensors for ``program.sends``, or those of a detour."""
        if self._detour is not None:
            return self._detour.sent
        return tuple(map(self.values.to_send, self._program.sends))

    def descriptions(self) -> tuple[ResultDescription, ...] | Path:
        """Return the descriptions of all nodes up to the end of this stage, or their path."""
        return self._entries if self._detour is None else self._detour.path(self._entries)

    @property
    def _entries(self) -> tuple[Any, ...]:
        """The descriptions of all nodes; off-path nodes are among them if an earlier stage took a detour."""
        return (*self._before, *self._own) if self._own else self._before

    def is_complete(self, result: Any) -> bool:
        """Return whether this stage's part of the step went as far as when it was captured."""
        return self._position == self._program.end and (result is not None or not self._program.is_last)

    def check_finished(self, result: Any) -> None:
        """Check that the step went as far as when it was captured, or returned None where it did on earlier stages."""
        if self._end is not None:
            raise self._caught(self._end)
        position, program = self._position, self._program
        as_before = self._ended_before and position == len(self._before)  # ended where it did on an earlier stage
        if self._start <= position <= program.end < len(program.graph.nodes) and result is not None:
            self._detour = self._detour or self._new_detour()  # the captured step went on
        if self._detour is not None and not program.is_last:
            self._detour.leave(set(), [*tree.tensors(result), *self._observed], ended=result is None)
            return
        expected = self._start if program.is_last else program.end
        if position < expected and (result is not None or (self._ended_before and not as_before)):
            raise self._changed(None, program.graph.nodes[position])

    def _ended(self) -> _StageEnd:
        self._held = self._late_effect_checks.held()
        self._end, self.has_left = _StageEnd(), True
        return self._end

    def _caught(self, end: _StageEnd) -> StepChangedError:
        """Return the error for a step that has caught the exception that ends it on this stage."""
        return StepChangedError(
            f"{self._program.graph.step} catches every exception at {caught_line(end)}, also the BaseException "
            f"by which it ends on stage {self._program.stage}; write 'except Exception' instead of a bare 'except' or "
            "'except BaseException', do not return in 'finally', or keep these lines on one stage with split_points"
        )

    def _changed(self, operation: Operation | None, node: Node | None) -> StepChangedError:
        now = "it ended" if operation is None else f"it came to {operation} at {source_line()}"
        then = "it ended" if node is None else f"it came to {node}"
        return StepChangedError(
            f"{self._program.graph.step} does not do what it did when it was captured: after {self._position} nodes "
            f"{then} then, {now} now (stage {self._program.stage}). What a step calls must not depend on the batch, "
            "the time or chance, unless its units come in the order of the stages; move the difference into one unit, "
            "or keep it on the last stage with split_points. If it has changed for good, as from some epoch on, a run "
            "that resumes from a checkpoint follows it as it is then"
        )


def _variables() -> list[Tensor]:
    """Return the tensors in local variables of the step's functions on the call stack, which it may use later."""
    found: list[Tensor] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not replay.__code__:
        if frame.f_globals is not globals():
            found += tensor_arguments(*frame.f_locals.values())
        frame = frame.f_back
    return found
