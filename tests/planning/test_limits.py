"""Limits: what cannot be divided is named with its share of the time, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import PartitionError
from tests.models import Regression, loader
from tests.trainers import trainer


class Recurrent(Regression):
    """Nearly all of the time is in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(8, 128, num_layers=3, batch_first=True)
        self.head = nn.Linear(128, 8)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 32, 8), torch.randn(size, 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)[0])


def test_a_stage_with_nearly_all_of_the_time_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="of the time: 2 stages are at most 1.0. times as fast as one") as caught:
        strategy = AvgPipeStrategy(num_stages=2, costs="flops")
        trainer(strategy=strategy).fit(Recurrent(), loader(Recurrent, 16, 8))
    (text,) = [str(w.message) for w in caught if "times as fast" in str(w.message)]
    assert "unit 'encoder' is one operation for all of its layers; chain several with num_layers=1" in text


def test_a_second_device_is_proposed_for_a_stage_that_cannot_be_divided() -> None:
    class Wide(Regression):
        """The last of five layers takes half of the time."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
            self.head = nn.Linear(64, 4 * 64, bias=False)

        @staticmethod
        def example(size: int) -> Any:
            return torch.randn(size, 64), torch.randn(size, 4 * 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x))

    strategy = AvgPipeStrategy(num_stages=4, costs="flops")
    trainer(strategy=strategy, max_epochs=1).fit(Wide(), loader(Wide, 16, 8))
    assert strategy.plan is not None
    assert "4 stages are at most 2.0" in strategy.plan.note
    assert "(replicas=[1, 1, 2]), as many devices are at most 4.0" in strategy.plan.note


def test_an_even_plan_is_not_commented(recwarn: pytest.WarningsRecorder) -> None:
    strategy = AvgPipeStrategy(num_stages=2, costs="flops")

    class Even(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(8, 128)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x))

    trainer(strategy=strategy, max_epochs=1).fit(Even(), loader(Recurrent, 16, 8))
    assert strategy.plan is not None and not strategy.plan.note
    assert not [w for w in recwarn if "times as fast" in str(w.message)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:.*torch.jit.*is not supported")
def test_too_few_cuts_are_explained_by_what_takes_the_time() -> None:
    class Scripted(Recurrent):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
            self.encoder, self.head = torch.jit.script(layers), nn.Identity()  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

    with pytest.raises(PartitionError, match="100% of the time: unit 'encoder' is a TorchScript module") as caught:
        trainer(strategy=AvgPipeStrategy(num_stages=2)).fit(Scripted(), loader(Recurrent, 16, 8))
    assert "lower num_stages to 1, or change what cannot be divided" in str(caught.value)
