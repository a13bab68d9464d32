"""The failure matrix: whatever happens to one process of three, at any point, all end, and say what happened where."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from tests import processes
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline

KINDS = ("exception", "SIGKILL", "SIGTERM", "SIGINT", "stall")
STAGES = {"first": 0, "middle": 1, "last": 2}
# what is going on -> how the errors name it: the action, or the user's function
MOMENTS = {
    "set-up": "in configure_model",
    "forward": r"runs F\d of stage {stage}",
    "backward": r"runs B\d of stage {stage}",
    "optimizer step": "in before_step",
    "validation": r"runs F\d of stage {stage}|follows a step to divide it",  # the first one is followed on rank 0
    "saving": "in on_save_checkpoint",
}
LIMIT_S = 30.0  # from the failure to the end of all other processes
STALL_TIMEOUT_S = 5  # the strategy's timeout where it has to pass


@dataclass(frozen=True)
class Cell:
    """What happens, on which stage, and while it does what."""

    kind: str
    stage: int
    moment: str

    @property
    def rank(self) -> int:
        """The process of the stage."""
        return 2 - self.stage

    @property
    def name(self) -> str:
        """The process as errors name it."""
        return rf"rank {self.rank} \(stage {self.stage}\)"

    @property
    def saves(self) -> bool:
        """Lightning reacts to SIGTERM between batches; before training it is what it is for any program."""
        return self.kind == "SIGTERM" and self.moment != "set-up"

    @property
    def kills(self) -> bool:
        """Whether the process has no last words."""
        return self.kind == "SIGKILL" or (self.kind == "SIGTERM" and self.moment == "set-up")

    def strike(self, folder: Path) -> None:
        """Let it happen, once."""
        try:
            (folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        (folder / "struck").write_text(str(time.monotonic()))
        if self.kind == "exception":
            raise ValueError("the fuse has blown")
        if self.kind == "stall":
            time.sleep(2 * LIMIT_S)
        else:
            os.kill(os.getpid(), signal.Signals[self.kind])


class Delayed(torch.autograd.Function):
    """Does something in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Any) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.then()
        return gradient, None


class Block(nn.Module):
    """A stage's layer, which tells the module when it runs."""

    def __init__(self, stage: int, owner: Faulty) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.stage = stage
        self.owner = (owner,)  # in a tuple: not as a submodule

    def forward(self, x: Tensor) -> Tensor:
        owner, stage = self.owner[0], self.stage
        owner.happens("forward" if owner.trainer.training else "validation", stage)
        return Delayed.apply(torch.tanh(self.linear(x)), lambda: owner.happens("backward", stage))


class Faulty(Regression):
    """Three blocks, and every moment of a training is announced."""

    def __init__(self, cell: Cell, rank: int, folder: Path) -> None:
        super().__init__()
        self.cell, self.rank, self.folder = cell, rank, folder
        self.blocks = nn.ModuleList(Block(stage, self) for stage in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def happens(self, moment: str, stage: int | None = None) -> None:
        cell = self.cell
        if moment != cell.moment or self.rank != cell.rank or stage not in (None, cell.stage):
            return
        if moment == "set-up" or self.trainer.global_step >= 1:
            cell.strike(self.folder)

    def configure_model(self) -> None:
        self.happens("set-up")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)

        def before_step(*_: Any) -> None:
            self.happens("optimizer step")

        optimizer.register_step_pre_hook(before_step)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.happens("saving")


def train(rank: int, cell: Cell, folder: Path) -> None:
    os.setsid()  # so that whoever descends from this process can be found, also when it is gone
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    torch.set_num_threads(1)
    model = Faulty(cell, rank, folder)
    options = {
        "timeout": timedelta(seconds=STALL_TIMEOUT_S if cell.kind == "stall" else 60),
        "num_microbatches": 2,
        "split_points": ["blocks.1", "blocks.2"],
    }
    runner = pipeline(
        3, 3, options, max_epochs=3, val_check_interval=2, num_sanity_val_steps=0, enable_checkpointing=True,
        callbacks=[OnExceptionCheckpoint(folder), ModelCheckpoint(folder / "regular", every_n_train_steps=3)],
    )  # fmt: skip
    try:
        runner.fit(model, loader(MLP, 24, 4), loader(MLP, 12, 4))
    finally:
        (folder / f"step-{rank}").write_text(str(runner.global_step))


