"""LightningModules of all sorts and stock models of transformers train and validate as a pipeline, unmodified."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from tests.driver import Engine
from tests.models import Regression
from tests.zoo import own_models, transformers_models
from tests.zoo.comparison import check
from tests.zoo.transformers_models import HuggingFace


# torch says so of a reentrant checkpoint in a validation
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("num_stages", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", own_models.MODELS, ids=lambda model: model.__name__)
def test_stages_equal_a_module_bitwise(model: type[Regression], num_stages: int) -> None:
    # another length, and a last batch of which one micro-batch is smaller
    check(model(), [model.example(6, 6), model.example(6, 9), model.example(5, 5)], num_stages)


FAST = ("bert", "gpt2", "bart")  # with three stages


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        pytest.param(name, n, marks=() if n == 3 and name in FAST else pytest.mark.slow)
        for name in transformers_models.MODELS
        for n in (3, 4)
    ],
)
def test_stages_equal_a_model_of_transformers_bitwise(name: str, num_stages: int) -> None:
    build, batch = transformers_models.MODELS[name]
    # another length, and a last batch of which one micro-batch is smaller
    check(HuggingFace(build()), [batch(6, 6), batch(6, 9), batch(5, 5)], num_stages)


STEPS = 3
DRAWING: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int, int], Any]]] = {
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
    "name", [pytest.param(n, marks=pytest.mark.slow if n in transformers_models.DRAWING else ()) for n in DRAWING]
)
def test_dropout_does_not_depend_on_the_number_of_stages(name: str) -> None:
    build, example = DRAWING[name]
    module = build()
    batches = [example(4, 5 + i) for i in range(STEPS)]
    expected = trained(copy.deepcopy(module), batches, 1)
    for num_stages in (2, 3, 4):
        found = trained(copy.deepcopy(module), batches, num_stages)
        for parameter, pair in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, found[parameter], strict=True)), (num_stages, parameter)
