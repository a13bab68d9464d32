"""Stock models of transformers train and validate as a pipeline, unmodified."""

from __future__ import annotations

import pytest

from tests.zoo.comparison import check
from tests.zoo.transformers_models import MODELS, HuggingFace

FAST = ("bert", "gpt2", "bart")  # with three stages


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        pytest.param(name, n, marks=() if n == 3 and name in FAST else pytest.mark.slow)
        for name in MODELS
        for n in (3, 4)
    ],
)
def test_stages_equal_the_model_bitwise(name: str, num_stages: int) -> None:
    build, batch = MODELS[name]
    # another length, and a last batch of which one micro-batch is smaller
    check(HuggingFace(build()), [batch(6, 6), batch(6, 9), batch(5, 5)], num_stages)
