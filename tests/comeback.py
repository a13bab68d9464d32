"""A group dies, is started anew and comes back: what happens to it, and what must come of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests import processes
from tests.elastic.models import OPTIMIZERS, Models, assert_equal
from tests.models import MLP, loader
from tests.survival import BATCH, SAMPLES, Death, Mortal, Noted
from tests.trainers import pipeline

JOINS = "joins"  # a phase of new processes: they have been told where the others are
NOBODY = Death(-1, "forward")
EPOCHS = 1000  # never so many: training ends some epochs after a group has come back
AFTER = 2


@dataclass(frozen=True)
class Plan:
    """A training of groups.

    Attributes:
        size: processes of each group.
        groups: how many.
        pipelines: of each group.
        validates: whether there is validation.
        trainer: options of it.
        strategy: options of it.
        shuffle: whether data come in an order of chance.
        timeout_s: of the strategy.
        resumes: the checkpoint from which all begin, with all groups.
        epochs: at most.
        until: a file; training ends with the epoch in which it is there. None: when groups have been back for a while.
        then: rank of a process that is killed in the second epoch after a group has come back.
        optimizer: name of it.
        tests: whether there is a test after training.
        plateau: whether the learning rate depends on a metric.
        beside: ranks of further processes that die.
        keeps: whether the module keeps what no checkpoint has, and saves where loggers say.
    """

    size: int = 2
    groups: int = 2
    pipelines: int = 1
    validates: bool = True
    trainer: tuple[tuple[str, Any], ...] = ()
    strategy: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 60.0
    resumes: Path | None = None
    epochs: int = EPOCHS
    until: Path | None = None
    then: int = -1
    optimizer: str = "adam"
    tests: bool = False
    plateau: bool = False
    keeps: bool = False
    beside: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.size * self.groups

    def group(self, number: int) -> list[int]:
        """The ranks of a group."""
        return list(range(self.size * number, self.size * (number + 1)))


class Returning(Mortal):
    """May also die while it joins, and has a schedule that depends on a metric."""

    plan = Plan()
    heat = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(2, nn.BatchNorm1d(8))
        self.layers.append(nn.BatchNorm1d(8))
        self.layers.append(nn.Dropout(0.3))
        self.register_buffer("noise", torch.randn(8), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.plan.keeps:
            return super().training_step(batch, batch_idx)
        self.heat = self.heat * 0.99
        return self.heat * super().training_step((batch[0] + self.noise, batch[1]), batch_idx)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        death = self.happens["at"]
        if self.happens["here"] and death.phase == JOINS:
            (self.happens["folder"] / "struck").touch()
            os.kill(os.getpid(), signal.Signals[death.signal])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.plan.optimizer](self.parameters())
        if self.plan.plateau:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.7, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.loss(batch))


class Ending(L.Callback):
    """Training ends some epochs after groups have come back."""

    def __init__(self, plan: Plan, missed: bool) -> None:
        self.plan = plan
        self.missed = missed
        self.count = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        there = trainer.strategy.num_groups  # type: ignore[attr-defined]
        if trainer.global_rank == self.plan.then and self.count and there == self.plan.groups and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        there = trainer.strategy.num_groups  # type: ignore[attr-defined]
        self.missed |= there < self.plan.groups
        back = there == self.plan.groups or (self.count and self.plan.then >= 0)
        self.count = self.count + 1 if self.missed and back else 0
        until = self.plan.until
        trainer.should_stop = self.count == AFTER if until is None else trainer.strategy.broadcast(until.exists())


def train(rank: int, folder: Path, death: Death, plan: Plan, anew: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(death.seed + anew)
    model, noted, models = Returning(), Noted(), Models()
    model.plan = plan
    model.arm(replace(death, rank=rank) if rank in plan.beside else death, rank, folder)
    options = {
        "num_pipelines": plan.pipelines, "num_microbatches": 2, "min_groups": 1,
        "timeout": timedelta(seconds=plan.timeout_s), **dict(plan.strategy),
    }  # fmt: skip
    saving = ModelCheckpoint(
        None if plan.keeps else folder.parent / "saved",
        filename="{epoch}",
        save_top_k=-1,
        every_n_epochs=1,
        save_on_train_epoch_end=True,
    )
    callbacks = [noted, models, saving, *([Ending(plan, anew)] if plan.resumes is None else [])]
    runner = pipeline(
        plan.size, plan.world_size, options, callbacks=callbacks, enable_checkpointing=True,
        **{
            "max_epochs": plan.epochs, "num_sanity_val_steps": 2, "log_every_n_steps": 1,
            "logger": CSVLogger(folder.parent, "logs", flush_logs_every_n_steps=1), **dict(plan.trainer),
        },
    )  # fmt: skip
    data = loader(MLP, SAMPLES, BATCH, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(model, data, loader(MLP, 8, 4) if plan.validates else None, ckpt_path=plan.resumes)
    tested = runner.test(model, loader(MLP, 8, 4))[0]["tested"] if plan.tests else None
    return {
        "tested": tested,
        "iterations": noted.iterations, "seen": noted.seen, "models": models.models, "reference": models.reference,
        "steps": runner.global_step, "epochs": runner.current_epoch, "leads": runner.is_global_zero,
        "warned": [str(warning.message) for warning in caught],
        "rate": runner.optimizers[0].param_groups[0]["lr"],
        "metrics": {name: float(value) for name, value in runner.callback_metrics.items()},
        "folder": saving.dirpath, "kept": (model.heat, model.noise.tolist()),
    }  # fmt: skip


def start(
    folder: Path,
    plan: Plan,
    port: int,
    death: Death = NOBODY,
    group: int | None = None,
    after: Path | None = None,
    pids: list[int] | None = None,
) -> list[processes.Outcome]:
    """Start all processes, or those of a group anew when a file is there; gives how they end."""
    deadline = time.monotonic() + processes.LIMIT_S
    while after is not None and not after.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.mkdir()
    ranks = None if group is None else plan.group(group)
    try:
        return processes.run(
            plan.world_size, train, folder, death, plan, group is not None,
            folder=folder, ranks=ranks, port=port, pids=pids, fresh=True,
        )  # fmt: skip
    finally:
        (folder / "ended").touch()


@dataclass(frozen=True)
class Story:
    """What has happened.

    Attributes:
        first: how all processes ended that were started first, by rank.
        later: those that were started anew, each time.
    """

    first: list[processes.Outcome]
    later: list[list[processes.Outcome]]


def tell(folder: Path, plan: Plan, death: Death, *lives: Death, beside: Sequence[int] = ()) -> Story:
    """Let all train, one die, and its group be started anew, again for each of its further lives.

    Args:
        death: the first one.
        lives: what happens to the processes that are started anew, each time.
        beside: ranks of processes of other groups that die in the same way; these groups are started anew once.
    """
    port, pids, later = processes.free_port(), list[int](), list[Future[list[processes.Outcome]]]()
    number = death.rank // plan.size
    with ThreadPoolExecutor(len(lives) + len(beside)) as waiting:
        struck = folder / "first" / "struck"
        for rank in beside:
            anew = folder / f"anew-of-{rank}"
            later.append(waiting.submit(start, anew, plan, port, NOBODY, rank // plan.size, struck, pids))
        for count, life in enumerate(lives):
            anew = folder / f"anew-{count}"
            later.append(waiting.submit(start, anew, plan, port, life, number, struck, pids))
            struck = anew / "struck"
        first = start(folder / "first", replace(plan, beside=tuple(beside)), port, death)
        for pid in pids:  # of processes that were stopped
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return Story(first, [future.result() for future in later])


def check(death: Death, folder: Path, plan: Plan, beside: Sequence[int] = ()) -> tuple[float, int]:
    """Let groups die and come back, and see that all train on as a run of all groups from a checkpoint does.

    Args:
        death: of a process of the last group.
        beside: ranks of processes of groups before it that die in the same way.
    Returns:
        Seconds from the death to the first step of all groups, and the epochs after it that began without some.
    """
    story = tell(folder, plan, death, NOBODY, beside=beside)
    gone = {rank // plan.size for rank in (death.rank, *beside)}
    first = [outcome for rank, outcome in enumerate(story.first) if rank // plan.size not in gone]
    found = processes.results([*first, *(outcome for outcomes in story.later for outcome in outcomes)])
    end = found[0]["epochs"]
    assert {process["epochs"] for process in found} == {end}
    for epoch in range(end - AFTER, end):
        check_data(found, epoch)
    check_reference(found, plan.size)
    check_alike(found, again(folder, plan, end - AFTER - 1, end), plan)
    struck = float((folder / "first" / "struck").read_text())
    return min(
        at for _, there, at in found[0]["iterations"] if at > struck and there == plan.groups
    ) - struck, end - AFTER - 1


def again(folder: Path, plan: Plan, epoch: int, epochs: int) -> list[dict[str, Any]]:
    """All groups train from the checkpoint of an epoch on, as a run that nothing happens to."""
    resumes = folder / "saved" / f"epoch={epoch}.ckpt"
    other = folder / "other"
    other.mkdir()
    whole = replace(plan, resumes=resumes, epochs=epochs)
    return processes.results(start(other / "run", whole, processes.free_port()))


def check_alike(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], plan: Plan) -> None:
    """The same weights of all models and of the reference, on each process those that it holds.

    Buffers too if one model was left; else those of the models that were left are not as in the reference.
    """
    names = {name for name, _ in Returning().named_parameters()}
    if plan.groups == 2 and plan.pipelines == 1:
        names |= {name for name, _ in Returning().named_buffers()}
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        pairs = zip([one["reference"], *one["models"]], [other["reference"], *other["models"]], strict=True)
        for mine, theirs in pairs:
            compared = held(mine).keys() & names
            assert compared
            assert_equal({n: mine[n] for n in compared}, {n: theirs[n] for n in compared})


def check_reference(found: Sequence[dict[str, Any]], size: int) -> None:
    """All groups have the same reference.

    Args:
        found: by rank.
        size: processes of each group.
    """
    for number, process in enumerate(found[size:]):
        assert_equal(held(process["reference"]), held(found[number % size]["reference"]))


def held(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that a process holds; buffers of others are there as well, as they were once."""
    elsewhere = {name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.is_meta}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in elsewhere}


def check_data(found: Sequence[dict[str, Any]], epoch: int) -> None:
    """In this epoch all groups together have had each sample once."""
    seen = [x for process in found for row in process["seen"] if row[0] == epoch for x in row[1:]]
    assert len(seen) == len(set(seen)) == SAMPLES
