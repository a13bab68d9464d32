"""A group dies, is started anew and comes back: what happens to it, and what must come of it."""

from __future__ import annotations

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

from tests import processes
from tests.elastic.models import Models, assert_equal
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
        goes_on: whether training ends when no group has come back for so many epochs.
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

    @property
    def world_size(self) -> int:
        return self.size * self.groups

    def group(self, number: int) -> list[int]:
        """The ranks of a group."""
        return list(range(self.size * number, self.size * (number + 1)))


class Returning(Mortal):
    """May also die while it joins, has a schedule, and is of a rate that callbacks can see."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.happens["here"] and self.happens["at"].phase == JOINS:
            self.happens["at"] = replace(self.happens["at"], phase="between")
            (self.happens["folder"] / "joining").touch()
            self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 99
            self.reach("between")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        plateau = {"scheduler": scheduler, "monitor": "val_loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": plateau} if self.watches else optimizer

    watches = True


class Ending(L.Callback):
    """Training ends some epochs after all groups are there again, of which some were not."""

    def __init__(self, groups: int, missed: bool) -> None:
        self.groups = groups
        self.missed = missed
        self.count = 0

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        there = trainer.strategy.num_groups  # type: ignore[attr-defined]
        self.missed |= there < self.groups
        self.count = self.count + 1 if self.missed and there == self.groups else 0
        trainer.should_stop = self.count == AFTER


def train(rank: int, folder: Path, death: Death, plan: Plan, anew: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(death.seed)
    model, noted, models = Returning(), Noted(), Models()
    model.watches = plan.validates
    model.arm(death, rank, folder)
    options = {
        "num_pipelines": plan.pipelines, "num_microbatches": 2, "min_groups": 1,
        "timeout": timedelta(seconds=plan.timeout_s), **dict(plan.strategy),
    }  # fmt: skip
    saving = ModelCheckpoint(
        folder.parent / "saved", filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )
    callbacks = [noted, models, saving, *([Ending(plan.groups, anew)] if plan.resumes is None else [])]
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
    return {
        "iterations": noted.iterations, "seen": noted.seen, "models": models.models, "reference": models.reference,
        "steps": runner.global_step, "epochs": runner.current_epoch, "leads": runner.is_global_zero,
        "warned": [str(warning.message) for warning in caught],
        "states": [state["step"].item() for state in runner.optimizers[0].state.values()],
        "metrics": {name: float(value) for name, value in runner.callback_metrics.items()},
        "folder": saving.dirpath,
    }  # fmt: skip


def start(
    folder: Path, plan: Plan, port: int, death: Death = NOBODY, group: int | None = None, after: Path | None = None
) -> list[processes.Outcome]:
    """Start all processes, or those of a group anew when a file is there; gives how they end."""
    deadline = time.monotonic() + processes.LIMIT_S
    while after is not None and not after.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    folder.mkdir()
    ranks = None if group is None else plan.group(group)
    return processes.run(
        plan.world_size, train, folder, death, plan, group is not None, folder=folder, ranks=ranks, port=port
    )


@dataclass(frozen=True)
class Story:
    """What has happened.

    Attributes:
        first: how all processes ended that were started first, by rank.
        later: those that were started anew, each time.
    """

    first: list[processes.Outcome]
    later: list[list[processes.Outcome]]


def tell(folder: Path, plan: Plan, death: Death, *lives: Death, group: int | None = None) -> Story:
    """Let all train, one die, and its group be started anew, again for each of its further lives.

    Args:
        death: the first one.
        lives: what happens to the processes that are started anew, each time.
        group: that is started anew; None: that of the process which dies.
    """
    port = processes.free_port()
    number = death.rank // plan.size if group is None else group
    with ThreadPoolExecutor(len(lives) + 1) as waiting:
        struck, later = folder / "first" / "struck", list[Future[list[processes.Outcome]]]()
        for count, life in enumerate(lives):
            anew = folder / f"anew-{count}"
            later.append(waiting.submit(start, anew, plan, port, life, number, struck))
            struck = anew / "struck"
        first = start(folder / "first", plan, port, death)
        return Story(first, [future.result() for future in later])


def again(folder: Path, plan: Plan, epoch: int, epochs: int) -> list[dict[str, Any]]:
    """All groups train from the checkpoint of an epoch on, as a run that nothing happens to."""
    resumes = folder / "saved" / f"epoch={epoch}.ckpt"
    other = folder / "other"
    other.mkdir()
    whole = replace(plan, resumes=resumes, epochs=epochs)
    return processes.results(start(other / "run", whole, processes.free_port()))


def check_alike(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """The same weights of all models and of the reference, on each process those that it holds."""
    for one, other in zip(found, expected, strict=True):
        assert one["steps"] == other["steps"]
        held = {name for name, tensor in one["reference"].items() if not tensor.is_meta}
        assert held
        for mine, theirs in zip([one["reference"], *one["models"]], [other["reference"], *other["models"]], strict=True):
            assert_equal({name: mine[name] for name in held}, {name: theirs[name] for name in held})


def check_data(found: Sequence[dict[str, Any]], epoch: int) -> None:
    """In this epoch all groups together have had each sample once."""
    seen = [x for process in found for row in process["seen"] if row[0] == epoch for x in row[1:]]
    assert len(seen) == len(set(seen)) == SAMPLES