def sessions() -> set[int]:
    """The sessions of all processes."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(os.getsid(process.pid))
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def check(cell: Cell, folder: Path) -> None:
    """Let it happen, and see how all processes end."""
    pids: list[int] = []
    outcomes = processes.run(3, train, cell, folder, folder=folder, pids=pids)
    struck = float((folder / "struck").read_text())
    assert not sessions() & set(pids), "processes are left behind"
    victim, others = outcomes[cell.rank], [o for rank, o in enumerate(outcomes) if rank != cell.rank]
    for outcome in outcomes:
        assert outcome.threads == []
        if outcome.error is not None:
            assert outcome.ended - struck < LIMIT_S
    if cell.saves:
        check_saved(outcomes, folder)
        return

    assert not (folder / "on_exception.ckpt").exists(), "what is saved after a failure cannot be whole"
    where = MOMENTS[cell.moment].format(stage=cell.stage)
    for outcome in others:
        assert outcome.exit_code == 1
        assert outcome.error is not None
        assert "PeerError" in outcome.error
        assert re.search(r"which (runs|waits for) |rank \d \(stage \d\) waits for ", outcome.error), outcome.error
        if cell.kills:
            gone = rf"rank {cell.rank} broke|{cell.name} (is gone|does not answer)"
            assert re.search(gone, outcome.error), outcome.error
            continue
        assert re.search(cell.name, outcome.error), outcome.error
        assert re.search(where, outcome.error), outcome.error
        assert "in strike" in outcome.error
    if cell.kind == "exception":
        assert victim.exit_code == 1
        assert victim.error is not None and "ValueError: the fuse has blown" in victim.error
        assert all("ValueError: the fuse has blown" in (outcome.error or "") for outcome in others)
    elif cell.kind == "SIGINT":
        assert victim.exit_code == 1  # as Lightning ends after Ctrl+C
        assert all("KeyboardInterrupt" in (outcome.error or "") for outcome in others)
    elif cell.kind == "stall":
        assert victim.exit_code == 1  # ended by its watch
        assert victim.error is None
        assert all("and nothing arrived for" in (outcome.error or "") for outcome in others)
    else:
        assert victim.exit_code == -signal.Signals[cell.kind]


def check_saved(outcomes: list[processes.Outcome], folder: Path) -> None:
    """After SIGTERM all processes end at the same batch, with the status that Lightning gives, and all is saved."""
    for outcome in outcomes:
        assert outcome.exit_code == 0
        assert outcome.error is not None and "SIGTERMException" in outcome.error
    steps = {int((folder / f"step-{rank}").read_text()) for rank in range(3)}
    assert len(steps) == 1
    saved = torch.load(folder / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == steps.pop()
    assert len(saved["state_dict"]) == 6
    assert not any(value.is_meta for value in saved["state_dict"].values())


USUAL = [
    ("exception", "middle", "forward"), ("exception", "last", "set-up"), ("exception", "first", "saving"),
    ("SIGKILL", "last", "backward"), ("SIGKILL", "middle", "set-up"), ("SIGKILL", "first", "validation"),
    ("SIGTERM", "first", "backward"), ("SIGTERM", "middle", "validation"), ("SIGTERM", "last", "saving"),
    ("SIGINT", "middle", "optimizer step"), ("stall", "first", "forward"), ("stall", "middle", "saving"),
]  # fmt: skip
ALL = [(kind, stage, moment) for kind in KINDS for stage in STAGES for moment in MOMENTS]


@pytest.mark.parametrize(
    ("kind", "stage", "moment"),
    [pytest.param(*cell, marks=() if cell in USUAL else pytest.mark.slow, id="-".join(cell)) for cell in ALL],
)
def test_a_failure_of_one_process_ends_all(kind: str, stage: str, moment: str, tmp_path: Path) -> None:
    check(Cell(kind, STAGES[stage], moment), tmp_path)
