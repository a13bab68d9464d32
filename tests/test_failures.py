"""Failures: every process ends, with an error that names stage, rank and action, and what happened there."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from torch import Tensor, nn

from lightning_avgpipe.errors import PeerError, StepChangedError
from tests import processes
from tests.engine import Engine
from tests.models import MLP, loader
from tests.trainers import pipeline


class Fuse(nn.Module):
    """Passes its input on, until it has been called for real so often."""

    def __init__(self, calls: int, action: str) -> None:
        super().__init__()
        self.calls, self.action = calls, action
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls < 0:
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the fuse has blown")
        return x * self.weight


class Fused(MLP):
    """Five layers with a fuse at one end: on stage 0, or on stage 1 of 2."""

    def __init__(self, stage: int, action: str) -> None:
        super().__init__()
        self.fuse, self.stage = Fuse(4, action), stage

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 0:
            return self.layers(self.fuse(x))
        return self.fuse(self.layers(x))


def test_an_error_in_user_code_names_stage_and_action() -> None:
    model = Fused(1, "raise")
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    engine = Engine(model, 2, MLP.example(8), num_microbatches=8)
    with pytest.raises(ValueError, match="the fuse has blown") as caught:
        engine.train(MLP.example(8))
    assert caught.value.__notes__ == ["stage 1 of 2 (rank 0) failed in F4"]
    model.fuse.calls = 100
    engine.train(MLP.example(8))  # and nothing of the failed iteration is left


def fit(rank: int, stage: int, action: str, where: str) -> None:
    torch.set_num_threads(1)
    if where == "step":
        model: MLP = Fused(stage, action)
    else:
        model = MLP()

        def fail(*_: Any) -> None:
            if rank == 1 - stage:
                raise ValueError("the fuse has blown")

        setattr(model, where, fail)
    runner = pipeline(2, 2, {"timeout": timedelta(seconds=20)}, max_epochs=2)
    runner.fit(model, loader(MLP, 64, 8))


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_on_one_stage_ends_all_ranks_with_the_original_traceback(stage: int, tmp_path: Path) -> None:
    outcomes = processes.run(2, fit, stage, "raise", "step", folder=tmp_path)
    rank = 1 - stage
    for outcome in outcomes:
        assert outcome.error is not None
        assert f"stage {stage} of 2 (rank {rank}) failed in F" in outcome.error
        assert "ValueError: the fuse has blown" in outcome.error
        assert "in forward" in outcome.error
    assert re.search(
        rf"PeerError: rank {rank} \(stage {stage}\), which runs F\d of stage {stage}, failed", outcomes[1 - rank].error
    )


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_start", "on_before_optimizer_step"])
def test_an_error_in_a_hook_of_one_rank_ends_all_ranks(hook: str, tmp_path: Path) -> None:
    for outcome in processes.run(2, fit, 0, "raise", hook, folder=tmp_path):
        assert outcome.error is not None
        assert "ValueError: the fuse has blown" in outcome.error


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_rank_ends_the_other_with_an_error(stage: int, tmp_path: Path) -> None:
    outcomes = processes.run(2, fit, stage, "kill", "step", folder=tmp_path)
    killed, survivor = outcomes[1 - stage], outcomes[stage]
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is not None
    assert PeerError.__name__ in survivor.error


def silent(rank: int) -> str:
    torch.set_num_threads(1)
    model = MLP()
    if rank == 1:
        model.on_train_batch_start = lambda _, i: threading.Event().wait(10 * i)  # type: ignore[method-assign]
    runner = pipeline(2, 2, {"timeout": timedelta(seconds=3)}, max_epochs=1)
    try:
        runner.fit(model, loader(MLP, 16, 8))
    except PeerError as error:
        return str(error)
    return "nothing happened"


def test_a_silent_rank_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    message = processes.run(2, silent, folder=tmp_path)[0].result
    assert "rank 0 (stage 1) waits for the input of F0 on stage 1, and nothing arrived for 3 s" in message
    assert "raise timeout=" in message
    assert re.search(r"rank 1 \(stage 0\) is not in a step \(at test_failures.py:\d+ in <lambda>", message)


def test_a_step_that_changes_says_where() -> None:
    class Fickle(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if self.skip:
                return self.layers[2:](x)
            return self.layers(x)

    model = Fickle(depth=3)
    model.skip = False
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    engine = Engine(model, 2, MLP.example(8))
    model.skip = True
    with pytest.raises(StepChangedError, match=r"unit 'layers\.0' at test_failures.py:[0-9]+ in forward then, it"):
        engine.train(MLP.example(8))


class Requeueing(LightningEnvironment, SLURMEnvironment):
    """Processes as a launcher gives them, and the signals of SLURM."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR1


def preempted(rank: int, folder: Path) -> tuple[int, list[str]]:
    """SLURM sends its signal to all processes, which get it wherever they are."""
    torch.set_num_threads(1)
    called: list[str] = []
    signal_connector.call = lambda command: called.append(command[1]) or 0  # type: ignore[attr-defined]
    os.environ["SLURM_JOB_ID"] = "7"
    model = MLP()

    def be_signalled(batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        requests = runner.strategy.mesh.watch.requests
        deadline = time.monotonic() + 20
        while batch_idx == 3 and rank == 0 and not requests:  # so that the signal comes before the end
            assert time.monotonic() < deadline
            time.sleep(0.05)

    model.on_train_batch_start = be_signalled  # type: ignore[method-assign]
    runner = pipeline(2, 2, max_epochs=1, plugins=[Requeueing()], default_root_dir=folder)
    runner.fit(model, loader(MLP, 32, 4))
    return runner.global_step, called


def test_a_requeue_saves_the_same_batch_of_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    last, first = processes.results(processes.run(2, preempted, tmp_path, folder=tmp_path))
    assert last == (8, ["requeue"])
    assert first == (8, [])
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert 2 <= saved["global_step"] < 8
    assert saved["state_dict"].keys() == MLP().state_dict().keys()
    assert not any(value.is_meta for value in saved["state_dict"].values())


COLLECTIVES = ("barrier", "broadcast", "broadcast_object_list", "all_reduce", "all_gather", "gather_object")


def watched(rank: int) -> list[str]:
    """The collectives that a rank takes part in while it trains, after the plan is made."""
    torch.set_num_threads(1)
    called: list[str] = []
    model = MLP()
    for name in COLLECTIVES:
        collective = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _collective: Any = collective, **kwargs: Any) -> Any:
            called.append(_name)
            return _collective(*args, **kwargs)

        setattr(dist, name, counted)
    during: list[str] = []
    model.on_train_batch_start = lambda _, i: called.clear() if i == 1 else None  # type: ignore[method-assign]
    model.on_train_end = lambda: during.extend(called)  # type: ignore[method-assign]
    pipeline(2, 2, max_epochs=2, num_sanity_val_steps=0).fit(model, loader(MLP, 32, 8))
    assert called, "the collectives of the tear-down are seen"
    return during


def test_no_batch_waits_for_a_collective_of_all_processes(tmp_path: Path) -> None:
    assert processes.results(processes.run(2, watched, folder=tmp_path)) == [[], []]
