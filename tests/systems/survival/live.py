"""A training of groups, some of whose processes die: where, and when."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_avgpipe import Survival
from tests.averaging.models import state
from tests.models import MLP, loader
from tests.systems.survival.runs import Told
from tests.trainers import pipeline

TIMEOUT_S = 20.0
SUM_S = 4.0
BATCHES = 100  # of an epoch, in each group


class Block(nn.Module):
    """A layer that may let something happen in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.then: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.then()
        return torch.tanh(self.linear(x))


class Fragile(MLP):
    """Two stages of a block each, and as many buffers that steps change."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.layers = nn.Sequential(Block(), nn.BatchNorm1d(8), Block(), nn.BatchNorm1d(8))


def strike(signum: int) -> None:
    os.kill(os.getpid(), signum)


def arm(model: Fragile, stages: int, rank: int, phase: str, at: int, signum: int) -> None:
    """Let this process get a signal in a phase of a step, once."""
    import torchft

    count = 0

    def then() -> None:
        nonlocal count
        count += 1
        if count == at:
            strike(signum)

    if phase == "forward":
        model.layers[2 * (stages - 1 - rank)].then = then
        return
    name = {"before a sum": "allreduce", "before a commit": "should_commit", "in a quorum": "start_quorum"}[phase]
    own = getattr(torchft.Manager, name)

    def struck(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if manager.current_step():  # all are there
            then()
        return own(manager, *args, **kwargs)

    setattr(torchft.Manager, name, struck)


def live(
    tell: Any,
    who: tuple[int, int, int],
    stages: int = 2,
    steps: int = 100_000,
    phase: str = "",
    at: int = 0,
    rank: int = 0,
    signum: int = signal.SIGKILL,
    saves: Path | None = None,
    per_epoch: int = BATCHES,
    **options: Any,
) -> Any:
    """Train as a group of stages, in whose process something happens in a phase, unless that is empty."""
    log, handler = logging.getLogger("lightning_avgpipe.systems.survival"), logging.StreamHandler()
    log.setLevel(logging.INFO)  # pytest shows it if a test fails
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    log.addHandler(handler)
    tell("ready")
    torch.manual_seed(who[0])
    model = Fragile()
    if phase and who[1:] == (rank, 0):
        arm(model, stages, rank, phase, at, signum)
    survival = Survival(groups=2, sum_timeout=SUM_S)
    strategy: dict[str, Any] = {"num_microbatches": 2, "system": survival, "timeout": TIMEOUT_S, **options}
    if stages > 1:
        strategy["split_points"] = ["layers.2"]
    callbacks: list[L.Callback] = [Told(tell)]
    if saves is not None:
        callbacks.append(ModelCheckpoint(saves, "{step}", every_n_train_steps=10, save_top_k=-1))
    runner = pipeline(
        stages, stages, strategy, callbacks=callbacks, max_epochs=-1, max_steps=steps,
        enable_checkpointing=saves is not None,
    )  # fmt: skip
    runner.fit(model, loader(Fragile, 2 * per_epoch * 4, 4), loader(Fragile, 8, 4))
    return {"left": state(model), "epoch": runner.current_epoch, "step": runner.global_step}
