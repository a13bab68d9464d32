"""Parallel models that train as the strategy trains them, without a trainer around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness import record
from benchmarks.models import LanguageModel, Size, example, make_model
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.schedule import Schedule, Timeline, build
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.plan_maker import Examples
from lightning_avgpipe.utils.random_streams import RandomKey

NUM_STAGES = 2
STEP = "training_step"


class Bench:
    """Two stages in two processes.

    Args:
        cluster: open.
        model: the same on every rank; its step takes what ``args`` has.
        args: of one micro-batch; all micro-batches are alike.
        split_point: unit at which the last stage begins.
    """

    def __init__(self, cluster: Cluster, model: nn.Module, args: Sequence[Any], split_point: str) -> None:
        self.cluster = cluster
        self.observers = Observers()
        self.model = model
        self.args = args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.deployment = Deployment(
            model, cluster, Planner(Divisible(model), NUM_STAGES, [split_point]), lambda: [self.optimizer]
        )
        self.deployment.prepare(Examples(STEP, self._step, [args]), True, build("1f1b", NUM_STAGES, 1))
        self.pipelines = self.deployment.models.train(1)
        self.iterations = 0

    def _step(self, *args: Any) -> Any:
        return self.model.training_step(*args)  # type: ignore[operator]

    @property
    def message_bytes(self) -> int:
        """Of the values of a micro-batch, and of their gradients."""
        assert self.deployment.plan is not None
        return self.deployment.plan.stages[0].boundary_bytes

    def resize(self, num_pipelines: int) -> None:
        """Have so many pipelines from now on."""
        self.pipelines = self.deployment.models.train(num_pipelines)

    def iterate(self, schedule: Schedule) -> None:
        """A batch for each pipeline, their optimizers' steps, and the averaging."""
        self.iterations += 1
        count, ensemble = len(self.pipelines), self.deployment.models.ensemble
        self.optimizer.zero_grad()
        if ensemble is not None:
            for model in ensemble.models.each[1:]:
                model.clear_gradients()
        tasks = [
            Task(
                lambda i, *args: self._step(*args),
                [self.args] * schedule.num_microbatches,
                lambda i, loss: loss / schedule.num_microbatches,
                RandomKey(0, self.iterations, n),
            )
            for n in range(count)
        ]
        run_together(self.pipelines, STEP, [schedule] * count, tasks, self.observers)
        self.deployment.models.sum_copied_gradients()
        with self.observers.activity("step"):
            if ensemble is not None:
                ensemble.place(0)
                ensemble.optimizers.follow()
            self.optimizer.step()
            for n in range(1, count):
                assert ensemble is not None
                for made in ensemble.optimizers.of(n):
                    made.step()
        if ensemble is not None:
            with self.observers.activity("averaging"):
                ensemble.averager.stepped(count)

    def record(self, schedule: Schedule) -> Timeline | None:
        """One iteration; on rank 0 what happened in it."""
        return record(self.cluster, self.observers, lambda: self.iterate(schedule))

    def seconds(self, schedule: Schedule, iterations: int) -> float:
        """Of an iteration, until the last process is done; on rank 0."""
        self.cluster.group.barrier()
        begin = time.perf_counter()
        for _ in range(iterations):
            self.iterate(schedule)
        return max(self.cluster.group.gather_objects(time.perf_counter() - begin)) / iterations


def transformer(cluster: Cluster, size: Size) -> Bench:
    """A language model, divided in the middle."""
    model: LanguageModel = make_model(size)
    return Bench(cluster, model, (example(size, 1), 0), f"blocks.{size.layers // 2}")
