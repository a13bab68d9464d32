"""Measure seconds per batch of a Trainer: a process for each stage, limited links, and sleeps in place of compute.

The time is that of a user's whole run, with Lightning, at the steps in the middle of an epoch. Other benchmarks launch
this script, and compare its numbers with the simulator's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness import Clock, launch, quiet_trainer
from benchmarks.models import Blocks
from benchmarks.results import Results
from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.schedule import BACKWARD, FORWARD, StageCosts, build, simulate

__all__ = ["Costs", "measure", "medians", "simulated"]

LATENCY_S = 0.001
_EDGE = 4  # steps at either end of an epoch, in which the pipeline fills and drains


@dataclass(frozen=True)
class Costs:
    """Of each stage and link.

    Attributes:
        stages: K.
        microbatches: M.
        forward_ms: of a micro-batch.
        backward_ms: of a micro-batch.
        message_bytes: of a micro-batch.
        steps: of an epoch.
    """

    stages: int
    microbatches: int
    forward_ms: float
    backward_ms: float
    message_bytes: int
    steps: int

    def on(self, megabits: int) -> StageCosts:
        """With links of this rate per second."""
        link_s = self.message_bytes * 8 / (megabits * 1e6)
        return StageCosts.uniform(self.stages, self.forward_ms / 1e3, self.backward_ms / 1e3, link_s, LATENCY_S)


def simulated(costs: Costs, megabits: int, strategy: dict[str, Any]) -> float:
    """Seconds per batch as the simulator has it, updates taking no time."""
    given, count = AvgPipeStrategy(**strategy).options, strategy.get("num_pipelines", 1)
    of_stages, policy = costs.on(megabits), given.policy
    if not policy.drains:
        return policy.simulate(of_stages, costs.microbatches, costs.steps).steady_s
    schedule = build(str(given.schedule), costs.stages, costs.microbatches, strategy.get("advance", 0))
    if "averaging" in strategy and strategy["averaging"].rolling:
        return simulate([schedule] * count, of_stages, iterations=costs.steps).steady_s / count
    return simulate([schedule] * count, of_stages).iteration_s / count


def measure(costs: Costs, megabits: int, strategies: Sequence[dict[str, Any]], rounds: int) -> list[float]:
    """Seconds per batch of each strategy: medians over rounds, in which all take turns."""
    found = launch(_measured, (costs, strategies, rounds), costs.stages, megabits)[0]
    return [statistics.median(seconds) for seconds in found]


def medians(
    results: Results, costs: Costs, links: Sequence[int], sides: Mapping[str, dict[str, Any]], rounds: int
) -> dict[int, dict[str, float]]:
    """Seconds per batch on each link with each side's strategy: medians of the rounds, in which all take turns.

    What the results have is not measured again.
    """
    for turn in range(rounds):
        for link in links:
            missing = [side for side in sides if results.find(str(costs), link, side, turn) is None]
            measured = measure(costs, link, [sides[side] for side in missing], 1) if missing else []
            for side, seconds in zip(missing, measured, strict=True):
                results.add(str(costs), link, side, turn, {"seconds": seconds, "torch": torch.__version__})

    def median(link: int, side: str) -> float:
        found = [results.find(str(costs), link, side, turn) or {} for turn in range(rounds)]
        return statistics.median(record["seconds"] for record in found)

    return {link: {side: median(link, side) for side in sides} for link in links}


class _Model(L.LightningModule):
    """A block for each stage, which sleeps."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.net = Blocks(costs.stages, max(1, costs.message_bytes // 4))
        for block in self.net.blocks:
            block.rest_s.update({FORWARD: costs.forward_ms / 1e3, BACKWARD: costs.backward_ms / 1e3})

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.net.training_step(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def _seconds(costs: Costs, strategy: dict[str, Any]) -> float:
    """Of a batch, in the middle of an epoch."""
    clock, count = Clock(), strategy.get("num_pipelines", 1)
    batches = torch.ones(costs.steps * count * costs.microbatches, 1)
    points = [f"net.blocks.{k}" for k in range(1, costs.stages)]
    trainer = quiet_trainer(
        strategy=AvgPipeStrategy(
            num_microbatches=costs.microbatches,
            split_points=points,
            costs="flops",
            timeout=120,
            **strategy,
        ),
        devices=costs.stages,
        callbacks=[clock],
    )
    trainer.fit(_Model(costs), DataLoader(batches, batch_size=costs.microbatches))  # type: ignore[arg-type]
    return statistics.mean(clock.seconds(_EDGE + 1, _EDGE)) / count


def _measured(costs: Costs, strategies: Sequence[dict[str, Any]], rounds: int) -> list[list[float]]:
    """In each process: seconds per batch of each strategy in each round."""
    found: list[list[float]] = [[] for _ in strategies]
    for _ in range(rounds):
        for seconds, strategy in zip(found, strategies, strict=True):
            seconds.append(_seconds(costs, strategy))
    return found
