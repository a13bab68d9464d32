"""A group dies while others train with it: when, how, and what must come of it."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from tests import processes
from tests.elastic.models import Models, assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline

BATCH, SAMPLES = 4, 48
DIES_AT = 2  # steps that are done by then
WRITES = "writing"  # a phase of rank 0 only
PHASES = ("forward", "between", "sum", "validation", "capture", "checkpoint", WRITES)


@dataclass(frozen=True)
class Death:
    """What happens to a process, and in which phase.

    Attributes:
        rank: of the process; -1 is none.
        phase: what it does: its forwards, nothing between two iterations, a sum over groups, a validation, the first
            one, for which rank 0 follows a step, the gathering of a checkpoint, or its writing, which only rank 0 does.
        signal: that it gets.
        seed: of data and weights.
    """

    rank: int
    phase: str
    signal: str = "SIGKILL"
    seed: int = 5

    @property
    def epochs(self) -> int:
        """Of training; it happens before the last one, also at the end of one."""
        return 3 if self.phase in ("capture", "checkpoint", WRITES) else 2


class Mortal(MLP):
    """A process dies."""

    def arm(self, death: Death, rank: int, folder: Path) -> None:
        self.happens = {"at": death, "here": rank == death.rank, "folder": folder}

    def reach(self, phase: str) -> None:
        death = self.happens["at"]
        if self.happens["here"] and phase == death.phase and self.trainer.global_step >= DIES_AT:
            (self.happens["folder"] / "struck").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.Signals[death.signal])
            self.happens["here"] = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reach("forward")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.reach("validation")
        self.reach("capture")
        return super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reach("between")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.reach("checkpoint")
        checkpoint["fuse"] = Fuse(self)


class Fuse:
    """A part of a checkpoint; when it is written something may happen."""

    def __init__(self, owner: Mortal) -> None:
        self.owner = owner

    def __reduce__(self) -> Any:
        self.owner.reach(WRITES)
        return OrderedDict, ()  # which any reader trusts


class Noted(L.Callback):
    """What the groups did: after each iteration, how many were left, and when."""

    def __init__(self) -> None:
        self.iterations: list[tuple[int, int, float]] = []
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.cluster.reads:  # type: ignore[attr-defined]
            self.seen.append([trainer.current_epoch, *batch[0][:, 0].tolist()])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.iterations.append((trainer.global_step, trainer.strategy.num_groups, time.monotonic()))  # type: ignore[attr-defined]


def train(rank: int, folder: Path, death: Death, groups: int, pipelines: int, timeout_s: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(death.seed)
    model, noted, models = Mortal(), Noted(), Models()
    model.arm(death, rank, folder)
    begin = ReplicaGroup.begin_sum

    def begin_sum(self: ReplicaGroup, tensors: Any) -> Any:
        model.reach("sum")
        return begin(self, tensors)

    ReplicaGroup.begin_sum = begin_sum  # type: ignore[method-assign]
    options = {
        "num_pipelines": pipelines, "num_microbatches": 2, "min_groups": 1 if groups > 1 else None,
        "timeout": timedelta(seconds=timeout_s),
    }  # fmt: skip
    saving = ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    runner = pipeline(
        2, 2 * groups, options, max_epochs=death.epochs, callbacks=[noted, models, saving], enable_checkpointing=True,
        num_sanity_val_steps=0, val_check_interval=1 if death.phase == "validation" else 1.0,
        logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1), log_every_n_steps=1,
    )  # fmt: skip
    torch.manual_seed(death.seed)
    runner.fit(model, loader(MLP, SAMPLES, BATCH), loader(MLP, 8, 4))
    return {
        "iterations": noted.iterations, "seen": noted.seen, "models": models.models, "reference": models.reference,
        "steps": runner.global_step, "loss": float(runner.callback_metrics["val_loss"]),
        "leads": runner.is_global_zero,
    }  # fmt: skip


def happen(
    death: Death,
    folder: Path,
    groups: int = 2,
    pipelines: int = 1,
    timeout_s: float = 60.0,
) -> list[processes.Outcome]:
    """Let groups of two processes train, of which one dies; gives how all of them end."""
    pids: list[int] = []
    given = folder, death, groups, pipelines, timeout_s
    with waking(death, folder, groups, pids):
        return processes.run(2 * groups, train, *given, folder=folder, pids=pids)


@contextlib.contextmanager
def waking(death: Death, folder: Path, groups: int, pids: list[int]) -> Iterator[None]:
    """Within this context a stopped process goes on when the other groups have ended."""
    others = [folder / f"outcome-{rank}.pickle" for rank in range(2 * groups) if rank // 2 != death.rank // 2]
    over = threading.Event()

    def wake() -> None:
        while not over.wait(0.1):
            if all(path.exists() for path in others):
                os.kill(pids[death.rank], signal.SIGCONT)
                return

    thread = threading.Thread(target=wake)
    if death.signal == "SIGSTOP":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def unharmed(folder: Path, groups: int, seed: int, epochs: int) -> float:
    """The loss of validation after a training in which all groups live."""
    nobody = Death(-1, "forward" if epochs == 2 else WRITES, seed=seed)
    return float(processes.results(happen(nobody, folder, groups))[0]["loss"])


def resumed(folder: Path, pipelines: int, death: Death) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The models and the reference of an unharmed run of one group, from the last checkpoint but one on."""
    models = Models()
    runner = pipeline(
        2, 1, {"num_pipelines": pipelines, "num_microbatches": 2}, max_epochs=death.epochs, callbacks=[models],
        num_sanity_val_steps=0,
    )  # fmt: skip
    model = MLP()
    torch.manual_seed(death.seed)
    samples = loader(MLP, SAMPLES, BATCH).dataset
    data = DataLoader(samples, BATCH, sampler=DistributedSampler(samples, 1, 0))  # as Lightning's of groups
    runner.fit(model, data, loader(MLP, 8, 4), ckpt_path=folder / "saved" / f"epoch={death.epochs - 2}.ckpt")
    return models.models, models.reference


