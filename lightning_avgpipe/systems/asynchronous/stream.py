"""Run one pipeline from batch to batch without a drain, while its stages are updated in between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.engine.executor import Lane, execute
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.pipeline import Outcome, Pipeline, clear
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.engine.tensor_use import leaves_of
from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import BACKWARD, Action, Schedule
from lightning_avgpipe.systems.asynchronous.store import WeightStore
from lightning_avgpipe.systems.asynchronous.versions import Place, forwards_by, row_of_batch
from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(frozen=True)
class _Joined(Task):
    """The tasks of several batches as one task, whose micro-batches are counted from the last drain.

    Attributes:
        tasks: number of a batch -> its task, for batches that are not done.
        count: number M of micro-batches per batch.
        args: arguments of all micro-batches since the drain; None for those of batches that are done.
    """

    args: list[Any]
    tasks: dict[int, Task] = field(default_factory=dict)
    count: int = 1

    @classmethod
    def of(cls, count: int, pipeline: int) -> _Joined:
        """Make a joined task without any batch."""
        tasks: dict[int, Task] = {}

        def run(i: int, *args: Any) -> Any:
            return tasks[i // count].run(i % count, *args)

        def finish(i: int, result: Any) -> Tensor | None:
            begins = tasks[i // count].finish
            assert begins is not None
            return begins(i % count, result)

        return cls(run, [], finish, RandomKey(0, pipeline=pipeline), tasks=tasks, count=count)

    def key_of(self, micro_batch: int) -> RandomKey:
        """Return the random key of micro-batch i within its own batch."""
        return self.tasks[micro_batch // self.count].key_of(micro_batch % self.count)


class Stream(Observer):
    """The batches from one drain to the next. After each batch the optimizers step, see :class:`WeightStore`.

    Args:
        pipeline: pipeline whose steps change no attributes.
        step: name of the step function.
        weights: versions of the weights.
        num_microbatches: number M of micro-batches of every batch.

    Attributes:
        batch: index, since the drain, of the batch that runs or comes next.
        num_microbatches: as given.
    """

    def __init__(self, pipeline: Pipeline, step: str, weights: WeightStore, num_microbatches: int) -> None:
        self.batch = 0
        self.num_microbatches = num_microbatches
        self._runs = False
        self._forwards_of: int | None = 0  # number of batches whose forwards may have run; None: one has failed
        self._pipeline = pipeline
        self._step = step
        self._weights = weights
        self._task = _Joined.of(num_microbatches, pipeline.number)
        self._lanes: list[Lane] = []
        self._kept: dict[int, list[tuple[Stage, dict[str, Tensor]]]] = defaultdict(list)  # batch -> buffers before it

    @property
    def known(self) -> int:
        """The number of batches since the drain that are done or were added by :meth:`take`."""
        return max(self._task.tasks, default=self.batch - 1) + 1

    def take(self, task: Task) -> None:
        """Add the task of a further batch."""
        self._task.tasks[self.known] = task
        self._task.args.extend(task.args)

    def run(self, observers: Sequence[Observer] = ()) -> Outcome:
        """Run until every stage here has ended the next batch; forwards of later batches that were taken may run too.

        Args:
            observers: observers of this batch.
        """
        cluster, known = self._pipeline.cluster, self.known
        self._kept.pop(self.batch, None)
        rows = [row_of_batch(place, self.batch, known) for place in self._places]
        if not self._lanes:
            schedule = Schedule("1f1b", len(rows), self.num_microbatches, tuple(rows))
            self._lanes = self._pipeline.lanes(self._step, schedule, self._task, observers)
        else:
            for lane in self._lanes:
                lane.go_on(rows[lane.stage.program.stage], observers)
        for lane in self._lanes:
            row = rows[lane.stage.program.stage]
            lane.stage.go_on([*row, *(Action(BACKWARD, i) for i in {action.micro_batch for action in row})])
        self._runs, self._forwards_of = True, None
        try:
            with intercepting(), torch.enable_grad():
                execute(self._lanes, cluster, (self, *observers))
            self._forwards_of = known
        finally:
            self._runs = False
        return self._ended()

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action with its version of the weights, and keep the buffers that a later batch will change."""
        kind, i = work.action
        self._weights.act(work.stage, i, kind is BACKWARD)
        if kind is BACKWARD:
            return do()
        stage = next(lane.stage for lane in self._lanes if lane.stage.program.stage == work.stage)
        batch, part = divmod(i, self.num_microbatches)
        if batch > self.batch and not part:
            before = {name: buffer.detach().clone() for name, buffer in stage.module.changed_buffers().items()}
            self._kept[batch].append((stage, before))
        message = do()
        self._weights.check_used(work.stage, leaves_of(stage.roots(i)))
        return message

    def _ended(self) -> Outcome:
        """Forget the batch that has ended, and return its outcome."""
        results, skipped = None, set[int]()
        first = self.batch * self.num_microbatches
        for lane in self._lanes:
            stage = lane.stage
            of_batch = [stage.results.pop(first + i, None) for i in range(self.num_microbatches)]
            results = of_batch if stage.program.is_last else results
            skipped = {i - first for i in stage.skipped}
            stage.skipped.clear()
        del self._task.tasks[self.batch]
        self._task.args[first : first + self.num_microbatches] = [None] * self.num_microbatches
        self.batch += 1
        return Outcome(results, frozenset(skipped), self.num_microbatches)

    def end(self, together: bool = True) -> None:
        """Drain the pipeline: undo the forwards of later batches as if they had not run.

        Args:
            together: whether every process calls this after the same batch; if not, the channels are not used again.
        Raises:
            ScheduleError: a batch is running.
        """
        if self._runs:
            raise ScheduleError(
                f"a batch of weight_policy='{self._weights.policy.name}' is on its way, and its stages are at "
                "different updates; save checkpoints after its step (on_train_batch_end), or use weight_policy='flush'"
            )
        places, last = self._places, self.batch - 1
        for lane in self._lanes:
            k = lane.stage.program.stage
            if k and together and self._forwards_of is not None:
                sent, taken = (forwards_by(places[stage], last, self._forwards_of) for stage in (k - 1, k))
                _drop(lane, sent - taken, self._pipeline.cluster.waits)
        clear(self._lanes)
        if self._lanes:
            self._pipeline.steps[self._step].of_units.end()
        with torch.no_grad():
            for stage, before in self._kept[self.batch]:
                for name, buffer in stage.module.changed_buffers().items():
                    buffer.copy_(before[name])
        self._weights.end()

    @property
    def _places(self) -> list[Place]:
        count = self._pipeline.cluster.stage_map.num_stages
        return [Place(k, count, self.num_microbatches) for k in range(count)]


def _drop(lane: Lane, count: int, waits: Waits) -> None:
    """Receive this many values and drop them."""
    if (values := lane.ends.values) is None:
        return
    values.expect(count)
    for _ in range(count):
        waits.until(values.ready, f"waits for what stage {lane.stage.program.stage} is to drop")
        values.get()
