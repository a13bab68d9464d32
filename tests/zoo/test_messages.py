"""A step that cannot be followed says so: which module, which line of the step, which stage, and the way out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_avgpipe.errors import PartitionError, StepChangedError
from tests.models import MLP, loader
from tests.trainers import pipeline
from tests.zoo import transformers_models
from tests.zoo.transformers_models import HuggingFace


def fit(model: L.LightningModule, samples: int = 16, split_points: Sequence[str] | None = None, **options: Any) -> None:
    """Train for an epoch on batches of 8 in micro-batches of 4; the last batch may be smaller."""
    strategy = {"num_microbatches": 2, "split_points": split_points}
    pipeline(2, strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **options).fit(model, loader(MLP, samples, 8))


def assert_says(error: BaseException, *parts: str) -> None:
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    for part in parts:
        assert re.search(part, said), f"{part!r} is missing in: {said}"


# -- calls that change -----------------------------------------------------------------------------------------------


class GoesBack(MLP):
    """With small batches a unit of the first stage is called once more in the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[:-1](x)
        if len(x) < 4:
            y = self.layers[1](self.layers[0](y))
        return self.layers[-1](y)


def test_a_step_that_goes_back_to_an_earlier_stage_is_refused() -> None:
    with pytest.raises(StepChangedError) as caught:
        fit(GoesBack(), samples=13, split_points=["layers.8"])
    assert_says(
        caught.value,
        r"training_step does not do what it did",
        r"it came to unit 'layers\.9' at test_messages\.py:\d+ in forward then",
        r"move the difference into one unit, or keep it on the last stage with split_points",
        r"a run that resumes from a checkpoint follows it as it is then",
    )


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


def test_a_unit_that_returns_another_structure_is_refused() -> None:
    with pytest.raises(StepChangedError) as caught:
        fit(ChangingStructure(), samples=13, split_points=["layers.2"])
    assert_says(
        caught.value,
        r"unit 'first' at test_messages\.py:\d+ in forward returned 2 tensors",
        r"returned 1 now \(stage 0\)",
        r"return the same structure for every batch, with empty tensors where there is nothing to return",
    )


# -- in-place writes -------------------------------------------------------------------------------------------------


class WritesThroughView(MLP):
    """A view of the first result is changed after all other layers; each cut would separate view and result."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        left = hidden[:, :4]
        x = self.layers[1:](hidden.clone())
        left.mul_(2)
        return x + hidden


def test_a_write_to_a_value_that_was_sent_is_refused() -> None:
    with pytest.raises(PartitionError) as caught:
        fit(WritesThroughView(), split_points=["layers.4"])
    assert_says(
        caught.value,
        r"no cut may lie before split point 'layers\.4'",
        r"the results of 'layers\.0' and '__getitem__' share memory",
        r"mul_\(\) at test_messages\.py:\d+ in forward changes in place",
        r"clone one of them, or compute out of place",
    )


# -- going back ------------------------------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    def __init__(self) -> None:
        self.batch = transformers_models.texts(8, 5)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return {name: values[i] for name, values in self.batch.items()}


class Generates(HuggingFace):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        prompt = batch["input_ids"]
        return self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)


def test_generation_inside_a_step_is_refused() -> None:
    data = DataLoader(Texts(), 4)
    runner = pipeline(2, strategy={"num_microbatches": 2}, max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(PartitionError) as caught:
        runner.fit(Generates(transformers_models.gpt2(tied=False)), data, data)
    assert_says(
        caught.value,
        r"validation_step goes back from stage 1 \(unit 'model\.lm_head' at modeling_gpt2\.py:\d+ in forward\)",
        r"to stage 0 \(unit 'model\.transformer\.wte' at modeling_gpt2\.py:\d+ in forward\)",
        r"a step must call units in the order in which training_step does",
    )
