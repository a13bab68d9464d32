"""Schedules by name, with the strategy: every one trains the same weights."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner, Links
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import Schedule, StageCosts, build, peak_stash, simulate
from lightning_avgpipe.schedule.adaptive import DROPPED, WINDOW, IterationShape
from lightning_avgpipe.schedule.choice import fastest
from lightning_avgpipe.strategy import schedule_choice, schedule_control
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from tests import processes
from tests.comparing import assert_equal, assert_same_parameters, state
from tests.models import MLP, ConvNet, LSTMStack, Regression, TinyTransformer, UNet, loader
from tests.trainers import Reconfigures, assert_defaults_equal_accumulation, logged, pipeline, trainer, twins


def backwards_first(num_stages: int, num_microbatches: int) -> list[str]:
    """1F1B with a single micro-batch in flight."""
    return [" ".join(f"F{i} B{i}" for i in range(num_microbatches))] * num_stages


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (TinyTransformer, "zb_h2"), (ConvNet, "interleaved"), (LSTMStack, "zbv"), (MLP, "auto"),
        (MLP, backwards_first), (UNet, "advance_forward"), (LSTMStack, "1f1b"), (TinyTransformer, "afab"),
    ],
)  # fmt: skip
def test_weights_equal_accumulation_bit_for_bit(model: type[Regression], schedule: Any) -> None:
    """Of micro-batches of several sizes, with AdamW."""
    torch.manual_seed(1)
    assert_defaults_equal_accumulation(model("adamw"), model.example(10), 4, schedule=schedule, num_microbatches=4)


def fit(schedule: str, num_stages: int, reader: str = "first") -> tuple[dict[str, Any], list[str]]:
    """Train in several processes, the last batch of an epoch being small."""
    torch.manual_seed(1)
    model = MLP("adamw", depth=6)
    options: dict[str, Any] = {"num_microbatches": 4, "schedule": schedule, "links": Links(reader=reader)}
    runner = pipeline(num_stages, 2, options)
    with logged() as said:
        runner.fit(model, loader(MLP, 19, 8), loader(MLP, 8, 4))
    return {"weights": state(model), "metrics": dict(runner.callback_metrics)}, said


SCHEDULES = {"zb_h1": 2, "interleaved": 4, "bfs": 4, "zbv": 4, "dualpipev": 4, "auto": 4}  # numbers of stages


def fit_all() -> dict[Any, Any]:
    plain = {num_stages: fit("1f1b", num_stages) for num_stages in (2, 4)}
    return {**plain, **{name: fit(name, num_stages) for name, num_stages in SCHEDULES.items()}}


in_two = processes.shared(2, lambda rank: fit_all())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_train_the_weights_of_1f1b(schedule: str, in_two: Any) -> None:
    for rank in in_two:
        assert_equal(rank[schedule][0], rank[SCHEDULES[schedule]][0])


def preferring(costs: StageCosts, count: int, devices: Sequence[int], *rest: Any) -> Schedule:
    """As if ZB-V were the fastest wherever it can run."""
    can = rest[2:] == (True,) or list(devices) == [0, 1, 1, 0]
    return build("zbv" if can else "interleaved", costs.num_stages, count, 0, 2)


def fit_preferring() -> list[Any]:
    with mock.patch.object(schedule_choice, "fastest", preferring):
        return [fit(schedule, 4, "last") for schedule in ("auto", "1f1b")]


@pytest.mark.slow
def test_auto_places_stages_there_and_back_where_that_is_faster(tmp_path: Path) -> None:
    ranks = processes.everywhere(2, fit_preferring, folder=tmp_path)
    _, said = ranks[0][0]
    assert any("stages are placed there and back" in message for message in said), said
    assert any(message.startswith("schedule zbv from now on") for message in said), said
    for (found, _), (expected, _) in ranks:
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zbv", "num_stages": 3}, "schedule='zbv' with num_stages=3 on 1 process: it needs two stages"),
        ({"schedule": lambda k, m: ["F0 B0"] * k, "num_microbatches": 2}, "stage 0 has 2 actions and misses B1, F1"),
        ({"schedule": lambda k, m: ["B0 F0"] * k, "num_microbatches": 1}, "no action can start any more"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    class Untouched(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(ConfigurationError, match=message):
        fitter = trainer(strategy=AvgPipeStrategy(**{"num_stages": 2, **options}))
        fitter.fit(Untouched(), DataLoader([MLP.example(8)], batch_size=None))


def test_auto_takes_what_is_fastest_and_fits_the_memory() -> None:
    costs, everything = StageCosts.uniform(4, 1, 2), lambda schedule: True
    assert fastest(costs, 8, range(4), everything).name == "zb_h1"  # as fast as zb_h2, which ends a step later
    assert fastest(costs, 8, range(4), lambda schedule: max(peak_stash(schedule)) <= 4).name == "zb_h1"
    assert fastest(costs, 8, range(4), lambda schedule: peak_stash(schedule)[3] <= 1).name == "1f1b"
    assert fastest(costs, 8, range(4), everything, splits=False).name == "1f1b"
    assert fastest(costs, 8, (1, 0, 1, 0), everything, splits=False).name == "interleaved"
    assert fastest(costs, 8, range(4), lambda schedule: False).name == "1f1b"
    loop, there_and_back = (1, 0, 1, 0), (0, 1, 1, 0)
    assert fastest(costs, 8, loop, everything).name == "zb_h1"
    assert fastest(costs, 8, loop, everything, there_and_back=True).name == "zbv"  # as fast, and it needs less memory
    assert fastest(costs, 8, there_and_back, everything).name == "zbv"
    assert fastest(costs, 8, there_and_back, everything, splits=False).name == "1f1b"
    assert fastest(costs, 8, loop, lambda s: max(peak_stash(s)) <= 2, there_and_back=True).name == "1f1b"
    slow = StageCosts.uniform(4, 1, 2, send_s=2)
    assert (
        simulate(fastest(slow, 8, range(4), everything), slow).iteration_s
        < simulate(build("1f1b", 4, 8), slow).iteration_s * 0.9
    )


@pytest.mark.parametrize(("accumulate", "num_pipelines", "precision"), [(2, 1, "bf16-mixed"), (1, 2, "32-true")])
def test_halves_combine_with_accumulation_clipping_precision_and_parallel_models(
    accumulate: int, num_pipelines: int, precision: Any
) -> None:
    models = twins(MLP, optimizer="adamw")
    for model, schedule in zip(models, ("1f1b", "zb_h1"), strict=True):
        strategy = {"schedule": schedule, "num_pipelines": num_pipelines, "num_microbatches": 4}
        options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "precision": precision}
        pipeline(3, strategy=strategy, gradient_clip_val=0.1, **options).fit(model, loader(MLP, 32, 8))
    assert_same_parameters(*models)


def test_the_tuner_refuses_a_schedule_that_it_cannot_predict() -> None:
    fitter = trainer(strategy=AvgPipeStrategy(num_stages=2, schedule="zb_h1"), callbacks=[AvgPipeTuner()])
    with pytest.raises(ConfigurationError, match=r"predicts 'advance_forward', '1f1b', 'afab', but .*'zb_h1'"):
        fitter.fit(MLP(), DataLoader([MLP.example(8)], batch_size=None))


# -- adaptive advance changes the order of actions and nothing else, and never beyond the memory ---------------------


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


def adapting(
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
    runner, used = adapting(
        model, devices=int(os.environ["WORLD_SIZE"]), logger=CSVLogger(folder, name="csv", version=0),
        log_every_n_steps=2, check_val_every_n_epoch=2,
    )  # fmt: skip
    return used, model.state_dict(), runner.strategy.peak_memory_bytes


@pytest.fixture(scope="module")
def fixed() -> Regression:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = MLP()
    assert set(adapting(model, strategy={"advance": 0})[1]) == {0}
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
    runner, _ = adapting(MLP())
    path = tmp_path / "frozen.ckpt"
    runner.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["AvgPipeStrategy"]["advance"]
    (state,) = saved["states"]
    assert state["state"]["best"]["advance"] == 1
    again, used = adapting(MLP(), ENOUGH + 15, ckpt_path=path)
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
    runner, used = adapting(Wide(), strategy=options)
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
