"""Faults: what may happen to one of three processes, while it does what, and how all of them must end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Edge, Route
from tests import processes
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline

# what is going on -> how an error names it: what the process does, or the user's function
PHASES = {
    "connecting": "which waits for the other processes to connect, failed",
    "set-up": "in configure_model",
    "capture": "which follows a step to divide it into stages, failed",
    "first iteration": r"which runs F\d of stage {stage}, failed",
    "forward": r"which runs F\d of stage {stage}, failed",
    "backward": r"which runs B\d of stage {stage}, failed",
    "averaging": "in on_averaging",
    "validation": r"which (runs F\d of stage {stage}|follows a step to divide it into stages), failed",
    "checkpoint": "in on_save_checkpoint",
    "reconfigure": "which waits for the other processes to connect pipeline 1, failed",
}
KINDS = ("raise", "SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT", "stall")
STAGES = {"first": 0, "middle": 1, "last": 2}
ENDING_S = 12.0  # from when a fault can be known to the end of all other processes, on a busy machine
GONE_S = 3.0  # from the end of the processes to that of their children, on a busy machine
TIMEOUT_S = 8.0  # the strategy's, where it has to pass
TIMED_OUT = f"and nothing arrived for {TIMEOUT_S:g} s"
_UNTOUCHED = ("connecting", "set-up")  # before Lightning takes care of signals


@dataclass(frozen=True)
class Fault:
    """What happens to the process of a stage, and in which phase."""

    kind: str
    stage: int
    phase: str

    @property
    def rank(self) -> int:
        """The process of the stage."""
        return 2 - self.stage

    @property
    def name(self) -> str:
        """The process as errors name it."""
        return rf"rank {self.rank} \(stage {self.stage}\)"

    @property
    def by(self) -> int:
        """The process that lets it happen: only rank 0 follows steps."""
        return 0 if self.phase == "capture" else self.rank

    @property
    def ends_at_a_batch(self) -> bool:
        """Lightning reacts to SIGTERM between batches; before training it is what it is for any program."""
        return self.kind == "SIGTERM" and self.phase not in _UNTOUCHED

    @property
    def dies(self) -> bool:
        """Whether the process has no last words."""
        return self.kind == "SIGKILL" or (self.kind == "SIGTERM" and self.phase in _UNTOUCHED)

    @property
    def is_silent(self) -> bool:
        """Whether only the timeout can tell."""
        return self.kind in ("SIGSTOP", "stall")

    @property
    def timeout_s(self) -> float:
        """The strategy's. What is killed breaks connections, but for those that are being made."""
        return TIMEOUT_S if self.is_silent or self.dies else 60.0

    @property
    def waiting(self) -> set[str]:
        """Threads that may be left: calls into torch that nobody can interrupt."""
        names = {"avgpipe board"} if self.kind == "SIGSTOP" and self.rank == 0 else set()
        if self.phase in ("connecting", "reconfigure"):
            names.add("avgpipe collective")
        return names

    def strike(self, folder: Path) -> None:
        """Let it happen, once."""
        try:
            (folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        (folder / "struck").write_text(str(time.monotonic()))
        if self.kind == "raise":
            raise ValueError("the fuse has blown")
        if self.kind == "stall":
            time.sleep(100)
        else:
            os.kill(int((folder / f"pid-{self.rank}").read_text()), signal.Signals[self.kind])


# -- a training in which it happens ----------------------------------------------------------------------------------


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
        owner.runs(stage)
        return Delayed.apply(torch.tanh(self.linear(x)), lambda: owner.happens("backward", stage))


class Faulty(Regression):
    """Three blocks, and every phase of a training is announced."""

    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        super().__init__()
        self.fault, self.rank, self.folder = fault, rank, folder
        self.averagings = 0
        self.blocks = nn.ModuleList(Block(stage, self) for stage in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def happens(self, phase: str, stage: int | None = None, after: int = 1) -> None:
        fault = self.fault
        meant = phase == fault.phase and self.rank == fault.by and stage in (None, fault.stage)
        if meant and (after == 0 or self.trainer.global_step >= after):
            fault.strike(self.folder)

    def runs(self, stage: int) -> None:
        if not self.trainer.training:
            self.happens("validation", stage)
        elif self.trainer.strategy.plan is None:
            self.happens("capture", after=0)
        else:
            self.happens("forward", stage)
            self.happens("first iteration", stage, after=0)

    def configure_model(self) -> None:
        self.happens("set-up", after=0)

    def on_averaging(self, *_: Any) -> None:
        self.averagings += 1
        if self.averagings > 2:  # the strategy tries the optimizer before there is a trainer
            self.happens("averaging", after=0)

    def outer(self, parameters: Any) -> torch.optim.Optimizer:
        """An optimizer of the reference model, which tells of its steps."""
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        optimizer.register_step_pre_hook(self.on_averaging)
        return optimizer


class Saving(Callback):
    """A hook that every process runs, where that of a module is one of rank 0."""

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        pl_module.happens("checkpoint")


def train(rank: int, fault: Fault, folder: Path) -> None:
    os.setsid()  # so that whoever descends from this process can be found, also when it is gone
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    model = Faulty(fault, rank, folder)
    announce_connections(model)
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=fault.timeout_s),
        "num_microbatches": 2,
        "split_points": ["blocks.1", "blocks.2"],
    }
    regular = ModelCheckpoint(folder / "regular", every_n_train_steps=3)
    callbacks = [Saving(), OnExceptionCheckpoint(folder), regular]
    if fault.phase == "averaging":
        options |= {"num_pipelines": 2, "averaging": Averaging(outer_optimizer=model.outer)}
    if fault.phase == "reconfigure":
        callbacks.append(LambdaCallback(on_train_batch_end=reconfigured))
    runner = pipeline(
        3, 3, options, max_epochs=3, val_check_interval=2, num_sanity_val_steps=0, enable_checkpointing=True,
        callbacks=callbacks,
    )  # fmt: skip
    try:
        runner.fit(model, loader(MLP, 48, 4), loader(MLP, 12, 4))
    finally:
        (folder / f"step-{rank}").write_text(str(runner.global_step))


