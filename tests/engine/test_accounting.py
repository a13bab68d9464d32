"""Memory of stages: what is measured, and what is predicted for other schedules from one measured iteration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.engine.accounting import Footprint, HostMeter
from lightning_avgpipe.engine.microbatch import split
from lightning_avgpipe.planning.memory import Holding
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action, Schedule, build
from tests.driver import Engine
from tests.models import Regression, TinyTransformer


class DropoutMLP(Regression):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        layers = (m for _ in range(6) for m in (nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2)))
        self.layers = nn.Sequential(*layers)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 16), torch.randn(size, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NormedConvNet(Regression):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        widths = (3, 6, 8, 8, 6)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(6, 5)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 3, 8, 8), torch.randint(0, 5, (size,))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.max_pool2d(self.layers(x), 8).flatten(1))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Dropping(TinyTransformer):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer, dropout=0.1)


NUM_MICROBATCHES = 8
SCHEDULES = [("1f1b", 0), ("advance_forward", 1), ("advance_forward", 2), ("afab", 0)]


def engine(model: type[Regression], num_stages: int, batch: Any) -> Engine:
    torch.manual_seed(1)
    module = model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    return Engine(module, num_stages, batch, NUM_MICROBATCHES)


def metered(engine: Engine, batch: Any, name: str, advance: int) -> dict[int, Footprint]:
    """One iteration; nothing is held."""
    engine.module.zero_grad()
    given = [tensor for part in split(batch, NUM_MICROBATCHES) for tensor in part.data]
    meter = HostMeter([*engine.module.parameters(), *engine.module.buffers(), *given])
    engine.train(batch, name, iteration=3, advance=advance, observers=[meter])
    return meter.finish(dict.fromkeys(range(engine.num_stages), Holding(0)))


def changes_of(footprint: Footprint) -> tuple[int, int]:
    """What micro-batch 1 adds in its forward and in its backward."""
    return footprint.changes[Action(FORWARD, 1)], footprint.changes[Action(BACKWARD, 1)]


@pytest.mark.parametrize(
    ("model", "num_stages", "size"),  # equal micro-batches, and unequal ones
    [(DropoutMLP, 2, 16), (Dropping, 3, 19), (NormedConvNet, 2, 19)],
)
def test_predicted_peaks_of_other_schedules_agree_with_measured_ones(
    model: type[Regression], num_stages: int, size: int
) -> None:
    batch = model.example(size)
    pipeline = engine(model, num_stages, batch)
    first = metered(pipeline, batch, "1f1b", 0)
    for name, advance in SCHEDULES:
        schedule = build(name, num_stages, NUM_MICROBATCHES, advance)
        measured = metered(pipeline, batch, name, advance)
        for k in range(num_stages):
            predicted = first[k].predicted(schedule[k])
            assert measured[k].peak > 0
            assert predicted == pytest.approx(measured[k].peak, rel=0.05), (name, advance, k)


def test_a_storage_counts_once_and_weights_and_the_batch_not_at_all() -> None:
    class Squares(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        @staticmethod
        def example(size: int) -> Any:
            return torch.randn(size, 16), torch.randn(size, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h * h)

    batch = Squares.example(8 * NUM_MICROBATCHES)
    pipeline = engine(Squares, 2, batch)
    first, second = metered(pipeline, batch, "1f1b", 0).values()
    values = 8 * 16 * 4
    assert pipeline.plan.stages[0].units == ("first",)
    # the first stage's input is the batch's, and what it sends it saves for nothing else
    assert changes_of(first) == (values, -values)
    # h is received and saved by h * h, twice; the product by the second layer; the loss saves what that returned, and
    # its own storage is as large, of which the scalar that the step returns is a part
    assert changes_of(second) == (4 * values, -3 * values)
    assert (first.crest, second.crest) == (2 * values, 3 * values + NUM_MICROBATCHES * values)


def test_an_estimate_has_the_crest_of_its_row() -> None:
    schedule: Schedule = build("1f1b", 3, 4)
    footprint = Footprint.estimated(100, 10, schedule[0])
    assert (footprint.peak, footprint.crest) == (130, 30)
    assert footprint.predicted(build("afab", 3, 4)[0]) == 140
    assert footprint.predicted(build("1f1b", 3, 4)[2]) == 110
