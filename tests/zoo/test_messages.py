"""A step that cannot be followed says so: which module, which line of the step, which stage, and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_avgpipe.errors import PartitionError, StepChangedError
from tests.models import MLP, loader
from tests.trainers import pipeline


class GoesBack(MLP):
    """With small batches a unit of the first stage is called once more in the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[:-1](x)
        if len(x) < 4:
            y = self.layers[1](self.layers[0](y))
        return self.layers[-1](y)


class Fewer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return (y, y * 2) if len(x) == 4 else (y,)


class ChangingStructure(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first = Fewer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x)[0])


class WritesThroughView(MLP):
    """A view of the first result is changed after all other layers; each cut would separate view and result."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        left = hidden[:, :4]
        x = self.layers[1:](hidden.clone())
        left.mul_(2)
        return x + hidden


@pytest.mark.parametrize(
    ("model", "split_points", "error", "parts"),
    [
        (
            GoesBack, ["layers.8"], StepChangedError,
            [
                r"training_step does not do what it did",
                r"it came to unit 'layers\.9' at test_messages\.py:\d+ in forward then",
                r"move the difference into one unit, or keep it on the last stage with split_points",
                r"a run that resumes from a checkpoint follows it as it is then",
            ],
        ),
        (
            ChangingStructure, ["layers.2"], StepChangedError,
            [
                r"unit 'first' at test_messages\.py:\d+ in forward returned 2 tensors",
                r"returned 1 now \(stage 0\)",
                r"return the same structure for every batch, with empty tensors where there is nothing to return",
            ],
        ),
        (
            WritesThroughView, ["layers.4"], PartitionError,
            [
                r"no cut may lie before split point 'layers\.4'",
                r"the results of 'layers\.0' and '__getitem__' share memory",
                r"mul_\(\) at test_messages\.py:\d+ in forward changes in place",
                r"clone one of them, or compute out of place",
            ],
        ),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_followed_says_why(
    model: type[Any], split_points: Any, error: type[Exception], parts: list[str]
) -> None:
    """The last of its batches is smaller."""
    strategy = {"num_microbatches": 2, "split_points": split_points}
    runner = pipeline(2, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(error) as caught:
        runner.fit(model(), loader(MLP, 13, 8))
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [part for part in parts if not re.search(part, said)] == [], said
