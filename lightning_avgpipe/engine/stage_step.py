"""Execute one stage's part of a step on one micro-batch after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.capture.tracer import uncompiled, watching
from lightning_avgpipe.engine.attestation import Attested
from lightning_avgpipe.engine.compiling import Execution
from lightning_avgpipe.engine.flat_program import FlatProgram, Surprise
from lightning_avgpipe.engine.inspection import ForeignTensors, Inspection
from lightning_avgpipe.engine.operation import Repeat, Runner
from lightning_avgpipe.engine.own_stream import OwnStream
from lightning_avgpipe.engine.path import Entry, Path
from lightning_avgpipe.engine.programs import Form, Programs
from lightning_avgpipe.engine.randomness import Drawing, Draws
from lightning_avgpipe.engine.replay import Ground, Observe, Replayed, replay
from lightning_avgpipe.engine.rewriting import Rewritten
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.engine.unforeseen import Unforeseen
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.random_streams import seed_host, stream


class StageStep:
    """The step as a stage executes it, one micro-batch after the other.

    Args:
        program: program of the stage.
        module: the whole module; parameters of other stages may be absent.
        device: device of the stage.
        foreign_tensors: tensors that its first forward in training must not use; None: it may use all.
        execution: options of compilation and of flat programs.

    Attributes:
        rewritten: tensors that the stage changes in place.
        stream: stream on which it runs; None: the current one.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        device: torch.device,
        foreign_tensors: ForeignTensors | None,
        execution: Execution,
    ) -> None:
        graph = program.graph
        self._graph = graph
        self._program = program
        self._module = module
        self._programs = Programs(program, module, device, execution.static)
        self._foreign_tensors = foreign_tensors
        units = {id(module.get_submodule(path)): path for path in graph.units}
        packer = Packer(module) if any(node.opens for node in graph.nodes) else None
        self._unforeseen = unforeseen = Unforeseen(program, module)
        drawing = Drawing.of(module, graph)
        self._ground = Ground(units, owned_tensors(module, ()), drawing, device, packer, execution.compiler, unforeseen)
        self._began_on_host = False  # in this iteration
        self.rewritten = Rewritten.of(program, module)
        self.stream: OwnStream | None = None

    def begin(self, stream: OwnStream | None) -> None:
        """Begin an iteration whose actions run on this stream."""
        self.stream = stream
        self._programs.begin()
        if self._began_on_host:  # only now: within an iteration a repeated forward must draw the same
            assert self._ground.drawing is not None
            self._ground = replace(self._ground, drawing=replace(self._ground.drawing, late_on_host=True))
            self._began_on_host = False

    def run(
        self,
        program: StageProgram,
        task: Task,
        micro_batch: int,
        received: Sequence[Tensor],
        entries: tuple[Entry, ...] | Path,
        copies: Mapping[int, str],
        observe: Observe | None,
        repeat: Repeat | None,
        tap: int,
        watched: Callable[[], AbstractContextManager[Any]],
        attested: tuple[Attested, ...],
    ) -> Replayed:
        """Execute a program, the stage's own or a part of it, on one micro-batch of a task.

        Further arguments are as for :func:`replay`.

        Args:
            copies: ``id -> full name`` of the copies that stand for parameters now.
            watched: return the context within which the step runs.
        """
        observe = observe or self.observe
        flat = task.trains and program is self._program and not tap and self._may_repeat(task, entries)
        form = self._programs.form(task.args[micro_batch], received, (entries, attested)) if flat else None
        writer = None
        if form is not None:
            for written in self._programs.find(form):
                with watched(), self.rewritten.saved(task.trains), contextlib.suppress(Surprise):
                    return self._run_program(written, form, task, micro_batch, entries, attested, observe, repeat)
            writer = self._programs.writer(form)
        args = task.args[micro_batch]
        with self._inspected(task) as inspection, self.rewritten.saved(task.trains):
            with watched(), self._unforeseen.checked(args):
                if writer is not None and form is not None and task.around is not None:
                    with task.around(micro_batch):  # the context may set modes, such as autocast
                        writer.begin(form.tensors)
                replayed = replay(
                    program,
                    self._ground_now(copies),
                    partial(task.run, micro_batch),
                    args,
                    received,
                    entries,
                    task.key_of(micro_batch),
                    observe,
                    repeat,
                    tap,
                    self._unforeseen.node if program.num_stages > 1 else None,
                    attested if task.trains else None,
                    writer,
                )
            self._began_on_host |= replayed.began_on_host
            if inspection is not None:
                inspection.follow_gradients([*replayed.sent, *tree.tensors(replayed.result)])
        if writer is not None and form is not None:
            self._programs.keep(form, writer)
        return replayed

    def _may_repeat(self, task: Task, entries: tuple[Entry, ...] | Path) -> bool:
        """Return whether a program that is written for one micro-batch of a task may run with others."""
        drawing = self._ground.drawing
        late = drawing is not None and drawing.late_on_host
        several = task.around is not None and (len(task.args) > 1 or self._programs.static)
        return several and not late and self._programs.why_not is None and not isinstance(entries, Path)

    def _run_program(
        self,
        program: FlatProgram,
        form: Form,
        task: Task,
        micro_batch: int,
        entries: tuple[Entry, ...] | Path,
        attested: tuple[Attested, ...],
        observe: Observe | None,
        repeat: Repeat | None,
    ) -> Replayed:
        """Run a program that was written for another micro-batch on this one."""
        ground, key = self._ground, task.key_of(micro_batch)
        assert task.around is not None and not isinstance(entries, Path)
        draws = None if ground.drawing is None else Draws(ground.drawing, key, ground.device)
        runner = Runner(draws, repeat, ground.packer, None, ground.compiler)
        compiled = ground.compiler is not None or ground.drawing is None or not ground.drawing.seen
        seed_host(key.derive("host"))  # nothing drew from these when the program was written
        with (
            nullcontext() if draws is None else stream(key.derive("step"), ground.device),
            nullcontext() if draws is None else watching(draws),
            nullcontext() if compiled else uncompiled(),
            task.around(micro_batch),
        ):
            done = program.run(form.tensors, runner, observe)
        told = entries if self._program.is_last else (*entries, *done.entries)
        return Replayed(done.result, done.sent, told, None, False, (*attested, *program.attested))

    @property
    def observe(self) -> Observe | None:
        """The function that calls ``self.log`` and metrics; None: they are called directly."""
        return None if self.stream is None else self.stream.call

    def loss(self, finish: Callable[[int, Any], Tensor | None], micro_batch: int, result: Any) -> Tensor | None:
        """Return the tensor from which a micro-batch's backward starts; this calls the user's hooks."""
        with nullcontext() if self.stream is None else self.stream.left():
            return finish(micro_batch, result)

    def _inspected(self, task: Task) -> AbstractContextManager[Inspection | None]:
        """Run a forward within this context, and inspect it if it is the first in training."""
        return nullcontext() if self._foreign_tensors is None or not task.trains else self._inspection(task)

    @contextmanager
    def _inspection(self, task: Task) -> Iterator[Inspection]:
        assert self._foreign_tensors is not None
        inspection, self._foreign_tensors = Inspection(self._foreign_tensors(self._graph.changed)), None
        try:
            with inspection:
                yield inspection
        finally:  # using another model's tensors may be why a replay fails
            inspection.check(task.key.pipeline)

    def _ground_now(self, copies: Mapping[int, str]) -> Ground:
        if not copies and not self._graph.glue_states:
            return self._ground
        # glue may have replaced buffers by other objects
        return replace(self._ground, owned={**owned_tensors(self._module, self._graph.glue_states), **copies})