def check(death: Death, folder: Path, pipelines: int = 1, timeout_s: float = 60.0) -> tuple[float, float]:
    """Let one of two groups die, and see how the other goes on.

    Returns:
        Seconds from the death to its next step, and the loss of validation at the end.
    """
    outcomes = happen(death, folder, pipelines=pipelines, timeout_s=timeout_s)
    group = death.rank // 2
    own = [o for rank, o in enumerate(outcomes) if rank // 2 == group]
    others = processes.results([o for rank, o in enumerate(outcomes) if rank // 2 != group])
    assert all(outcome.exit_code != 0 for outcome in own)
    struck = float((folder / "struck").read_text())
    one, other = others
    for found in others:
        assert found["steps"] == one["steps"]
        assert [step for step, _, _ in found["iterations"]] == list(range(1, one["steps"] + 1))
        assert {left for _, left, at in found["iterations"] if at > struck + 2 * timeout_s} <= {1}
        assert found["iterations"][-1][1] == 1
    for a, b in zip(one["models"], other["models"], strict=True):
        assert a.keys() == b.keys()
    assert [found["leads"] for found in others] == [True, False]
    check_dealt(one["seen"] or other["seen"], death, pipelines)
    check_saved(folder, death)

    # from there on it is a run of one group, bit for bit
    models, reference = resumed(folder, pipelines, death)
    for found in others:
        held = {name for name, tensor in found["reference"].items() if not tensor.is_meta}
        assert held
        assert_equal({n: found["reference"][n] for n in held}, {n: reference[n] for n in held})
        for n, model in enumerate(found["models"]):
            assert_equal({k: model[k] for k in held}, {k: models[n][k] for k in held})
    return min(at for step, left, at in one["iterations"] if at > struck and left == 1) - struck, one["loss"]


def check_dealt(seen: list[list[float]], death: Death, pipelines: int) -> None:
    """In the last epoch the group has had all samples once."""
    last = [row[1:] for row in seen if row[0] == death.epochs - 1]
    assert len(last) == SAMPLES // BATCH // pipelines
    if pipelines == 1:
        assert len({x for row in last for x in row}) == SAMPLES


def check_saved(folder: Path, death: Death) -> None:
    """There is a whole checkpoint of each epoch, nothing else beside them, and all that was logged."""
    saved = {path.name: torch.load(path, weights_only=False) for path in (folder / "saved").iterdir()}
    assert saved.keys() == {f"epoch={epoch}.ckpt" for epoch in range(death.epochs)}
    for checkpoint in saved.values():
        assert not any(value.is_meta for value in checkpoint["state_dict"].values())
        assert len(checkpoint["optimizer_states"][0]["state"]) == len(list(MLP().parameters()))
        models = checkpoint["AvgPipeStrategy"].get("ensemble", {"models": [{}], "optimizers": []})
        assert len(models["optimizers"]) == len(models["models"]) - 1  # the first one has that of the checkpoint
    logs = sorted((folder / "logs").glob("*/metrics.csv"))
    rows = [row for log in logs for row in csv.DictReader(log.open())]
    assert len(logs) == (2 if death.rank // 2 == 0 else 1)
    assert [float(row["avgpipe/groups"]) for row in rows if row.get("avgpipe/groups")] == [1.0]
    assert {int(row["epoch"]) for row in rows if row.get("val_loss")} == set(range(death.epochs))
