"""Failures: every process ends, with an error that names stage, rank and action, and what happened there."""

from __future__ import annotations

import os
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import PeerError, StageError, StepChangedError
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
    with pytest.raises(StageError, match=r"stage 1 of 2 \(rank 0\) failed in F4: ValueError: the fuse has blown"):
        engine.train(MLP.example(8))
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
    assert StageError.__name__ in outcomes[rank].error
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
        model.on_train_batch_start = lambda *_: threading.Event().wait(10)  # type: ignore[method-assign]
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
