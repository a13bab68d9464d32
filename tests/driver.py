"""Training without Lightning's Trainer: through the pipeline's engine, and by the plain loop that it must equal."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.engine.execution import Compiler, Execution
from lightning_avgpipe.engine.microbatch import MicroBatch, split
from lightning_avgpipe.engine.pipeline import Pipeline, run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.planning.recompute_policy import chosen
from lightning_avgpipe.schedule import build
from lightning_avgpipe.utils.random_streams import RandomKey
from tests.threads import alone


class Engine:
    """A pipeline of a module in this process.

    Args:
        example: a batch to capture.
        num_microbatches: M.
        relays: stages that values may pass.
        compiler: compiler for units; None: they run uncompiled.
    """

    def __init__(
        self,
        module: nn.Module,
        num_stages: int,
        example: Any,
        num_microbatches: int = 2,
        step: str = "training_step",
        split_points: Sequence[str] | None = None,
        recompute: bool | Sequence[str] = False,
        relays: Sequence[int] = (),
        compiler: Compiler | None = None,
    ) -> None:
        self.module = module
        self.step = step
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        first = split(copy.deepcopy(example), num_microbatches)[0]
        repeats = chosen(module, recompute)
        planner = Planner(Divisible(module), num_stages, split_points, recompute=repeats)
        conditions = Conditions(build("1f1b", num_stages, 1))
        self.plan: Plan = planner.plan(Step(step, self._call, (first.data, 0)), conditions)
        self.cluster = alone(num_stages)
        self.cluster.open()
        self.pipeline = Pipeline(self.cluster, module, Execution(repeats, compiler))
        self.pipeline.load(self.plan.graph, self.plan.cuts, relays=relays)

    def _call(self, *args: Any) -> Any:
        return getattr(self.module, self.step)(*args)

    def train(
        self, batch: Any, schedule: str = "1f1b", iteration: int = 0, advance: int = 0, observers: Any = ()
    ) -> list[Any]:
        """Forwards and backwards of one batch; returns the losses of its micro-batches."""
        parts = split(batch, self.num_microbatches)
        task = Task(
            lambda i, *args: self._call(*args),
            [(part.data, 0) for part in parts],
            lambda i, loss: None if loss is None else loss * parts[i].weight,
            RandomKey(0, iteration),
        )
        rows = build(schedule, self.num_stages, len(parts), advance=advance)
        losses = run_together([self.pipeline], self.step, [rows], [task], observers)[0].results
        self.pipeline.steps[self.step].copies.begin_sum().finish()
        return losses

    def evaluate(self, batch: Any) -> list[Any]:
        """Forwards only; returns the results of the micro-batches."""
        parts = split(batch, self.num_microbatches)
        task = Task(lambda i, *args: self._call(*args), [(part.data, 0) for part in parts])
        with torch.no_grad():
            rows = build("forward", self.num_stages, len(parts))
            results = run_together([self.pipeline], self.step, [rows], [task])[0].results
        return results


def accumulate(module: Any, batch: Any, num_microbatches: int, batch_idx: int = 0) -> list[Tensor]:
    """What one process does: the micro-batches in order, each loss weighted by its share of the batch."""
    parts: list[MicroBatch] = split(batch, num_microbatches)
    losses = []
    for part in parts:
        loss = module.training_step(part.data, batch_idx)
        (loss * part.weight).backward()
        losses.append(loss.detach())
    return losses


def by_hand(module: Any, batches: Iterable[Any], num_microbatches: int) -> Any:
    """Train a module in one process as its optimizer says, with a step for each batch; gives the module."""
    optimizer = module.configure_optimizers()
    for batch_idx, batch in enumerate(batches):
        optimizer.zero_grad()
        accumulate(module, copy.deepcopy(batch), num_microbatches, batch_idx)
        optimizer.step()
    return module
