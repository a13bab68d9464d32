"""What stages keep for several pipelines is measured, and as much as the formula says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.engine.accounting import Footprint, HostMeter
from lightning_avgpipe.schedule import FORWARD, Action, Schedule, build
from tests.models import Regression, loader
from tests.trainers import pipeline

NUM_MICROBATCHES, BATCH, WIDTH = 4, 32, 16
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes
SPLITS = {2: ["layers.6"], 3: ["layers.4", "layers.8"]}


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def measured(
    num_pipelines: int, num_stages: int, schedule: Schedule, advance: int, rolling: bool = False
) -> tuple[Any, dict[int, Footprint]]:
    """The strategy after two iterations, and what was measured in the first."""
    found: dict[int, Footprint] = {}
    finish = HostMeter.finish

    def finished(meter: HostMeter, held: Any) -> dict[int, Footprint]:
        found.update(finish(meter, held))
        return found

    strategy = {
        "num_pipelines": num_pipelines, "num_microbatches": NUM_MICROBATCHES, "split_points": SPLITS[num_stages],
        "schedule": schedule.name, "advance": advance, "costs": "measured", "costs_cache": None,
        "averaging": Averaging(rolling=rolling),
    }  # fmt: skip
    with mock.patch.object(HostMeter, "finish", finished):
        runner = pipeline(num_stages, 1, strategy, max_epochs=1)
        runner.fit(Wide(), loader(Wide, 2 * BATCH * num_pipelines, BATCH))
    assert runner.strategy.peak_memory_bytes == {k: footprint.peak for k, footprint in found.items()}
    return runner.strategy, found


def test_n_models_keep_what_the_formula_says() -> None:
    schedule = build("1f1b", 3, NUM_MICROBATCHES)
    _, one = measured(1, 3, schedule, 0)
    n = 3
    _, several = measured(n, 3, schedule, 0)
    for k, alone in one.items():
        reference = LAYER * 6 // 3
        formula = reference + n * alone.peak  # n (model + S A / M) + reference
        stash = alone.changes[Action(FORWARD, 1)]
        # all lanes are rarely at their peaks at once: the others may be one micro-batch away
        assert formula - (n - 1) * stash <= several[k].peak <= formula
        assert several[k].changes[Action(FORWARD, 1)] == n * stash


def test_rolling_models_need_copies_of_what_they_began_with() -> None:
    found = {rolling: measured(3, 2, build("1f1b", 2, NUM_MICROBATCHES), 0, rolling) for rolling in (False, True)}
    copies = (3 + 1) * 3 * LAYER
    for k in (0, 1):
        assert found[True][1][k].peak == found[False][1][k].peak + copies
        plans = {rolling: strategy.plan.stages[k].memory.persistent for rolling, (strategy, _) in found.items()}
        assert plans[True] == plans[False] + copies
