"""Measure seconds per batch of a Trainer: a process for each stage, limited links, and sleeps in place of compute.

The time is that of a user's whole run, with Lightning, at the steps in the middle of an epoch. Other benchmarks
multiply it by the samples that trainings need until a goal is reached.
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

from benchmarks.harness import Clock, launch, quiet_trainer, table
from benchmarks.models import Blocks
from benchmarks.results import Results
from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.schedule import BACKWARD, FORWARD, StageCosts, build, simulate

__all__ = ["Costs", "Samples", "Seconds", "compared", "medians", "simulated", "sooner"]

Seconds = dict[int, dict[str, tuple[float, float]]]  # Mbit/s of links -> side -> of a batch: measured, and simulated
Samples = dict[str, dict[str, list[float]]]  # training -> side -> to the goal, by seed; infinite: it was given up

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


def medians(
    results: Results, costs: Costs, links: Sequence[int], sides: Mapping[str, dict[str, Any]], rounds: int
) -> Seconds:
    """Seconds per batch on each link with each side's strategy: medians of the rounds, in which all take turns.

    What the results have is not measured again.
    """
    for turn in range(rounds):
        for link in links:
            missing = [side for side in sides if results.find(str(costs), link, side, turn) is None]
            strategies = [sides[side] for side in missing]
            measured = launch(_measured, (costs, strategies), costs.stages, link)[0] if missing else []
            for side, seconds in zip(missing, measured, strict=True):
                results.add(str(costs), link, side, turn, {"seconds": seconds, "torch": torch.__version__})

    def median(link: int, side: str) -> float:
        found = [results.find(str(costs), link, side, turn) or {} for turn in range(rounds)]
        return statistics.median(record["seconds"] for record in found)

    return {
        link: {side: (median(link, side), simulated(costs, link, strategy)) for side, strategy in sides.items()}
        for link in links
    }


def sooner(seconds: Seconds, samples: Samples, base: str) -> dict[str, dict[str, list[float]]]:
    """How many times sooner than the median of a base each side is at each goal on each link, by seed; 0: never."""
    found = {}
    for training, needed in samples.items():
        for link, of_sides in seconds.items():
            unit = of_sides[base][0] * statistics.median(needed[base])
            found[f"{training}, {link} Mbit/s"] = {
                side: [unit / batch_s / value for value in needed[side]] for side, (batch_s, _) in of_sides.items()
            }
    return found


def compared(seconds: Seconds, samples: Samples, base: str) -> str:
    """A table with a column for each side: seconds and samples, as far as they are known, and time to the goal."""
    rows = []
    for link, of_sides in seconds.items():
        cells = (f"{found:.3f} ({expected:.3f})" for found, expected in of_sides.values())
        rows.append((f"{link} Mbit/s: seconds a batch (simulated)", *cells))
        rows.append((f"as fast as {base}", *(f"{of_sides[base][0] / found:.2f}x" for found, _ in of_sides.values())))
    for training, needed in samples.items():
        unit = statistics.median(needed[base])
        ratios = ([value / unit for value in each] for each in needed.values())
        cells = (f"{statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})" for each in ratios)
        rows.append((f"{training}: samples (seeds)", *cells))
    for what, times in sooner(seconds, samples, base).items():
        rows.append((f"{what}: sooner", *(f"{statistics.median(each):.2f}x" for each in times.values())))
    sides = next(iter((seconds or samples).values()))
    return table(["", *sides], rows)


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


def _measured(costs: Costs, strategies: Sequence[dict[str, Any]]) -> list[float]:
    """In each process: seconds per batch of each strategy."""
    return [_seconds(costs, strategy) for strategy in strategies]
