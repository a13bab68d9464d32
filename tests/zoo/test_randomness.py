"""Random numbers belong to what draws them: cuts do not change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from tests.driver import Engine
from tests.zoo import own_models, transformers_models
from tests.zoo.transformers_models import HuggingFace

STEPS = 3
MODELS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int, int], Any]]] = {
    **{model.__name__: (model, model.example) for model in own_models.DRAWING},
    **{
        name: (lambda build=build: HuggingFace(build()), batch)
        for name, (build, batch) in transformers_models.DRAWING.items()
    },
}


def trained(module: L.LightningModule, batches: list[Any], num_stages: int) -> dict[str, Any]:
    """Parameters after some steps, and gradients of the last one."""
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, num_stages, batches[0])
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        engine.train(copy.deepcopy(batch), iteration=i)
        optimizer.step()
    return {name: (p.detach(), p.grad) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in transformers_models.DRAWING else ()) for n in MODELS]
)
def test_dropout_does_not_depend_on_the_number_of_stages(name: str) -> None:
    build, example = MODELS[name]
    module = build()
    batches = [example(4, 5 + i) for i in range(STEPS)]
    expected = trained(copy.deepcopy(module), batches, 1)
    for num_stages in (2, 3, 4):
        found = trained(copy.deepcopy(module), batches, num_stages)
        for parameter, pair in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, found[parameter], strict=True)), (num_stages, parameter)
