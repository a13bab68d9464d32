"""Timelines of real pipelines: recorded, brought to one clock, and written where people look."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import fsspec
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_avgpipe import PipelineTimeline
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import build
from lightning_avgpipe.utils.device import DeviceClock, DevicePort, Moment
from tests import processes
from tests.comparing import assert_same_parameters
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer, twins

CPU = torch.device("cpu")


class Event:
    """A CUDA event, as far as a clock can see."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: Event) -> float:
        assert other.waited, "an event has a time when it has happened"
        return other.milliseconds - self.milliseconds


class Distant(DevicePort):
    """An accelerator on which the anchor passes at 0.1 s."""

    def moment(self, stream: object = None) -> Moment:
        return Event(100.0)  # type: ignore[return-value]


def test_events_are_placed_on_the_hosts_clock_by_their_distance_from_the_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_avgpipe.utils.device.port_of", Distant)
    monkeypatch.setattr("lightning_avgpipe.utils.device.host_now", lambda: 7.0)
    clock = DeviceClock(CPU)
    assert clock.seconds(Event(350.0)) == pytest.approx(7.25)  # type: ignore[arg-type]
    assert clock.seconds(3.5) == 3.5


def actions(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") in ("forward", "backward")]


def assert_complete(trace: dict[str, Any], num_stages: int, num_microbatches: int, num_pipelines: int = 1) -> None:
    """Every action once, and no two of a stage at the same time."""
    wanted = [(f"{k}{i}", n) for k in "FB" for i in range(num_microbatches) for n in range(num_pipelines)]
    for stage in range(num_stages):
        here = sorted((e for e in actions(trace) if e["args"]["stage"] == stage), key=lambda e: e["ts"])
        assert sorted((e["name"], e["args"]["pipeline"]) for e in here) == sorted(wanted)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(here))


def test_a_trainer_writes_a_trace_and_a_picture_every_n_steps(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="csv", version=0), TensorBoardLogger(tmp_path, name="tensorboard", version=0)]
    callback = PipelineTimeline(every_n_steps=2, dirpath=tmp_path / "timelines")
    runner = pipeline(2, 1, {"num_microbatches": 4}, callbacks=[callback], logger=loggers, max_epochs=1)
    runner.fit(MLP(), loader(MLP, 40, 8))
    names = sorted(path.name for path in (tmp_path / "timelines").iterdir())
    assert names == [f"trace_step=00000{step}.{suffix}" for step in (2, 4) for suffix in ("json", "png")]
    trace = json.loads((tmp_path / "timelines" / "trace_step=000004.json").read_text())
    assert_complete(trace, num_stages=2, num_microbatches=4)
    assert {event["pid"] for event in actions(trace)} == {0}
    (step,) = (event for event in trace["traceEvents"] if event.get("cat") == "step")
    assert step["ts"] >= max(event["ts"] + event["dur"] for event in actions(trace))
    assert trace["otherData"]["step"] == 4
    rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "avgpipe/bubble_fraction" in rows[0].split(",")
    assert "avgpipe/bubble_fraction_simulated" in rows[0].split(",")
    (events,) = (tmp_path / "tensorboard").rglob("events*")
    assert b"avgpipe/timeline" in events.read_bytes()
    assert not list(runner.strategy.observers)


def test_weights_and_biases_gets_the_picture(tmp_path: Path) -> None:
    # the tests do not install its package
    logger = create_autospec(WandbLogger, instance=True, save_dir=str(tmp_path), version="0")
    callback = PipelineTimeline(every_n_steps=2, dirpath=tmp_path)
    strategy = {"num_microbatches": 4}
    pipeline(2, 1, strategy, callbacks=[callback], logger=logger, max_epochs=1).fit(MLP(), loader(MLP, 40, 8))
    calls = [call.args for call in logger.log_image.call_args_list]
    assert [(tag, step) for tag, _, step in calls] == [("avgpipe/timeline", 2), ("avgpipe/timeline", 4)]
    assert all(image.shape[2] == 3 for _, (image,), _ in calls)


