"""Failures: every process ends, with an error that names stage, rank and action, and what happened there."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_avgpipe.comm import watch
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.strategy import connection
from lightning_avgpipe.utils.patching import replaced
from tests import faults, processes
from tests.commands import ROOT, run
from tests.models import MLP, loader
from tests.trainers import pipeline

LISTEN_S, UPLOAD_S = 0.3, 1.5  # time to react to a failure, and of a callback that tells of it

# an error while connecting is tested on threads as well
FAST = [
    ("raise", "last", "capture"), ("SIGKILL", "last", "backward"), ("SIGTERM", "first", "backward"),
    ("SIGINT", "middle", "validation"),
]  # fmt: skip
# Every kind in every phase; stages take turns, so that each of them meets all kinds.
STAGES = list(faults.STAGES)
MATRIX = [
    (kind, STAGES[(i + j) % 3], phase) for i, kind in enumerate(faults.KINDS) for j, phase in enumerate(faults.PHASES)
]
ALL = [*FAST, ("SIGKILL", "first", "averaging"), ("SIGSTOP", "last", "first iteration")] + [
    fault
    for fault in MATRIX
    if fault not in FAST and (fault[0] not in ("SIGINT", "stall") or fault[2] in ("set-up", "backward", "checkpoint"))
]


@pytest.mark.parametrize(
    ("kind", "stage", "phase"),
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow, id="-".join(cell)) for cell in ALL],
)
def test_a_fault_of_one_process_ends_all_and_is_named(kind: str, stage: str, phase: str, tmp_path: Path) -> None:
    faults.check(faults.Fault(kind, faults.STAGES[stage], phase), tmp_path)


def told_of_a_signal(rank: int) -> list[str]:
    """What is said when rank 1 gets a signal in the second batch."""
    said: list[str] = []

    class Stops(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if rank == batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with replaced(connection, "rank_zero_info", said.append), pytest.raises((SystemExit, SIGTERMException)):
        pipeline(2, 2, {"timeout": 30}, max_epochs=50, callbacks=[Stops()]).fit(MLP(), loader(MLP, 400, 8))
    return said


def test_it_is_said_that_a_signal_has_ended_training(tmp_path: Path) -> None:
    for said in processes.each(2, told_of_a_signal, folder=tmp_path):
        assert said == ["SIGTERM was received: all processes stop after this batch"]


class Uploads(L.Callback):
    """Takes its time to tell somebody why training has failed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero:
            threading.Event().wait(UPLOAD_S)
            self.path.write_text(str(exception))


