"""Stock models of transformers train and validate as a pipeline, unmodified."""

from __future__ import annotations

import pytest

from tests.zoo.comparison import check
from tests.zoo.transformers_models import MODELS, HuggingFace


@pytest.mark.parametrize("num_stages", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("name", MODELS)
def test_stages_equal_the_model_bitwise(name: str, num_stages: int) -> None:
    build, batch = MODELS[name]
    # another length, and a last batch of which one micro-batch is smaller
    check(HuggingFace(build()), [batch(6, 6), batch(6, 9), batch(5, 5)], num_stages)
