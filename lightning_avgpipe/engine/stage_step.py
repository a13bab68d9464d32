"""One stage's part of a step, executed on one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.engine.compiling import Compiler
from lightning_avgpipe.engine.constants import Constants
from lightning_avgpipe.engine.idle_iterators import IdleIterators
from lightning_avgpipe.engine.inspection import ForeignTensors, Inspection
from lightning_avgpipe.engine.operation import Repeat
from lightning_avgpipe.engine.own_generators import OwnGenerators, unmoved
from lightning_avgpipe.engine.own_stream import OwnStream
from lightning_avgpipe.engine.path import Entry, Path
from lightning_avgpipe.engine.randomness import Drawing
from lightning_avgpipe.engine.replay import Ground, Observe, Replayed, replay
from lightning_avgpipe.engine.rewriting import Rewritten
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.parcel import Packer


class StageStep:
    """The step as a stage executes it, one micro-batch after the other.

    Args:
        program: of the stage.
        module: the whole module; parameters of other stages may be absent.
        device: where it computes.
        foreign_tensors: what its first forward of training must not use; None: it may use everything.
        compiler: of units; None: they run as they are.

    Attributes:
        rewritten: the tensors that it writes into.
        stream: on which it runs; None: on the current one.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        device: torch.device,
        foreign_tensors: ForeignTensors | None,
        compiler: Compiler | None,
    ) -> None:
        graph = program.graph
        self._graph = graph
        self._module = module
        self._foreign_tensors = foreign_tensors
        units = {id(module.get_submodule(path)): path for path in graph.units}
        packer = Packer(module) if any(node.opens for node in graph.nodes) else None
        self._ground = Ground(units, owned_tensors(module, ()), Drawing.of(module, graph), device, packer, compiler)
        self.rewritten = Rewritten.of(program, module)
        self.stream: OwnStream | None = None
        self._constants = Constants.of(program, module)
        self._generators = OwnGenerators(program, module)
        self._iterators = IdleIterators(program, module)

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
        taps: frozenset[int],
        watch: AbstractContextManager[Any],
    ) -> Replayed:
        """Execute a program, the stage's own or a part of it, on one micro-batch of a task.

        Args:
            copies: ``id -> full name`` of what stands for parameters now.
            watch: within which the step runs.
        Others are as for :func:`replay`.
        """
        with self._inspected(task) as inspection, self.rewritten.saved(task.trains), self._constants.checked():
            with watch, self._iterators.untouched(), self._generators.watched(), unmoved(task.args[micro_batch]):
                replayed = replay(
                    program,
                    self._ground_now(copies),
                    partial(task.run, micro_batch),
                    task.args[micro_batch],
                    received,
                    entries,
                    task.key_of(micro_batch),
                    observe or self.observe,
                    repeat,
                    taps,
                    self._generators.node if program.num_stages > 1 else None,
                )
            if inspection is not None:
                inspection.follow_gradients([*replayed.sent, *tree.tensors(replayed.result)])
        return replayed

    @property
    def observe(self) -> Observe | None:
        """What calls ``self.log`` and metrics; None: they are called as they are."""
        return None if self.stream is None else self.stream.call

    def loss(self, finish: Callable[[int, Any], Tensor | None], micro_batch: int, result: Any) -> Tensor | None:
        """What the backward of a micro-batch begins with; the user's hooks are called for it."""
        with nullcontext() if self.stream is None else self.stream.left():
            return finish(micro_batch, result)

    def _inspected(self, task: Task) -> AbstractContextManager[Inspection | None]:
        """A forward runs within this context; the first of training is inspected."""
        return nullcontext() if self._foreign_tensors is None or not task.trains else self._inspection(task)

    @contextmanager
    def _inspection(self, task: Task) -> Iterator[Inspection]:
        assert self._foreign_tensors is not None
        inspection, self._foreign_tensors = Inspection(self._foreign_tensors(self._graph.changed)), None
        try:
            with inspection:
                yield inspection
        finally:  # a replay that fails may do so because the step reached past its model
            inspection.check(task.key.pipeline)

    def _ground_now(self, copies: Mapping[int, str]) -> Ground:
        if not copies and not self._graph.glue_states:
            return self._ground
        # buffers that glue changes may be other objects by now
        return replace(self._ground, owned={**owned_tensors(self._module, self._graph.glue_states), **copies})
