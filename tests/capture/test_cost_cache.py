"""Measured costs are kept for the next run, and only for the same model on the same device."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.cost_cache import CostCache, fingerprint
from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.planning.divisible import Divisible
from tests.models import MLP, loader
from tests.trainers import pipeline

COSTS = Costs((0.5, 0.25), (1.0, 1e-7), (10, 0), measured=True)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.b(self.a(batch)).sum()


def key_of(module: nn.Module, size: int = 3, dtype: torch.dtype = torch.float32, grad: bool = True) -> str:
    args = (torch.randn(size, 4, dtype=dtype), 0)
    with torch.set_grad_enabled(grad):
        graph = capture("training_step", module.training_step, args, module, Divisible(module).units())
    return fingerprint(graph, module, torch.device("cpu"))[0]


def frozen(module: nn.Module) -> nn.Module:
    module.a.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "not JSON",
        lambda content: json.dumps({**content, "key": "other"}),
        lambda content: json.dumps({**content, "forward_s": [1.0]}),
        lambda content: json.dumps({**content, "stash_bytes": ["many", 1]}),
        lambda content: json.dumps({**content, "forward_s": [float("nan"), 1.0]}),
        lambda content: json.dumps({**content, "forward_s": [10**400, 1.0]}),
        lambda content: "[" * 100_000,
        lambda content: json.dumps({k: v for k, v in content.items() if k != "stash_bytes"}),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored(
    tmp_path: Path, change: Callable[[dict[str, Any]], str], caplog: pytest.LogCaptureFixture
) -> None:
    cache = CostCache(tmp_path)
    cache.save("key", COSTS, {})
    file = tmp_path / "costs-key.json"
    file.write_text(change(json.loads(file.read_text())))
    with caplog.at_level(logging.INFO, logger="lightning_avgpipe"):
        assert cache.load("key", 2) is None
    assert "ignoring the measured costs in" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CostCache(tmp_path / "file")
    for key in ("one", "another"):
        assert cache.load(key, 2) is None
        cache.save(key, COSTS, {})
    assert caplog.text.count("cannot keep the measured costs") == 1


def test_without_a_home_nothing_is_kept_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    model = MLP()
    runner = pipeline(strategy={"costs": "measured"}, max_steps=1)
    with pytest.warns(UserWarning, match="no home directory, so measured costs are not kept") as caught:
        runner.fit(model, loader(model, 8, 4))
    assert runner.global_step == 1
    assert sum("no home directory" in str(warning.message) for warning in caught) == 1


def test_a_fingerprint_tells_apart_what_costs_differently() -> None:
    keys = [
        key_of(Net()),
        key_of(Net(16)),
        key_of(Net(), size=5),
        key_of(Net().double(), dtype=torch.float64),
        key_of(Net(), grad=False),
        key_of(frozen(Net())),
    ]
    torch.set_num_threads(2)
    keys.append(key_of(Net()))
    assert len(set(keys)) == len(keys)
