"""LightningModules of all sorts and stock models of transformers train and validate as a pipeline, unmodified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.zoo import own_models, transformers_models
from tests.zoo.comparison import assert_same, check, check_in_two_processes, in_stages
from tests.zoo.transformers_models import HuggingFace

Case = tuple[Callable[[], L.LightningModule], Callable[[int, int], Any]]


def of_transformers(models: dict[str, Any]) -> dict[str, Case]:
    return {name: (lambda build=build: HuggingFace(build()), batch) for name, (build, batch) in models.items()}


OWN: dict[str, Case] = {model.__name__: (model, model.example) for model in own_models.MODELS}
MODELS = {**OWN, **of_transformers(transformers_models.MODELS)}
FAST = {"bert", "gpt2", *OWN} - {"CheckpointedReentrant"}  # with three stages
DRAWING: dict[str, Case] = {
    **{model.__name__: (model, model.example) for model in own_models.DRAWING},
    **of_transformers(transformers_models.DRAWING),
}


def made(case: Case) -> tuple[L.LightningModule, list[Any]]:
    torch.manual_seed(1)
    build, example = case
    # another length, and a last batch of which one micro-batch is smaller
    return build(), [example(6, 6), example(6, 9), example(5, 5)]


# torch says so of a reentrant checkpoint in a validation
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        pytest.param(name, n, marks=() if n == 3 and name in FAST else pytest.mark.slow)
        for name in MODELS
        for n in (3, 4)
    ],
)
def test_stages_equal_one_process_bitwise_and_verification_finds_nothing(name: str, num_stages: int) -> None:
    check(partial(made, MODELS[name]), num_stages, verify=3)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_two_processes_equal_one_bitwise(first: int, tmp_path: Path) -> None:
    check_in_two_processes({name: partial(made, MODELS[name]) for name in list(OWN)[first::6]}, 4, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("Checkpointed") else ()) for name in DRAWING]
)
def test_dropout_does_not_depend_on_the_number_of_stages(name: str) -> None:
    make = partial(made, DRAWING[name])
    expected = in_stages(make, 1)
    for num_stages, schedule in ((2, "afab"), (4, "advance_forward")):
        assert_same(expected, in_stages(make, num_stages, verify=3, schedule=schedule))
