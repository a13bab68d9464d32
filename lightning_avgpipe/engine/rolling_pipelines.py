"""Run pipelines whose iterations overlap: each begins its next one when it has ended here."""

from __future__ import annotations

import torch

from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.executor import IterationContext, Lane, execute
from lightning_avgpipe.engine.pipeline import Outcome, Pipeline, clear
from lightning_avgpipe.engine.stage import check_runnable
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule import Schedule


class RollingPipelines:
    """The pipelines of a cluster, in iterations that differ by at most one, interleaved as their inputs arrive.

    A step that changes attributes cannot be run so: pipelines would see each other's values.

    Args:
        cluster: cluster of the pipelines.
        step: name of the step function.
    """

    def __init__(self, cluster: Cluster, step: str) -> None:
        self._context = IterationContext(cluster.waits, cluster.world.rank, oldest_first=True)
        self._step = step
        self._begun: dict[int, tuple[Pipeline, Schedule, list[Lane]]] = {}

    def begin(self, pipeline: Pipeline, schedule: Schedule, task: Task) -> None:
        """Begin an iteration of a pipeline whose model is ready for it; nothing runs yet.

        Raises:
            ScheduleError: the schedule has actions that stages cannot run, or forwards values past stages.
        """
        check_runnable(schedule)
        if schedule.relays:
            raise ScheduleError(
                f"the schedule {schedule.name!r} has values pass stages, whose weights go on before each iteration: "
                "iterations cannot roll; use Averaging(rolling=False), or another schedule"
            )
        assert pipeline.number not in self._begun
        self._begun[pipeline.number] = pipeline, schedule, pipeline.lanes(self._step, schedule, task)

    def finish(self, number: int) -> Outcome:
        """Run actions of all pipelines until the iteration of one of them has ended here; return its outcome."""
        pipeline, schedule, own = self._begun[number]
        with intercepting(), torch.enable_grad():
            execute(
                [lane for _, _, lanes in self._begun.values() for lane in lanes],
                self._context,
                lambda: not any(lane.actions for lane in own),
            )
        pipeline.end()
        outcome = pipeline.outcome(self._step, schedule)
        for lane in own:  # the channels are kept: they may hold messages of the next iteration
            lane.stage.clear()
        self._forget(number)
        return outcome

    def clear(self) -> None:
        """Drop all iterations that have begun in this process."""
        for number, (pipeline, _, lanes) in list(self._begun.items()):
            pipeline.end()
            clear(lanes)
            self._forget(number)

    def _forget(self, number: int) -> None:
        pipeline, *_ = self._begun.pop(number)
        pipeline.steps[self._step].own[-1].end()
