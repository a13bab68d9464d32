"""Asynchronous iterations: one pipeline goes from batch to batch without a drain, under a weight policy.

::

    M = 2    stage 0 | F0 F1 F2 F3 B0 B1 u | F4 B2 F5 B3 u | ..        u: the hooks of a step, and the step
             stage 3 | F0 B0 F1 B1 u | F2 B2 F3 B3 u | ..

In each process Lightning works on batch t. Within Lightning's optimization the stages of the process run until each
has ended the backwards of t, and with them the forwards of later batches that 1F1B schedules by then. The hooks of a
backward and of a step follow, and the optimizer's step. No process waits for the step of another. The consequences:

- Before batch t those later batches are read whose forwards the first stage runs early. Their transfer hooks run
  then. All other hooks run in their usual order, and so does everything on the last stage, with losses and logs.
- Gradients are those of one batch, and no optimizer steps early: hooks find weights, gradients and optimizers as they
  are after batch t. Buffers that a step changes may already have been changed by later batches.
- Steps on other stages than the last see the trainer's counters as they will be for their batch; see ``AheadWatch``.
- Before an event that needs a drained pipeline (a validation, a checkpoint every n steps, the end of an epoch or of
  training), no forward of a later batch runs, and versions count from 0 afterwards. If such an event was not foreseen,
  :meth:`drain` discards these forwards: no weights depend on them, and buffers get their contents back. The batches are
  kept, and run again.
- A batch with another number of micro-batches than the batch before begins after a drain.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ConfigurationError, MicroBatchError, ScheduleError
from lightning_avgpipe.strategy.ahead import STEP, AheadIterations, BatchRead
from lightning_avgpipe.strategy.foresight import Progress, as_it_will_be
from lightning_avgpipe.systems.asynchronous.store import WeightStore
from lightning_avgpipe.systems.asynchronous.stream import Stream
from lightning_avgpipe.systems.asynchronous.versions import Place
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(kw_only=True)
class _Batch(BatchRead):
    """A batch on its way through the stages.

    Attributes:
        parts: its micro-batches.
    """

    parts: Sequence[MicroBatch]

    def begin_backward(self, i: int, result: Any) -> Tensor | None:
        """Return the loss of a micro-batch. Called on the last stage, which runs no batch early."""
        assert self.finish is not None
        return self.finish(0, i, result)


@dataclass(kw_only=True)
class AsynchronousIterations(AheadIterations):
    """Iterations of one pipeline that overlap, with versions of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.deployment.weights, WeightStore)
        self._weights = self.deployment.weights
        self._stream: Stream | None = None  # the batches from one drain to the next
        self._ends = False  # after the batches that it has taken
        self._coming: deque[_Batch] = deque()  # batches read ahead; the last may be for the next stream
        self._trained: frozenset[str] = frozenset()  # parameters that are trained, since the drain

    @property
    def _overlaps(self) -> bool:
        return self.cluster.stage_map.num_stages > 1

    def train(self, batches: Sequence[Any], *rest: Any) -> Any:
        """Run until the stages of this process have ended a batch."""
        passes = self.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        if passes or not self._overlaps or (self._stream is None and self.deployment.replans):
            self.drain()
            return super().train(batches, *rest)
        (batch,) = batches
        current = self._coming.popleft() if self._coming else self._made(batch, rest, 0)
        if current.batches[0] is not batch or current.changed:
            raise self.other_batch()
        current.progress = None
        try:
            return self._run_in_turn(current)
        except MicroBatchError:
            raise  # nothing has run yet
        except BaseException:
            if self.cluster.world.world_size > 1:
                self.broken()
            raise

    def stepped(self) -> None:
        """Note the new version of the weights after the optimizers have stepped, and drain if no batch follows."""
        if self._stream is not None:
            self._weights.stepped()
            if self._ends and self._stream.batch == self._stream.known:
                self.drain()

    def drain(self) -> None:
        """Drain the pipeline: weights, buffers and channels are as after the last batch. Every process calls it.

        Forwards of later batches that have run are discarded, and run again.
        """
        self._drain(together=True)

    def _drain(self, together: bool) -> None:
        stream, self._stream, self._ends = self._stream, None, False
        if stream is not None:
            stream.end(together)

    def leave(self, together: bool = True) -> None:
        """Drop the batches that were read ahead: the epoch ends, or batches change.

        Args:
            together: whether every process calls it; else the channels are not used any more.
        """
        self._drain(together)
        self._coming.clear()
        self.batches.forget_ahead()

    def _made(self, batch: Any, rest: tuple[Any, ...], ahead: int) -> _Batch:
        return _Batch(
            batches=[batch],
            number=self._number(STEP) + ahead,
            parts=self.splitter.split(batch),
            rest=tuple(index + ahead for index in rest),  # batch_idx, if the step takes it
            progress=Progress.after_steps(self.trainer, ahead) if ahead else None,
        )

    def _run_in_turn(self, current: _Batch) -> Any:
        context, parts = self.trainer.precision_plugin.train_step_context, current.parts
        if self._stream is None:
            if not self._begin(current):
                self.models.skipped = frozenset({0})
                return None
        elif self._trained != self._trained_now:
            raise self.others_trained()
        else:
            self._foresight.check()
        stream = self._stream
        assert stream is not None and self.deployment.plan is not None
        self._read_ahead(stream, current.rest)
        current.finish = self._finish(lambda: [parts], self._clear_now())
        self.models.step_log.begin(len(parts))
        schedule = self._schedule(parts, True)
        with self.schedule_control.iteration(self._task(current), [parts], self.deployment.plan, schedule):
            outcome = stream.run(tuple(self.schedule_control.observers))
        self.models.skipped = frozenset({0} if len(outcome.skipped) == len(parts) else ())
        nothing = torch.zeros((), device=self.cluster.device)
        result = {"loss": nothing} if outcome.results is None else self._merged(outcome.results, parts)
        with context():
            self.models.step_log.issue()
        self._weights.keep()  # before hooks, which may change weights
        self._foresight.check()
        self.models.after_backward(0, nothing if result is None else loss_in(result))
        return None if 0 in self.models.skipped else result

    def _begin(self, current: _Batch) -> bool:
        """Begin a stream of batches with this one; return whether the step has stages."""
        works, context = [current.parts], self.trainer.precision_plugin.train_step_context
        run = partial(self._micro_batch, STEP, context, works, 0, 0)
        if not self.preparation.prepare(STEP, run, works, current.rest, self._schedule(current.parts, True), 1):
            self._run_skipped(STEP, context, works, run, current.rest)
            return False
        count, stages = len(current.parts), self.cluster.stage_map.num_stages
        if not self._checked:
            self._weights.policy.check(stages, count)
            self._check_graph()
            self._check_weights()
        (pipeline,) = self.models.pipelines_for(STEP, 1)
        self._weights.begin(count)
        self._stream = Stream(pipeline, STEP, self._weights, count)
        self._stream.take(self._task(current))
        self._ends = not self._fits(count)
        self._foresight.begin(pipeline.graph(STEP))
        self._trained = self._trained_now
        return True

    def _fits(self, num_microbatches: int) -> bool:
        """Return whether batches of this size may follow one another without a drain; an epoch's last may be small."""
        try:
            self._weights.policy.check(self.cluster.stage_map.num_stages, num_microbatches)
        except ScheduleError:
            return False
        return True

    def _check_weights(self) -> None:
        """Check that the step does not write into parameters, of which there are several versions.

        Raises:
            ConfigurationError: names the parameter.
        """
        parameters = dict(self._module.named_parameters())
        written = [name for name in sorted(self.deployment.pipeline.graph(STEP).changed) if name in parameters]
        if written:
            raise ConfigurationError(
                f"{type(self._module).__name__}.{STEP} writes into the parameter '{written[0]}', of which there are "
                f"several versions with {self._option}; make it a buffer, write in on_train_batch_end, or use "
                f"{self._instead}"
            )

    def _read_ahead(self, stream: Stream, rest: tuple[Any, ...]) -> None:
        """Let the stream take the batches whose forwards run during this one; each process takes the same."""
        count = stream.num_microbatches
        for j in range(Place(0, self.cluster.stage_map.num_stages, count).batches_ahead):
            if stream.known > stream.batch + 1 + j:
                continue
            if not self._ends and j == len(self._coming):
                with as_it_will_be(self.trainer, Progress.after_steps(self.trainer, j)):
                    goes_on = self._may_go_on()
                batches = self.batches.read_ahead() if goes_on else ()
                self._coming.extend(self._made(batch, rest, j + 1) for batch in batches)
            if self._ends or j == len(self._coming) or len(self._coming[j].parts) != count:
                self._ends = True
                return
            stream.take(self._task(self._coming[j]))

    def _task(self, batch: _Batch) -> Task:
        return Task(
            partial(self._run_ahead, batch),
            [(part.data, *batch.rest) for part in batch.parts],
            batch.begin_backward,
            RandomKey(self.configuration.seed, batch.number),
        )

    def _run_ahead(self, batch: _Batch, i: int, *args: Any) -> Any:
        """Call the step function with a micro-batch, whichever batch Lightning's loop is at."""
        context = self.trainer.precision_plugin.train_step_context
        turn = self._foresight.in_turn() if batch.progress is None else contextlib.nullcontext()
        with as_it_will_be(self.trainer, batch.progress), replaced(self._module, "_current_fx_name", STEP), turn:
            return self._micro_batch(STEP, context, [batch.parts], 0, 0, 0, i, *args)
