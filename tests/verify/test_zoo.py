"""No false alarm: the whole zoo is verified, at default options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from tests.trainers import trainer
from tests.zoo import own_models, transformers_models
from tests.zoo.transformers_models import HuggingFace

MODELS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int, int], Any]]] = {
    **{model.__name__: (model, model.example) for model in (*own_models.MODELS, *own_models.DRAWING)},
    **{
        name: (lambda build=build: HuggingFace(build()), batch)
        for name, (build, batch) in transformers_models.MODELS.items()
    },
    **{
        f"{name} with dropout": (lambda build=build: HuggingFace(build()), batch)
        for name, (build, batch) in transformers_models.DRAWING.items()
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_verified(name: str) -> None:
    build, example = MODELS[name]
    strategy = AvgPipeStrategy(num_stages=3, verify=3)
    running = trainer(strategy=strategy, max_epochs=1, gradient_clip_val=0.5)
    running.fit(build(), DataLoader([example(9, length) for length in (6, 6, 9)], batch_size=None))
    assert running.global_step == 3
