"""Schedules by name, with the strategy: every one trains the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner, Links
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import Schedule, StageCosts, build, peak_stash, simulate
from lightning_avgpipe.schedule.choice import fastest
from lightning_avgpipe.strategy import schedule_choice
from tests import processes
from tests.comparing import assert_equal, assert_same_parameters, state
from tests.models import MLP, ConvNet, LSTMStack, Regression, TinyTransformer, UNet, loader
from tests.trainers import assert_defaults_equal_accumulation, logged, pipeline, trainer, twins


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
