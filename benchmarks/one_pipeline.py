"""Run one pipeline over the processes, with this engine or with torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.harness import timeline_of
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import Pipeline, run_together
from lightning_avgpipe.engine.recording import Recorder
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import Schedule, Timeline, build
from lightning_avgpipe.utils.random_streams import RandomKey

STEP = "training_step"


class OnePipeline:
    """This engine in one of the processes, which trains the same micro-batches in each iteration.

    Args:
        cluster: open cluster.
        model: the same model on every rank, with a ``training_step``.
        points: units at which stages begin, except the first.
        args: arguments of the step, for each micro-batch.
        finish: function that makes of a micro-batch's number and loss that from which its backward starts.
        relays: stages that relay what they receive.
        repeats: whether operations of the step are repeated, as in training; else each micro-batch is followed.
    """

    def __init__(
        self, cluster: Cluster, model: nn.Module, points: Sequence[str], args: Sequence[tuple[Any, ...]],
        finish: Callable[[int, Any], Any] = lambda i, loss: loss, relays: Sequence[int] = (), repeats: bool = True,
    ) -> None:  # fmt: skip
        self.cluster, self.model, self.observers = cluster, model, Observers()
        num_stages = len(points) + 1
        conditions = Conditions(build("1f1b", num_stages, 1))
        planner = Planner(Divisible(model), num_stages, list(points))
        self.plan = planner.plan(Step(STEP, self._step, args[0]), conditions)
        self.pipeline = Pipeline(cluster, model)
        self.pipeline.load(self.plan.graph, self.plan.cuts, relays=list(relays))
        self.args, self._finish, self._repeats = args, finish, repeats
        self._iterations = 0

    def _step(self, *args: Any) -> Any:
        return self.model.training_step(*args)  # type: ignore[operator]

    def run(self, schedule: Schedule) -> list[Tensor]:
        """Run one iteration; return the losses of the micro-batches where the last stage is."""
        self._iterations += 1
        task = Task(
            lambda i, *args: self._step(*args), self.args, self._finish, RandomKey(0, self._iterations),
            around=(lambda i: nullcontext()) if self._repeats else None,
        )  # fmt: skip
        return run_together([self.pipeline], STEP, [schedule], [task], self.observers)[0].results or []

    def record(self, schedule: Schedule) -> Timeline | None:
        """Run one iteration; return on rank 0 what happened in it."""
        recorder = Recorder(self.cluster.rank, self.cluster.device)
        self.cluster.group.barrier()
        with self.observers.with_added(recorder):
            self.run(schedule)
        return timeline_of(self.cluster, recorder)


class TorchPipeline:
    """A schedule of torch.distributed.pipelining in one of the processes, with stages that are written by hand.

    Args:
        cluster: open cluster.
        schedule: class of the schedule.
        parts: stages of this process, by number.
        num_microbatches: M.
        loss: function of the last stage's output and a target.
    """

    def __init__(
        self, cluster: Cluster, schedule: Any, parts: Mapping[int, nn.Module], num_microbatches: int, loss: Any
    ) -> None:
        num_stages = cluster.stage_map.num_stages
        stages = [PipelineStage(part, k, num_stages, cluster.device) for k, part in parts.items()]
        given = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
        self._schedule = schedule(given, num_microbatches, loss_fn=loss)
        self._is_first, self._is_last = 0 in parts, num_stages - 1 in parts

    def run(self, batch: Tensor, targets: Tensor) -> list[Tensor]:
        """Run one iteration; return the losses of the micro-batches where the last stage is."""
        losses: list[Tensor] = []
        given = (batch,) if self._is_first else ()
        rest = {"target": targets, "losses": losses, "return_outputs": False} if self._is_last else {}
        self._schedule.step(*given, **rest)
        return losses
