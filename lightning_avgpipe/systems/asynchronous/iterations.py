"""Asynchronous iterations: one pipeline goes from batch to batch without a drain, under a weight policy.

::

    M = 2    stage 0 | F0 F1 F2 F3 B0 B1 u | F4 B2 F5 B3 u | ..        u: the hooks of a step, and the step
             stage 3 | F0 B0 F1 B1 u | F2 B2 F3 B3 u | ..

In each process Lightning works on batch t. Within Lightning's optimization the stages of the process run until each
has ended the backwards of t, together with the forwards of later batches that 1F1B schedules before that. The hooks of
a backward and of a step follow, and the optimizer's step. No process waits for the step of another. The consequences:

- Before batch t, the later batches whose forwards the first stage runs early are read, and their transfer hooks run.
  All other hooks run in their usual order, and so does everything on the last stage, with losses and logs.
- Gradients are those of one batch, and no optimizer steps early: hooks find weights, gradients and optimizers as they
  are after batch t. Buffers that a step changes may already have been changed by later batches.
- Steps on stages other than the last see the trainer's counters as they will be for their batch; see ``Overlap``.
- Before an event that needs a drained pipeline (a validation, a checkpoint every n steps, the end of an epoch or of
  training), no forward of a later batch runs, and versions count from 0 afterwards. If such an event was not foreseen,
  :meth:`drain` discards these forwards: no weights depend on them, and buffers get their contents back. The batches are
  kept, and run again.
- A batch with a different number of micro-batches than the batch before begins after a drain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ConfigurationError, MicroBatchError, ScheduleError
from lightning_avgpipe.strategy.ahead import Overlap, counters_after
from lightning_avgpipe.strategy.iteration import STEP, Iteration, IterationOrder
from lightning_avgpipe.strategy.loop import PipelineLoop
from lightning_avgpipe.systems.asynchronous.store import WeightStore
from lightning_avgpipe.systems.asynchronous.stream import Stream
from lightning_avgpipe.systems.asynchronous.versions import Place
from lightning_avgpipe.utils.patching import all_replaced


class AsynchronousOrder(IterationOrder):
    """Iterations of one pipeline that overlap, with versions of the weights."""

    def __init__(self, loop: PipelineLoop) -> None:
        super().__init__(loop)
        assert isinstance(loop.deployment.weights, WeightStore)
        self.overlap = Overlap(loop)
        self._weights = loop.deployment.weights
        self._stream: Stream | None = None  # the batches from one drain to the next
        self._ends = False  # whether the stream ends after the batches that it has taken

    @property
    def overlaps(self) -> bool:
        """Whether iterations of this run may overlap."""
        return self.loop.cluster.stage_map.num_stages > 1

    @contextlib.contextmanager
    def calling(self, iteration: Iteration) -> Iterator[None]:
        """Call a step function within this context, for a batch that Lightning's loop may not have reached yet."""
        if iteration.step != STEP or not self.overlaps:
            yield
            return
        turn = self.overlap.in_turn() if iteration.progress is None else contextlib.nullcontext()
        with turn, self.overlap.calling(iteration):
            yield

    def train(self, batches: Sequence[Any], rest: tuple[Any, ...]) -> Any:
        """Run until the stages of this process have ended a batch."""
        loop = self.loop
        if loop.is_averaging_pass or not self.overlaps or (self._stream is None and loop.deployment.replans):
            self.drain()
            return super().train(batches, rest)
        current = self.overlap.take(batches, rest)
        try:
            return self._run_in_turn(current)
        except MicroBatchError:
            raise  # nothing has run yet
        except BaseException:
            if loop.cluster.world.world_size > 1:  # some stages have stepped and others have not
                loop.context.connection.failed = True
            raise

    def stepped(self) -> None:
        """Note the new version of the weights after the optimizers have stepped, and drain if no batch follows."""
        self.overlap.awaits_step = False
        if self._stream is not None:
            self._weights.stepped()
            if self._ends and self._stream.batch == self._stream.known:
                self.drain()

    def drain(self) -> None:
        """Drain the pipeline: weights, buffers and channels are as after the last batch. Every process calls it.

        Forwards of later batches that have run are discarded, and run again.
        """
        stream, self._stream, self._ends = self._stream, None, False
        if stream is not None:
            stream.end(together=not self.loop.context.connection.failed)

    def put_back(self) -> None:
        """Put back the batches that were read ahead, since the epoch ends or batches change."""
        self.drain()
        self.overlap.return_batches()

    def _run_in_turn(self, current: Iteration) -> Any:
        loop, parts = self.loop, current.micro_batches[0]
        if self._stream is None:
            if not self._begin(current):
                return None
        else:
            self.overlap.check_trained()
            self.overlap.check()
        stream = self._stream
        assert stream is not None and loop.deployment.plan is not None
        self._read_ahead(stream, current.other_args)
        loop.clear_or_defer(current, drains=False)
        loop.models.step_log.begin(len(parts))
        schedule, control = loop.schedule(parts, True), loop.schedule_control
        with control.iteration(self._task(current), [parts], loop.deployment.plan, schedule):
            current.outcomes = [stream.run(tuple(control.observers))]
        loop.models.skipped = frozenset({0} if len(current.outcomes[0].skipped) == len(parts) else ())
        result = loop.result(current)
        with current.precision():
            loop.models.step_log.flush()
        self._weights.keep()  # before hooks, which may change weights
        self.overlap.check()
        assert current.loss is not None
        loop.models.after_backward(0, current.loss)
        self.overlap.awaits_step = True
        return None if 0 in loop.models.skipped else result

    def _begin(self, current: Iteration) -> bool:
        """Begin a stream of batches with this one; return whether the step has stages."""
        loop = self.loop
        if not loop.prepare(current):
            return False
        count, stages = len(current.micro_batches[0]), loop.cluster.stage_map.num_stages
        if not self.overlap.checked:
            self._weights.policy.check(stages, count)
            self.overlap.check_graph()
            self._check_weights()
        (pipeline,) = loop.models.pipelines_for(STEP, 1)
        self._weights.begin(count)
        self._stream = Stream(pipeline, STEP, self._weights, count)
        self._stream.take(self._task(current))
        self._ends = not self._fits(count)
        self.overlap.begin()
        return True

    def _fits(self, num_microbatches: int) -> bool:
        """Return whether batches of this size need no drain between them; the last one of an epoch may be too small."""
        try:
            self._weights.policy.check(self.loop.cluster.stage_map.num_stages, num_microbatches)
        except ScheduleError:
            return False
        return True

    def _check_weights(self) -> None:
        """Check that the step does not write into parameters, of which there are several versions.

        Raises:
            ConfigurationError: it does; the message names the parameter.
        """
        module, changed = self.loop.module, self.loop.deployment.pipeline.graph(STEP).changed
        parameters = dict(module.named_parameters())
        written = [name for name in sorted(changed) if name in parameters]
        if written:
            raise ConfigurationError(
                f"{type(module).__name__}.{STEP} writes into the parameter '{written[0]}', of which there are "
                f"several versions with {self.overlap.option}; make it a buffer, write in on_train_batch_end, or use "
                f"{self.overlap.instead}"
            )

    def _read_ahead(self, stream: Stream, rest: tuple[Any, ...]) -> None:
        """Give the stream the later batches whose forwards run during this one; the same ones in each process."""
        count = stream.num_microbatches
        for j in range(Place(0, self.loop.cluster.stage_map.num_stages, count).batches_ahead):
            if stream.known > stream.batch + 1 + j:
                continue
            following = self.overlap.coming[j] if j < len(self.overlap.coming) else None
            if not self._ends and following is None:
                with all_replaced(counters_after(self.loop.trainer, j)):
                    goes_on = self.overlap.may_go_on()
                following = self.overlap.read_ahead(rest, j + 1) if goes_on else None
            if self._ends or following is None or len(following.micro_batches[0]) != count:
                self._ends = True
                return
            stream.take(self._task(following))

    def _task(self, iteration: Iteration) -> Task:
        return replace(self.loop.task(iteration, 0), around=None)  # a step runs as Python
