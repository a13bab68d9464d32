"""Execute one stage's part of a step on each micro-batch, by following the step or by running a flat program.

::

    iteration 1          every micro-batch is followed and written down, and the programs are compared
    2, 3, ...            micro-batch 0 is followed and written down, the others run its program
    every 64th           like iteration 1, and so is every one until two programs of one form were equal

If two programs of one form differ, or a step cannot be written down, every micro-batch is followed from then on. If the
user declares the step static, only iteration 1 and every 64th follow micro-batches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.capture.tracer import uncompiled, watching
from lightning_avgpipe.engine.execution import Execution, OwnStream
from lightning_avgpipe.engine.flat_program import (
    NULL_WRITER,
    VALUES,
    AnswerChanged,
    FlatProgram,
    FormChanged,
    ProgramWriter,
    description,
)
from lightning_avgpipe.engine.late_effect_checks import LateEffectChecks
from lightning_avgpipe.engine.late_effects import ReadState
from lightning_avgpipe.engine.part import Observe, Part, Path, ReplayContext, Replayed, Runner
from lightning_avgpipe.engine.randomness import Drawing
from lightning_avgpipe.engine.replay import replay
from lightning_avgpipe.engine.stage_values import AnswerCache
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.engine.tensor_use import ForeignTensors, Inspection, Rewritten, registers_of, states_of
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram, stage_programs
from lightning_avgpipe.state.outside import assigned_names, names_in, user_classes
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import joined, listed, nearest
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.utils.random_streams import seed_host

_AUDITED_EVERY = 64  # iterations; in every 64th, all micro-batches are followed and compared
_MOST_FORMS = 8  # of micro-batches for which programs are kept

_NOTHING: AbstractContextManager[Any] = nullcontext()

_log = logging.getLogger(__name__)


def why_follow(program: StageProgram) -> str | None:
    """Return a property of a step's graph that rules out flat programs, with what has it; None: there is none."""
    graph = program.graph
    kept, unnamed = [*program.upkeep, *program.foreign_upkeep], ["unnamed"] * bool(graph.generators)
    reasons: dict[str, Sequence[object]] = {
        "it changes its batch": ["in place"] * graph.batch_writes,
        "it changes buffers between units": [*sorted(graph.glue_states), *(graph.nodes[index] for index in kept)],
        "it changes attributes or objects": [joined(*key) for key in (*graph.changed_between, *graph.set_back)],
        "it writes into tensors of its own": [*(joined(*key) for key in graph.written_tensors), *graph.carried],
        "it draws from Python's or NumPy's generators": [path or "the step" for path in sorted(graph.host_drawing)],
        "it has generators of its own": [name for use in graph.generators for _, name, _ in use.leads] or unnamed,
        "it holds iterators": [joined(*key) for key in graph.iterators],
        "it branches on numbers in tensors": [node for node in graph.nodes[: program.end] if node.reads_numbers],
    }
    found = ((reason, list(dict.fromkeys(map(str, names)))) for reason, names in reasons.items() if names)
    return next((f"{reason} ({listed(names)})" for reason, names in found), None)


def remarks(graph: CallGraph, cuts: Sequence[int]) -> list[str]:
    """Return a line that says why stages follow the Python of a step for each micro-batch; none if it is not known."""
    reasons = [why for program in stage_programs(graph, cuts) if (why := why_follow(program)) is not None]
    return [f"the Python of your step runs for each micro-batch: {reasons[-1]}"] if reasons and cuts else []


_NOT_STATIC = "static_step=False, or a hook of yours runs between micro-batches (such as on_before_zero_grad)"


def signature(part: Part, static: bool) -> tuple[Sequence[Tensor], tuple[Any, ...]]:
    """Return the tensors of a micro-batch, and its form: micro-batches of the same form can run one program.

    The tensors are those of the batch, then the received ones. The form describes them, all other arguments of the
    step, and what else came in the message of the previous stage.

    Args:
        part: part of the step, with the micro-batch.
        static: whether arguments other than the micro-batch, such as the index of the batch, are ignored.
    """
    tensors: list[Tensor] = []
    structure = _structure(tuple(part.args[:1] if static else part.args), tensors)
    # attributes that users have added to tensors are not compared: object() makes the form unique
    attributes = [object() if vars(tensor) and not isinstance(tensor, Absent) else None for tensor in tensors]
    tensors += part.received
    return tensors, (list(map(description, tensors)), attributes, structure, part.descriptions, part.requests)


def _structure(item: Any, tensors: list[Tensor]) -> Any:
    """Return a tree without its tensors, which are appended to ``tensors``."""
    kind = type(item)
    if isinstance(item, Tensor):
        tensors.append(item)
        return None
    if kind in VALUES:
        return kind, item
    if kind is tuple or kind is list:
        return kind, [_structure(part, tensors) for part in item]
    if kind is dict:
        return kind, [(name, _structure(part, tensors)) for name, part in item.items()]  # in order, as the tensors
    leaves, spec = tree.flatten(item)
    if len(leaves) == 1 and leaves[0] is item:
        return kind, id(item)  # an object, compared by id since its == need not return a bool
    return spec, [_structure(leaf, tensors) for leaf in leaves]