class Blown(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank:
            raise ValueError("the fuse has blown")


def blown(rank: int, told: Path) -> None:
    with replaced(watch, "LISTEN_S", (LISTEN_S, LISTEN_S)):
        pipeline(2, 2, max_epochs=1, callbacks=[Uploads(told)]).fit(Blown(), loader(MLP, 16, 4))


def test_a_process_that_has_noticed_a_failure_may_take_its_time_to_tell_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    outcomes = processes.run(2, blown, told, folder=tmp_path)
    assert told.exists() and "the fuse has blown" in told.read_text()
    assert "PeerError" in str(outcomes[0].error) and "ValueError" in str(outcomes[1].error)


def reports_and_hangs(rank: int) -> None:
    with replaced(watch, "LISTEN_S", (LISTEN_S, LISTEN_S)):
        watching = watch.Watch(0, ["rank 0"], dist.HashStore(), LISTEN_S, Arrivals())
    watching.report(ValueError("the fuse has blown"))
    threading.Event().wait(faults.ENDING_S)


def test_a_process_that_reports_a_failure_and_hangs_is_ended_after_the_timeout(tmp_path: Path) -> None:
    (outcome,) = processes.run(1, reports_and_hangs, folder=tmp_path)
    assert outcome.exit_code == 1 and outcome.ended == 0.0, "it went on"


class Requeueing(LightningEnvironment, SLURMEnvironment):
    """Processes as a launcher gives them, and the signals of SLURM."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR1


def in_slurm(model: MLP, runner: L.Trainer, run: str = "fit") -> tuple[int, list[str]]:
    """Train or evaluate as a job; how many steps, and what was asked of SLURM."""
    called: list[str] = []
    signal_connector.call = lambda command: called.append(command[1]) or 0  # type: ignore[attr-defined]
    os.environ["SLURM_JOB_ID"] = "7"
    getattr(runner, run)(model, loader(MLP, 32, 4))
    return runner.global_step, called


def preempted(rank: int, folder: Path, run: str = "fit") -> tuple[int, list[str]]:
    """SLURM sends its signal to all processes, which get it wherever they are."""
    model = MLP()

    def be_signalled(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        watch = runner.strategy.cluster.watch
        if batch_idx == 3 and rank == 0:  # so that the signal comes before the end
            processes.until(lambda: watch.requests, "the signal", 20.0)

    stage = {"fit": "train", "validate": "validation"}.get(run, run)
    setattr(model, f"on_{stage}_batch_start", be_signalled)
    runner = pipeline(2, 2, max_epochs=1, plugins=[Requeueing()], default_root_dir=folder)
    return in_slurm(model, runner, run)


def test_a_requeue_saves_the_same_batch_of_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    last, first = processes.each(2, preempted, tmp_path, folder=tmp_path)
    assert last == (8, ["requeue"])
    assert first == (8, [])
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert 2 <= saved["global_step"] < 8
    assert saved["state_dict"].keys() == MLP().state_dict().keys()
    assert not any(value.is_meta for value in saved["state_dict"].values())


@pytest.mark.parametrize("run", ["validate", "predict"])
def test_a_requeue_saves_all_weights_during_an_evaluation(run: str, tmp_path: Path) -> None:
    assert processes.each(2, preempted, tmp_path, run, folder=tmp_path) == [(0, ["requeue"]), (0, [])]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert not any(value.is_meta for value in saved["state_dict"].values())


class Interrupted(MLP):
    """Gets a signal in the midst of its second step."""

    def forward(self, x: Tensor) -> Tensor:
        if self.trainer.training and self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)


def interrupted(folder: Path) -> tuple[int, list[str]]:
    return in_slurm(Interrupted(), pipeline(2, max_epochs=1, plugins=[Requeueing()], default_root_dir=folder))


def test_a_requeue_in_the_midst_of_a_step_saves_behind_its_batch(tmp_path: Path) -> None:
    assert processes.everywhere(1, interrupted, tmp_path, folder=tmp_path) == [(8, ["requeue"])]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 2


# -- many trainers in the same processes, and many iterations, need no more than a few -------------------------------


FILES = 256


@pytest.mark.slow
def test_memory_is_flat_under_the_default_launcher_and_a_limit_of_files(tmp_path: Path) -> None:
    printed = run(
        tmp_path, ROOT / "benchmarks" / "soak.py", "--trainers", "10", "--iterations", "500", "--files", str(FILES)
    )
    found: dict[str, list[list[float]]] = defaultdict(list)
    for rank, kind, *numbers in re.findall(
        r"rank (\d), (\w+) \d+: (\d+) threads, (\d+) files, (\d+) listening, ([\d.]+) MiB", printed
    ):
        found[f"{rank} {kind}"].append([float(number) for number in numbers])
    assert {key: len(lines) for key, lines in found.items()} == {
        "0 trainer": 10, "1 trainer": 10, "0 iteration": 10, "1 iteration": 10,
    }  # fmt: skip
    for key, lines in found.items():
        assert {line[2] for line in lines} == {2 if key[0] == "0" else 1}  # gloo's, and on rank 0 that of the store
        for position, first in ((0, 2), (1, 4)):  # threads, files
            assert max(line[position] for line in lines[first:]) <= max(line[position] for line in lines[:first])
        assert lines[-1][3] - lines[4][3] < 5  # MiB