def test_parallel_pipelines_are_recorded_together(tmp_path: Path) -> None:
    callback = PipelineTimeline(every_n_steps=1, dirpath=tmp_path)
    strategy = {"num_pipelines": 3, "num_microbatches": 4, "schedule": "1f1b"}
    logger = CSVLogger(tmp_path, name="csv", version=0)
    pipeline(2, 1, strategy, callbacks=[callback], logger=logger, max_epochs=1).fit(MLP(), loader(MLP, 40, 8))
    whole = json.loads((tmp_path / "trace_step=000001.json").read_text())
    assert_complete(whole, num_stages=2, num_microbatches=4, num_pipelines=3)
    # of five batches two are left for the second iteration
    assert_complete(json.loads((tmp_path / "trace_step=000002.json").read_text()), 2, 4, num_pipelines=2)
    rows = build("1f1b", 2, 4).rows
    for stage, n in itertools.product(range(2), range(3)):
        lane = [e for e in actions(whole) if (e["args"]["stage"], e["args"]["pipeline"]) == (stage, n)]
        assert [e["name"] for e in sorted(lane, key=lambda e: e["ts"])] == [str(action) for action in rows[stage]]
        assert len({e["tid"] for e in lane}) == 1
    (averaging,) = (event for event in whole["traceEvents"] if event.get("cat") == "averaging")
    assert averaging["ts"] >= max(e["ts"] + e["dur"] for e in whole["traceEvents"] if e.get("cat") == "step")
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["avgpipe/bubble_fraction"]]
    assert len(found) == 2
    assert all(0 <= float(row["avgpipe/bubble_fraction_simulated"]) < 1 for row in found)


def test_accumulated_batches_are_recorded_once_per_step_on_any_file_system_and_no_number_changes() -> None:
    models, folder = twins(MLP), "memory://recorded/timelines"
    for model, callbacks in zip(models, ([], [PipelineTimeline(every_n_steps=1, dirpath=folder)]), strict=True):
        runner = pipeline(2, callbacks=callbacks, max_epochs=1, accumulate_grad_batches=2)
        runner.fit(model, loader(MLP, 40, 8))
    written = fsspec.filesystem("memory").glob("/recorded/timelines/*.json")
    assert [Path(path).name for path in sorted(written)] == [f"trace_step=00000{i}.json" for i in (1, 2, 3)]
    assert_same_parameters(*models)


def test_another_strategy_and_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the strategy is SingleDeviceStrategy; use"):
        trainer(callbacks=[PipelineTimeline(dirpath=tmp_path)]).fit(MLP(), loader(MLP, 8, 8))
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        PipelineTimeline(every_n_steps=0)


def test_a_failed_training_records_no_longer(tmp_path: Path) -> None:
    class Failing(MLP):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.observers = self.trainer.strategy.observers
            raise ValueError("no more")

    model = Failing()
    runner = pipeline(2, callbacks=[PipelineTimeline(every_n_steps=1, dirpath=tmp_path)], max_epochs=1)
    with pytest.raises(ValueError, match="no more"):
        runner.fit(model, loader(MLP, 8, 8))
    assert not list(model.observers)
    assert not list(tmp_path.glob("*.json"))