class Programs:
    """The flat programs of one stage.

    Args:
        program: program of the stage.
        module: the whole module.
        context: data that all replays of the stage share.
        static: ``"auto"``: the step's Python is checked for side effects; ``True``: it is declared to have none, and to
            do the same in each iteration; ``False``: each micro-batch is followed.

    Attributes:
        static: whether the step is declared static.
        why_not: reason why there can be no programs; None: none is known.
    """

    def __init__(
        self, program: StageProgram, module: nn.Module, context: ReplayContext, static: bool | Literal["auto"]
    ) -> None:
        self.static = static is True
        self.why_not: str | None = None
        self._program = program
        self._module, self._context = module, context
        self._iteration = 0
        self._is_audited = True  # whether the programs of this iteration are compared, whatever was found before
        self._audits, self._agreed = True, False  # all are followed now; two programs of one form were equal
        self._written: list[tuple[Any, FlatProgram]] = []  # with their forms
        self._read, self._read_in_part = ReadState(program, module), ReadState(program, module, in_part=True)
        if (why := why_follow(program) if static else _NOT_STATIC) is not None:
            self.end(why)

    def begin(self) -> None:
        """Begin an iteration: drop earlier programs, unless the step is static and this iteration runs programs."""
        self._iteration += 1
        self._is_audited = self._iteration == 1 or self._iteration % _AUDITED_EVERY == 0
        self._audits = self._is_audited or not (self._agreed or self.static)
        if self._audits or not self.static:
            self._written.clear()

    def find(self, form: Any) -> list[FlatProgram]:
        """Return the programs for this form, one for each set of answers; none if the micro-batch must be followed."""
        if self._audits:
            return []
        if not self._written or self._read.changed() is not None:
            self._written.clear()
            self._read.note()
            self._read_in_part.note()
        return self._of(form)

    def check_read(self) -> None:
        """Check that the program that ran has changed nothing that the step reads in this stage's part.

        Raises:
            StepChangedError: it has changed something.
        """
        if (changed := self._read_in_part.changed()) is not None:
            raise StepChangedError(
                f"a submodule of stage {self._program.stage} changes {changed}, which it did not do with the first "
                "micro-batch of this batch, and which the step reads between submodules. Let every micro-batch change "
                "it (by nothing, if need be), or set static_step=False, so that each one is followed"
            )

    def _of(self, form: Any) -> list[FlatProgram]:
        return [program for known, program in self._written if known == form]

    def writer(self, form: Any) -> ProgramWriter:
        """Return a writer for the micro-batch of this form that is followed now."""
        if not self.static and self._named_and_assigned:
            self.end(f"it names '{min(self._named_and_assigned)}', which a submodule assigns")
        if self.why_not is not None or len(self._written) >= _MOST_FORMS:
            return NULL_WRITER
        # of two micro-batches of a form, at least one is checked before programs run
        checks = not self.static and (self._is_audited or bool(self._of(form)))
        return ProgramWriter(self._module, self._context, checks)

    @functools.cached_property
    def _named_and_assigned(self) -> frozenset[str]:
        """The names that code between units reads and units assign to, perhaps other values for each micro-batch."""
        graph, module = self._program.graph, self._module
        units = {inner for path in graph.units for inner in module.get_submodule(path).modules()}
        between = [getattr(module, graph.step), *(m.forward for m in module.modules() if m not in units)]
        return names_in(between, user_classes(module)) & assigned_names(map(type, units))

    def keep(self, form: Any, writer: ProgramWriter) -> None:
        """Keep the program that was written, or note why there can be none."""
        program = writer.program
        if program is None:
            self.end(writer.why_not or "it cannot be written down")
            return
        before = next((other for other in self._of(form) if other.answers == program.answers), None)
        if before is None:
            self._written.append((form, program))
        elif before == program:
            self._agreed = True
        else:
            self.end("it does something else with each micro-batch")

    def end(self, why: str) -> None:
        """Note why there can be no programs from now on."""
        self.why_not = why
        self._written.clear()
        _log.info("stage %d follows the Python of the step for each micro-batch: %s", self._program.stage, why)


