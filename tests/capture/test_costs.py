"""Measured costs in training: the plan, the cache, and one plan for all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_avgpipe.planning import Link, Plan, planner
from tests import processes
from tests.models import MLP, TinyTransformer, loader
from tests.trainers import pipeline


def cache() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"])


def plan_of(num_stages: int = 2, devices: int = 1, **strategy: Any) -> tuple[Plan, Any]:
    torch.manual_seed(0)
    runner = pipeline(num_stages, devices, {"costs": "measured", **strategy}, max_steps=1)
    runner.fit(MLP(), loader(MLP, 16, 16))
    return runner.strategy.plan, runner.strategy


def test_a_measured_plan_is_made_once_and_then_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, _ = plan_of()
    assert first.measured and first.forecast is not None and first.forecast.iteration_s > 0
    assert all(stage.forward > 0 and stage.backward > 0 and stage.memory.stash > 0 for stage in first.stages)
    assert list((cache() / "lightning_avgpipe").glob("costs-*.json"))

    def fail(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(planner, "measure", fail)
    assert str(plan_of()[0]) == str(first)


def test_the_cache_is_an_option(tmp_path: Path) -> None:
    plan_of(costs_cache=None)
    assert not list(cache().iterdir())
    plan_of(costs_cache=tmp_path / "here")
    assert list((tmp_path / "here").glob("costs-*.json")) and not list(cache().iterdir())


def test_memory_is_estimated_for_the_optimizer_and_the_schedule() -> None:
    plan, _ = plan_of(num_microbatches=4, split_points=["layers.4"], schedule="1f1b")
    for stage, in_flight, tanhs in zip(plan.stages, (2, 1), (2, 3), strict=True):
        assert stage.memory.held == 3 * 4 * stage.num_parameters  # weight, gradient, momentum
        assert stage.memory.stash == in_flight * tanhs * 4 * 8 * 4  # 4 samples, 8 features, 4 bytes


def test_a_limit_on_memory_is_obeyed() -> None:
    plan, _ = plan_of(memory_limit="5KiB")
    assert all(stage.memory.total <= 5 * 1024 for stage in plan.stages)


def train_measured(rank: int, folder: Path) -> tuple[str, Any, list[float]]:
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
    zero, one = processes.results(processes.run(2, train_measured, tmp_path, folder=tmp_path))
    assert zero[0] == one[0] and "expected: " in zero[0]
    assert zero[2] == one[2]
    links = zero[1]
    assert len(links) == 3 and links[0] == links[2]  # stages 0, 2 on rank 1 and 1, 3 on rank 0: two hops are alike
    assert all(link.latency > 0 and 0 <= link.per_byte < 1e-3 for link in links)
    assert links[1] != Link() and links[1] != links[0]  # the way back was timed by the other process