def fit() -> list[int]:
    """One pipeline, and then two, in the same two processes."""
    steps = []
    for strategy, every in (
        ({"num_microbatches": 4, "advance": 1}, 2), ({"num_pipelines": 2, "num_microbatches": 2}, 1)
    ):  # fmt: skip
        torch.manual_seed(5)
        callback = PipelineTimeline(every_n_steps=every, dirpath=f"timelines {every}")
        runner = pipeline(2, 2, strategy, callbacks=[callback], max_epochs=1)
        runner.fit(MLP(), loader(MLP, 32, 8), loader(MLP, 8, 8))
        steps.append(runner.global_step)
    return steps


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two processes that have written timelines."""
    folder = tmp_path_factory.mktemp("two")
    assert processes.everywhere(2, fit, folder=folder) == [[4, 2]] * 2
    return folder


def test_messages_of_parallel_pipelines_are_told_apart(recorded: Path) -> None:
    for step in (1, 2):  # the channels of pipeline 1 are made in the first iteration
        trace = json.loads((recorded / "timelines 1" / f"trace_step=00000{step}.json").read_text())
        assert_complete(trace, num_stages=2, num_microbatches=2, num_pipelines=2)
        messages = [e for e in trace["traceEvents"] if e.get("cat") == "transfer"]
        assert sorted((e["name"], e["args"]["pipeline"]) for e in messages) == sorted(
            (f"{kind}{i} sent", n) for kind in "FB" for i in range(2) for n in range(2)
        )
        assert len({e["tid"] for e in messages}) == 4


def test_two_processes_write_one_trace_on_one_clock(recorded: Path) -> None:
    folder = recorded / "timelines 2"
    assert sorted(p.name for p in folder.glob("*.json")) == ["trace_step=000002.json", "trace_step=000004.json"]
    for path in folder.glob("*.json"):
        trace = json.loads(path.read_text())
        assert_complete(trace, num_stages=2, num_microbatches=4)
        assert {(e["pid"], e["args"]["stage"]) for e in actions(trace)} == {(1, 0), (0, 1)}
        error_us = trace["otherData"]["clock_error_us"]
        assert 0 < error_us < 1e5
        begins = {(e["args"]["stage"], e["name"]): e["ts"] for e in actions(trace)}
        ends = {(e["args"]["stage"], e["name"]): e["ts"] + e["dur"] for e in actions(trace)}
        messages = [e for e in trace["traceEvents"] if e.get("cat") == "transfer"]
        assert sorted(e["name"] for e in messages) == sorted(f"{kind}{i} sent" for kind in "FB" for i in range(4))
        for message in messages:
            name = message["name"].split()[0]
            source, sink = (0, 1) if name[0] == "F" else (1, 0)
            # causes come before effects, up to the error of the clocks
            assert ends[source, name] <= message["ts"] + 1
            assert message["args"]["arrival_us"] <= begins[sink, name] + error_us + 1
            assert ends[source, name] <= begins[sink, name] + error_us + 1
        assert any(event.get("cat") == "wait" for event in trace["traceEvents"])


def fit_replicas(folder: Path) -> int:
    callback = PipelineTimeline(every_n_steps=2, dirpath=folder)
    runner = pipeline(2, 3, {"replicas": [2, 1], "num_microbatches": 4}, callbacks=[callback], max_epochs=1)
    runner.fit(MLP(), loader(MLP, 16, 8))
    return runner.global_step


@pytest.mark.slow
def test_replicas_of_a_stage_have_rows_of_their_own(tmp_path: Path) -> None:
    assert processes.everywhere(3, fit_replicas, tmp_path, folder=tmp_path) == [2, 2, 2]
    trace = json.loads((tmp_path / "trace_step=000002.json").read_text())
    found = {(e["pid"], e["args"]["stage"], e["args"]["micro_batch"] % 2) for e in actions(trace)}
    assert found == {(1, 0, 0), (2, 0, 1), (0, 1, 0), (0, 1, 1)}
    sent = {(e["pid"], e["name"]) for e in trace["traceEvents"] if e.get("cat") == "transfer"}
    assert sent == {(1 + i % 2, f"F{i} sent") for i in range(4)} | {(0, f"B{i} sent") for i in range(4)}
    # simulated with what was measured, the same order on as many devices has no more idle time
    assert 0 <= trace["otherData"]["avgpipe/bubble_fraction_simulated"] < 1
    assert (tmp_path / "trace_step=000002.png").exists()