class StageStep:
    """The step as a stage executes it, one micro-batch after the other.

    Args:
        program: program of the stage.
        module: the whole module; parameters of other stages may be absent.
        device: device of the stage.
        foreign_tensors: tensors that its first forward in training must not use; None: it may use all.
        execution: options for the execution of units.
        repeats: whether an earlier stage of this process also runs the code before this stage's part.

    Attributes:
        rewritten: tensors that the stage changes in place.
        compiled: whether units run code that was compiled by ``torch.compile``, rather than the original.
        stream: stream on which it runs; None: the current one.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        device: torch.device,
        foreign_tensors: ForeignTensors | None,
        execution: Execution,
        repeats: bool,
    ) -> None:
        graph = program.graph
        self._graph = graph
        self._program = program
        self._module = module
        self._foreign_tensors = foreign_tensors
        units = {id(module.get_submodule(path)): path for path in graph.units}
        self._late_effect_checks = LateEffectChecks(program, module, repeats)
        self._context = ReplayContext(
            units,
            owned_tensors(module, ()),
            Drawing.of(module, graph),
            device,
            Packer(module),
            execution.compiler,
            self._late_effect_checks,
        )
        self._answers = AnswerCache(program, device)
        self._programs = Programs(program, module, self._context, execution.static)
        self._began_on_host = False  # whether draws from the host's generators began in this iteration
        called = (name for name, _ in module.named_buffers() if nearest(name, program.called))
        self._buffers = registers_of(module, called)
        self._states: dict[str, tuple[int, int]] = {}  # of these buffers, before the running program
        self.rewritten = Rewritten(program, module)
        self.compiled = self._context.compiled
        self.stream: OwnStream | None = None

    def begin(self, stream: OwnStream | None) -> None:
        """Begin an iteration whose actions run on this stream."""
        self.stream = stream
        self._programs.begin()
        self._late_effect_checks.begin_iteration()
        if self._began_on_host:  # not earlier, since a forward that is repeated in its iteration must draw the same
            self._context = replace(self._context, drawing=replace(self._context.drawing, late_on_host=True))
            self._began_on_host = False

    def run(self, part: Part, task: Task, micro_batch: int, copies: Mapping[int, str]) -> Replayed:
        """Execute the stage's part of a step, or a part of it, on one micro-batch of a task.

        Args:
            part: what is executed.
            task: work of the iteration.
            micro_batch: number of the micro-batch.
            copies: ``id -> full name`` of the copies that stand for parameters now.
        """
        trains, writer = task.trains, NULL_WRITER
        if self._may_repeat(part, task):
            assert task.around is not None
            given, form = signature(part, self._programs.static)
            for written in self._programs.find(form):
                self._states = states_of(self._buffers)
                try:
                    with self.rewritten.saved(trains), self._late_effect_checks.checked_program():
                        replayed = self._run_program(written, given, part, task.around(micro_batch))
                except AnswerChanged:
                    continue
                except FormChanged as other:
                    self._check_nothing_left(other)
                    self._programs.end(str(other))
                    break
                self._programs.check_read()
                return replayed
            writer = self._programs.writer(form)
        with self._inspected(task) as inspection, self.rewritten.saved(trains):
            with self._late_effect_checks.checked(part.args):
                if writer is not NULL_WRITER and task.around is not None:
                    with task.around(micro_batch):  # the context may set modes, such as autocast
                        writer.begin(given)
                replayed = replay(part, self._context_now(copies), writer, self._answers)
            if replayed.began_on_host:
                self._began_on_host = True
                writer.refuse("it draws from Python's or NumPy's generators")
            if inspection is not None:
                inspection.follow_gradients([*replayed.sent, *tree.tensors(replayed.result)])
        if writer is not NULL_WRITER:
            self._programs.keep(form, writer)
        return replayed

    def _may_repeat(self, part: Part, task: Task) -> bool:
        """Return whether a program that is written for one micro-batch of a task may run with others."""
        if self._programs.why_not is not None or not task.trains or task.around is None:
            return False
        if part.program is not self._program or part.tap or type(part.descriptions) is Path:
            return False
        return (len(task.args) > 1 or self._programs.static) and not self._context.drawing.late_on_host

    def _check_nothing_left(self, other: FormChanged) -> None:
        """Check that an abandoned program had no lasting effects, so that the step can be followed instead.

        Raises:
            StepChangedError: it had some.
        """
        changes = self._graph.changed_by_units or self._graph.written_tensors
        if other.leaves or changes or self._states != states_of(self._buffers):
            raise StepChangedError(
                f"{other.instruction} returned something of another form (a shape, a flag, a structure) than with the "
                "first micro-batch of this batch, after the step had logged or changed something. Return the same "
                "form for every micro-batch, or set static_step=False, so that each one is followed"
            ) from None

    def _run_program(
        self, program: FlatProgram, tensors: Sequence[Tensor], part: Part, around: AbstractContextManager[None]
    ) -> Replayed:
        """Run a program that was written for another micro-batch on this one."""
        runner = Runner(part, self._context)
        seed_host(part.key.derive("host"))  # nothing drew from these when the program was written
        draws = runner.draws
        with draws.stream(), watching(draws), _NOTHING if self.compiled else uncompiled(), around:
            return program.run(tensors, part, runner)

    @property
    def observe(self) -> Observe | None:
        """The function that calls ``self.log`` and metrics; None: they are called directly."""
        return None if self.stream is None else self.stream.call

    def _inspected(self, task: Task) -> AbstractContextManager[Inspection | None]:
        """Run a forward within this context, and inspect it if it is the first in training."""
        if self._foreign_tensors is None or not task.trains:
            return nullcontext()
        foreign, self._foreign_tensors = self._foreign_tensors(self._graph.changed), None
        return Inspection(foreign, task.key.pipeline)

    def _context_now(self, copies: Mapping[int, str]) -> ReplayContext:
        if not copies and not self._graph.glue_states:
            return self._context
        # glue may have replaced buffers by other objects
        return replace(self._context, owned={**owned_tensors(self._module, self._graph.glue_states), **copies})