def announce_connections(model: Faulty) -> None:
    """Tell the module when connections are made, at the start or for another pipeline."""
    connect = ProcessGroups.connect

    def announced(self: ProcessGroups, route: Route) -> None:
        widened = isinstance(route.what, Edge) and route.what.pipeline == 1
        model.happens("reconfigure" if widened else "connecting", after=0)
        connect(self, route)

    ProcessGroups.connect = announced  # type: ignore[method-assign]


def reconfigured(trainer: L.Trainer, *_: Any) -> None:
    if trainer.global_step == 3:
        trainer.strategy.reconfigure(num_pipelines=2)  # type: ignore[attr-defined]


# -- what must come of it --------------------------------------------------------------------------------------------


def check(fault: Fault, folder: Path) -> None:
    """Let it happen, and see how all processes end."""
    pids: list[int] = []
    over = threading.Event()
    waking = threading.Thread(target=partial(wake, fault, folder, over))
    waking.start()
    try:
        outcomes = processes.run(3, train, fault, folder, folder=folder, pids=pids)
    finally:
        over.set()
        waking.join(GONE_S)
    # a child that is killed with its parent takes a moment
    processes.until(lambda: not sessions() & set(pids), f"the end of the children of processes {pids}", GONE_S)
    check_saved(folder)
    victim, others = outcomes[fault.rank], [o for rank, o in enumerate(outcomes) if rank != fault.rank]
    assert (folder / "struck").exists(), f"ended before it happened: {[outcome.error for outcome in outcomes]}"
    struck = float((folder / "struck").read_text())
    for outcome in others:
        known = fault.timeout_s if fault.timeout_s == TIMEOUT_S else 0.0
        assert set(outcome.threads) <= fault.waiting, outcome.threads
        assert fault.ends_at_a_batch or outcome.ended - struck < known + ENDING_S
    if fault.ends_at_a_batch:
        check_stopped(fault, outcomes, folder)
        return

    assert not (folder / "on_exception.ckpt").exists(), "what is saved after a failure cannot be whole"
    for outcome in others:
        check_told(fault, outcome)
    if fault.is_silent:
        assert any(TIMED_OUT in str(outcome.error) for outcome in others)
    check_victim(fault, victim)


def check_told(fault: Fault, outcome: processes.Outcome) -> None:
    """Another process ends with an error that names who, and where, and what."""
    error = outcome.error
    assert outcome.exit_code == 1
    assert error is not None and "PeerError" in error
    if fault.dies:
        gone = rf"rank {fault.rank} broke|{fault.name} (is gone|does not answer)"
        assert re.search(gone, error), error
        assert re.search(r"which (runs|waits for) |rank \d \(stage \d\) waits for ", error), error
    elif fault.kind == "SIGSTOP":
        silent = rf"{fault.name}(, which keeps the store of all processes, has not answered| does not answer)"
        assert re.search(silent, error), error
        # while the keeper of the store is stopped, whoever gives up first cannot tell the other one
        assert re.search(rf"{TIMED_OUT}|but (the|a) connection .*broke" if fault.rank == 0 else TIMED_OUT, error), error
    elif fault.kind == "stall":
        assert re.search(rf"{fault.name} .*in strike", error), error
        assert re.search(TIMED_OUT, error), error
    else:
        what = {"raise": "ValueError: the fuse has blown", "SIGINT": "KeyboardInterrupt"}[fault.kind]
        where = PHASES[fault.phase].format(stage=fault.stage)
        assert all(re.search(text, error) for text in (fault.name, what, where, "in strike")), error


def check_victim(fault: Fault, victim: processes.Outcome) -> None:
    """It does not end well either, if it can end at all."""
    if fault.dies:
        assert victim.exit_code == -signal.Signals[fault.kind]
    elif fault.kind == "stall":
        assert victim.exit_code == 1 and victim.error is None  # ended by its watch
    else:
        assert victim.exit_code == 1
        own = {"raise": "ValueError: the fuse has blown", "SIGINT": "", "SIGSTOP": "PeerError"}[fault.kind]
        assert victim.error is not None and own in victim.error


def check_stopped(fault: Fault, outcomes: list[processes.Outcome], folder: Path) -> None:
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


def check_saved(folder: Path) -> None:
    """Whatever has the name of a checkpoint is one."""
    for path in folder.rglob("*.ckpt"):
        assert len(torch.load(path, weights_only=False)["state_dict"]) == 6


def wake(fault: Fault, folder: Path, over: threading.Event) -> None:
    """Let a stopped process go on when the others have ended; whatever it does then, it must end too."""
    others = [folder / f"outcome-{rank}.pickle" for rank in range(3) if rank != fault.rank]
    while fault.kind == "SIGSTOP" and not over.wait(0.1):
        if all(path.exists() for path in others):
            os.kill(int((folder / f"pid-{fault.rank}").read_text()), signal.SIGCONT)
            return


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
