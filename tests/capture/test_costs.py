"""Measured costs: the plan that they make for all processes, and the cache, for the same model on the same device."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.cost_cache import CostCache, fingerprint
from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.planning import Link, Plan
from lightning_avgpipe.planning.divisible import Divisible
from tests import processes
from tests.models import MLP, TinyTransformer, loader
from tests.trainers import pipeline


def cache() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"])


def plan_of(**strategy: Any) -> Plan:
    torch.manual_seed(0)
    runner = pipeline(strategy={"costs": "measured", **strategy}, max_steps=1)
    runner.fit(MLP(), loader(MLP, 16, 16))
    return runner.strategy.plan


def test_a_measured_plan_is_made_once_and_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_of()
    assert first.measured and first.forecast is not None and first.forecast.iteration_s > 0
    assert all(stage.forward > 0 and stage.backward > 0 and stage.memory.stash > 0 for stage in first.stages)
    assert list((cache() / "lightning_avgpipe").glob("costs-*.json"))

    def fail(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("lightning_avgpipe.planning.costs.measure", fail)
    assert str(plan_of()) == str(first)


def test_the_cache_is_an_option(tmp_path: Path) -> None:
    plan_of(costs_cache=None)
    assert not list(cache().iterdir())
    plan_of(costs_cache=tmp_path / "here")
    assert list((tmp_path / "here").glob("costs-*.json")) and not list(cache().iterdir())


def test_memory_is_estimated_for_the_optimizer_and_the_schedule() -> None:
    plan = plan_of(num_microbatches=4, split_points=["layers.4"], schedule="1f1b")
    for stage, in_flight, tanhs in zip(plan.stages, (2, 1), (2, 3), strict=True):
        assert stage.memory.persistent == 3 * 4 * stage.num_parameters  # weight, gradient, momentum
        assert stage.memory.stash == in_flight * tanhs * 4 * 8 * 4  # 4 samples, 8 features, 4 bytes


def test_a_limit_on_memory_is_obeyed() -> None:
    plan = plan_of(memory_limit="5KiB")
    assert all(stage.memory.total <= 5 * 1024 for stage in plan.stages)


def train_measured(folder: Path) -> tuple[str, Any, list[float]]:
    torch.manual_seed(5)
    options = {"costs": "measured", "costs_cache": folder / "costs", "num_microbatches": 2}
    runner = pipeline(4, 2, options, max_epochs=1)
    model = TinyTransformer()
    runner.fit(model, loader(TinyTransformer, 12, 6))
    return (
        str(runner.strategy.plan),
        runner.strategy.cluster.links(runner.strategy.cluster.stage_map),
        [float(p.detach().sum()) for p in model.parameters()],
    )


def test_all_processes_follow_the_plan_that_rank_zero_measured(tmp_path: Path) -> None:
    zero, one = processes.everywhere(2, train_measured, tmp_path, folder=tmp_path)
    assert zero[0] == one[0] and "expected: " in zero[0]
    assert zero[2] == one[2]
    links = zero[1]
    assert len(links) == 3 and links[0] == links[2]  # stages 0, 2 on rank 1 and 1, 3 on rank 0: two hops are alike
    assert all(link.latency > 0 and 0 <= link.per_byte < 1e-3 for link in links)
    assert links[1] != Link() and links[1] != links[0]  # the way back was timed by the other process


# -- the cache -------------------------------------------------------------------------------------------------------


COSTS = Costs((0.5, 0.25), (1.0, 1e-7), (10, 0), measured=True)


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


def test_without_a_home_nothing_is_kept_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.warns(UserWarning, match="no home directory, so measured costs are not kept") as caught:
        assert plan_of().measured
    assert sum("no home directory" in str(warning.message) for warning in caught) == 1


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.b(self.a(batch)).sum()


class Layer(nn.Linear):
    """Saves what it returns for its backward, or what it squares then; or neither, if it is checkpointed."""

    def __init__(self, squares: bool, checkpoints: bool) -> None:
        super().__init__(8, 2)
        self.squares, self.checkpoints = squares, checkpoints

    def _activated(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        return out.square() if self.squares else out

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._activated, x, use_reentrant=False) if self.checkpoints else self._activated(x)


def ending_with(layer: nn.Module) -> Net:
    module = Net()
    module.b = layer  # type: ignore[assignment]
    return module


def key_of(module: nn.Module, size: int = 3, dtype: torch.dtype = torch.float32, grad: bool = True) -> str:
    args = (torch.randn(size, 4, dtype=dtype), 0)
    with torch.set_grad_enabled(grad):
        graph = capture("training_step", module.training_step, args, module, Divisible(module).units())
    return fingerprint(graph, module, torch.device("cpu"))[0]


def test_a_fingerprint_tells_apart_what_costs_differently() -> None:
    frozen = Net()
    frozen.a.requires_grad_(False)
    keys = [
        key_of(Net()),
        key_of(Net(16)),
        key_of(Net(), size=5),
        key_of(Net().double(), dtype=torch.float64),
        key_of(Net(), grad=False),
        key_of(frozen),
        key_of(ending_with(Layer(squares=False, checkpoints=False))),
        key_of(ending_with(Layer(squares=True, checkpoints=False))),
        key_of(ending_with(Layer(squares=True, checkpoints=True))),
    ]
    torch.set_num_threads(2)
    keys.append(key_of(Net()))
    assert len(set(keys)) == len(keys)
