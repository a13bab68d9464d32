"""Models with tied weights train in two processes as in one, and as without stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests import processes
from tests.trainers import pipeline, trainer
from tests.zoo.transformers_models import MODELS, HuggingFace


def fit(rank: int, name: str, devices: int, num_stages: int) -> dict[str, Any]:
    """Three steps of AdamW, in double precision: what is left of differences is the order of sums."""
    torch.manual_seed(7)
    build, batch = MODELS[name]
    model = HuggingFace(build())
    options: dict[str, Any] = {"max_steps": 3, "precision": "64-true"}
    if num_stages:
        runner = pipeline(num_stages, devices, {"num_microbatches": 2}, **options)
    else:
        runner = trainer(**options)
    batches = DataLoader([batch(6, 6), batch(6, 9), batch(6, 5)], batch_size=None)  # type: ignore[arg-type]
    runner.fit(model, batches)
    plan = getattr(runner.strategy, "plan", None)
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "copied": plan.copied if plan is not None else {},
    }


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_tied_weights_train_in_two_processes_as_in_one(name: str, tmp_path: Path) -> None:
    two = processes.results(processes.run(2, fit, name, 2, 2, folder=tmp_path))
    one = processes.results(processes.run(1, fit, name, 1, 2, folder=tmp_path))[0]
    plain = processes.results(processes.run(1, fit, name, 1, 0, folder=tmp_path))[0]
    assert two[0]["copied"], "the embedding is used on both stages"
    for rank in two:
        for key, value in one["weights"].items():
            assert torch.equal(rank["weights"][key], value), key
    for key, value in plain["weights"].items():
        torch.testing.assert_close(one["weights"][key], value, rtol=1e-7, atol=1e-9, msg=key)
