"""LightningModules of all sorts train and validate as a pipeline, unmodified."""

from __future__ import annotations

import pytest

from tests.models import Regression
from tests.zoo.comparison import check
from tests.zoo.own_models import MODELS


# torch says so of a reentrant checkpoint in a validation
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("num_stages", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_stages_equal_the_model_bitwise(model: type[Regression], num_stages: int) -> None:
    # another length, and a last batch of which one micro-batch is smaller
    check(model(), [model.example(6, 6), model.example(6, 9), model.example(5, 5)], num_stages)
