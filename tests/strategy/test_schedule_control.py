"""Adaptive advance in training: it changes the order of actions and nothing else, and never beyond the memory."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.schedule.adaptive import DROPPED, WINDOW, IterationShape
from lightning_avgpipe.strategy import schedule_control
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from tests import processes
from tests.comparing import assert_equal, assert_same_parameters, state
from tests.models import MLP, Regression, loader
from tests.trainers import Reconfigures, pipeline

BATCH, NUM_MICROBATCHES = 6, 6
ENOUGH = 1 + 3 * (1 + DROPPED + WINDOW) + 3  # iterations for three advances, each noticed one iteration late
TIMES = (1.0, 0.8, 0.8)  # seconds with advance 0, 1 and more: 1 pays, 2 does not
SPLIT = {"num_microbatches": NUM_MICROBATCHES, "split_points": ["layers.4"]}


class MadeUp:
    """A stopwatch that shows what the advance deserves."""

    used: list[int]

    def __init__(self, device: torch.device) -> None:
        self.laps: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def lap(self, number: int) -> Iterator[None]:
        yield
        self.laps.append((number, TIMES[min(self.used[-1], len(TIMES) - 1)]))

    def finished(self) -> list[tuple[int, float]]:
        laps, self.laps = self.laps, []
        return laps


@contextlib.contextmanager
def forced(alone: bool) -> Iterator[list[int]]:
    """Within this context times are made up, and one process adapts too; yields the advance of every iteration."""
    used: list[int] = []
    lanes, init = Pipeline.lanes, ScheduleControl.__init__

    def noted(self: Pipeline, step: str, schedule: Any, task: Any, *observers: Any) -> Any:
        if task.trains:
            used.append(max(a - b for a, b in zip(schedule.warm_up, schedule.warm_up[1:], strict=False)) - 1)
        return lanes(self, step, schedule, task, *observers)

    def begun(self: ScheduleControl, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if alone:
            self.choice.request = replace(self.choice.request, advance="auto")

    MadeUp.used = used
    with (
        mock.patch.object(Pipeline, "lanes", noted),
        mock.patch.object(ScheduleControl, "__init__", begun),
        mock.patch.object(schedule_control, "Stopwatch", MadeUp),
    ):
        yield used


def runs(used: list[int]) -> list[int]:
    """Without repetitions."""
    return [h for i, h in enumerate(used) if i == 0 or used[i - 1] != h]


def fit(
    model: Regression, iterations: int = ENOUGH, devices: int = 1, ckpt_path: Any = None, **options: Any
) -> tuple[Any, list[int]]:
    strategy = {**SPLIT, **options.pop("strategy", {})}
    runner = pipeline(2, devices, strategy, max_epochs=-1, max_steps=iterations, **options)
    with forced(devices == 1 and strategy.get("advance") is None) as used:
        runner.fit(model, loader(type(model), BATCH * 10, BATCH), loader(type(model), 6, 6), ckpt_path=ckpt_path)
    return runner, used


def adapted(folder: Path) -> tuple[list[int], dict[str, torch.Tensor], dict[int, int]]:
    torch.manual_seed(5)
    model = MLP()
    runner, used = fit(
        model, devices=int(os.environ["WORLD_SIZE"]), logger=CSVLogger(folder, name="csv", version=0),
        log_every_n_steps=2, check_val_every_n_epoch=2,
    )  # fmt: skip
    return used, model.state_dict(), runner.strategy.peak_memory_bytes


@pytest.fixture(scope="module")
def fixed() -> Regression:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = MLP()
    assert set(fit(model, strategy={"advance": 0})[1]) == {0}
    return model


def test_two_processes_switch_together_and_train_the_same_weights(fixed: Regression, tmp_path: Path) -> None:
    (used, weights, _), (others, other_weights, _) = processes.everywhere(2, adapted, tmp_path, folder=tmp_path)
    assert runs(used) == [0, 1, 2, 1]
    assert used == others
    assert_equal([weights, other_weights], [state(fixed)] * 2)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("avgpipe/advance")]
    assert [float(row["avgpipe/advance"]) for row in rows] == [1.0, 2.0, 1.0]
    assert [float(row["avgpipe/iteration_s"]) for row in rows] == [1.0, 0.8, 0.8]
    assert all(int(row["step"]) % 2 == 1 for row in rows)  # as Lightning counts: every second step


@pytest.mark.parametrize(
    ("options", "later", "warm_ups"),
    [
        ({}, None, {(0, 0)}),
        ({"schedule": "1f1b"}, None, {(1, 0)}),
        ({"advance": 1}, None, {(2, 0)}),
        ({}, 0, {(0, 0)}),
        ({}, 1, {(0, 0), (2, 0)}),
    ],
)
def test_one_process_has_nothing_to_overlap_and_goes_depth_first_unless_asked_then_or_later(
    options: dict[str, Any], later: int | None, warm_ups: set[tuple[int, ...]]
) -> None:
    callbacks = [Reconfigures({0: {"advance": later}})]
    runner = pipeline(2, 1, {**SPLIT, **options}, max_steps=3, callbacks=callbacks)
    with mock.patch.object(Pipeline, "lanes", autospec=True, side_effect=Pipeline.lanes) as lanes:
        runner.fit(MLP(), loader(MLP, BATCH * 3, BATCH))
    assert {call.args[2].warm_up for call in lanes.call_args_list} == warm_ups


def test_depth_first_a_stage_keeps_one_micro_batch_and_the_plan_says_so() -> None:
    peaks, weights, plans = [], [], []
    for schedule in ("1f1b", "advance_forward"):
        torch.manual_seed(5)
        model, runner = MLP(), pipeline(3, 1, {"schedule": schedule, "num_microbatches": 6, "costs": "measured"})
        runner.fit(model, loader(MLP, BATCH * 3, BATCH))
        peaks.append(runner.strategy.peak_memory_bytes)
        plans.append(str(runner.strategy.plan).splitlines()[-1])
        weights.append(model)
    assert peaks[1][0] < peaks[0][0] and peaks[1][1] < peaks[0][1] and peaks[1][2] == peaks[0][2]
    assert plans[0].endswith("0% idle (1f1b, 6 micro-batches)")
    assert plans[1].endswith("0% idle (depth_first, 6 micro-batches)")
    assert_same_parameters(*weights)


def test_a_resumed_run_goes_on_with_its_advance_after_one_iteration(tmp_path: Path) -> None:
    runner, _ = fit(MLP())
    path = tmp_path / "frozen.ckpt"
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["AvgPipeStrategy"]["advance"]
    (state,) = saved["states"]
    assert state["state"]["best"]["advance"] == 1
    again, used = fit(MLP(), ENOUGH + 15, ckpt_path=path)
    assert used == [0] + [1] * 14
    (resumed,) = again.strategy.run.loop.schedule_control.state_dict()["states"]
    assert resumed["state"]["best"] == state["state"]["best"]


class Wide(MLP):
    """Keeps more for backwards than it holds."""

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 256, 8), torch.randn(size, 256, 8)


def limited(limit: float | None) -> tuple[list[int], Any]:
    """The advances that a training used, and what has chosen them."""
    torch.manual_seed(5)
    options = {"costs": "measured", "costs_cache": None, "memory_limit": limit, "split_points": ["layers.8"]}
    runner, used = fit(Wide(), strategy=options)
    assert set(runner.strategy.peak_memory_bytes) == {0, 1}
    return used, runner.strategy.run.loop.schedule_control


def test_memory_is_measured_before_a_step_and_the_limit_never_exceeded() -> None:
    used, free = limited(None)
    assert runs(used) == [0, 1, 2, 1]
    (state,) = free.state_dict()["states"]
    needs = [free.predicted(IterationShape(**state["setting"]), h)[0] for h in range(3)]
    assert needs == sorted(needs) and free.peaks[0] == pytest.approx(needs[2], rel=0.05)  # 2 was measured last
    used, chosen = limited(needs[1])
    assert runs(used) == [0, 1]
    (state,) = chosen.state_dict()["states"]
    assert state["state"]["best"] is not None and "advance 2 would need" in state["state"]["reason"]
    assert "on stage 0, the limit is" in state["state"]["reason"]
    assert max(chosen.peaks.values()) <= needs[1]


def test_where_nothing_fits_it_says_so_and_stays_at_1f1b() -> None:
    with pytest.warns(UserWarning, match=r"stage 0 keeps .* more than memory_limit \(50.0 KiB\)"):
        used, _ = limited(50 * 1024)
    assert set(used) == {0}
