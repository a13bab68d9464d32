"""A step that cannot be followed says so: which module, which line of the step, which stage, and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_avgpipe.errors import PartitionError, StepChangedError
from tests.models import MLP, loader
from tests.trainers import pipeline
from tests.zoo import transformers_models
from tests.zoo.transformers_models import HuggingFace


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


class Generates(HuggingFace):
    def __init__(self) -> None:
        super().__init__(transformers_models.gpt2(tied=False))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        prompt = batch["input_ids"]
        return self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)


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
        (
            Generates, None, PartitionError,
            [
                r"validation_step goes back from stage 1 \(unit 'model\.lm_head' at modeling_gpt2\.py:\d+ in forward\)",
                r"to stage 0 \(unit 'model\.transformer\.wte' at modeling_gpt2\.py:\d+ in forward\)",
                r"a step must call units in the order in which training_step does",
            ],
        ),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_followed_says_why(
    model: type[Any], split_points: Any, error: type[Exception], parts: list[str]
) -> None:
    """The last of its batches is smaller."""
    text = model is Generates
    texts: Any = [transformers_models.texts(4, 5)] * 2
    data = DataLoader(texts, batch_size=None) if text else loader(MLP, 13, 8)
    strategy = {"num_microbatches": 2, "split_points": split_points}
    runner = pipeline(2, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(error) as caught:
        runner.fit(model(), data, data if text else None)
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert [part for part in parts if not re.search(part, said)] == [], said
