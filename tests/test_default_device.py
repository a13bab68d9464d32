"""Tensors of the package live where it says, whatever device a script makes torch's default."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from tests import processes
from tests.averaging.models import assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"


def unsaid(path: Path, makers: set[str]) -> list[str]:
    """Where a module has torch make a tensor, and does not say on which device."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if ast.unparse(call.func) in makers and not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_that_the_package_makes_says_its_device() -> None:
    makers = {f"torch.{function.__name__}" for function in _device_constructors()}
    assert [place for path in sorted(PACKAGE.rglob("*.py")) for place in unsaid(path, makers)] == []


class Silent(MLP):
    """Logs nothing: Lightning's metrics live on the default device."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


def trained(devices: int, default: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Silent()  # and so does the state of torch's other optimizers
    model.on_train_start = lambda: torch.set_default_device(default)  # type: ignore[method-assign]
    options = {"num_pipelines": 2, "num_microbatches": 2, "timeout": "30s"}
    runner = pipeline(2, devices, options, max_epochs=1, gradient_clip_val=0.1)
    runner.fit(model, loader(MLP, 32, 8))
    runner.save_checkpoint("last.ckpt")
    return dict(model.state_dict())


def by_default_elsewhere(rank: int) -> dict[str, torch.Tensor]:
    return trained(2, "meta")


@pytest.mark.slow
def test_processes_train_the_same_with_another_default_device(tmp_path: Path) -> None:
    expected = trained(1, "cpu")
    for found in processes.results(processes.run(2, by_default_elsewhere, folder=tmp_path)):
        assert_equal(found, expected)
