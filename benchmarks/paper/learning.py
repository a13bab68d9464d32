"""Measure how well each system learns: its metric on validation data, epoch by epoch, trained in one process.

What a run computes depends neither on links nor on where its stages are, so one training stands for all links. Up to
dropout and rounding, ddp and all pipelines that drain compute the same gradients of a batch, so one training stands for
all of them.

Plain training ends when it has what makes it the target, all others when they have reached that (``report.py``).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks.harness import be_quiet, quiet_trainer
from benchmarks.paper.settings import MICROBATCHES
from benchmarks.paper.timing import OURS
from benchmarks.paper.workloads import Workload, workloads
from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.errors import AvgPipeError

__all__ = ["OUTER_LR", "REACHED_AFTER", "SYNCHRONOUS", "algorithm_of", "train"]

SYNCHRONOUS = "synchronous"
REACHED_AFTER = 2 / 3  # of its epochs: what plain training has then is the target
CHECKS = 4  # in an epoch
OUTER_LR = ", outer_lr="


def algorithm_of(system: str) -> str:
    """What a system computes: "synchronous", "pipedream", "2bw", or parallel models "N=2", "N=2 rolling split" ..

    Trainings with another ``outer_lr`` than the default are ``f"{algorithm}{OUTER_LR}1.41"``.
    """
    if system.startswith("avgpipe"):
        _, _, models, _, *how = system.partition(" replicas=")[0].split()
        return SYNCHRONOUS if models == "N=1" else " ".join([models, *how])
    return system if system in ("pipedream", "2bw") else SYNCHRONOUS


class _Curve(L.Callback):
    """Epochs and metric after each validation, until it is enough."""

    def __init__(self, workload: Workload, epochs: float, target: float | None) -> None:
        self.workload, self.epochs, self.target = workload, epochs, target
        self.points: list[tuple[float, float]] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        epoch, value = (len(self.points) + 1) / CHECKS, float(trainer.callback_metrics[self.workload.metric])
        self.points.append((epoch, value))
        reached = self.target is not None and self.workload.better(value, self.target)
        trainer.should_stop = reached or epoch >= self.epochs


def train(
    name: str, algorithm: str, seed: int, folder: Path, epochs: int, target: float | None, devices: int
) -> dict[str, Any]:
    """``curve``: pairs of epochs and metric; ``batches``: of an epoch; ``epochs``: for which its learning rates are.

    Or ``refused``: why it cannot be.

    Args:
        name: of a workload.
        algorithm: of ``algorithm_of``.
        seed: of everything.
        folder: of the data.
        epochs: at most.
        target: metric at which it ends; None: plain training, which ends after ``REACHED_AFTER`` of the epochs.
        devices: number of stages.
    """
    be_quiet()
    L.seed_everything(seed, verbose=False)
    kind, _, outer_lr = algorithm.partition(OUTER_LR)
    workload, how = workloads(devices)[name], kind.split()
    models = int(how[0][2:]) if kind.startswith("N=") else 1
    averaging = Averaging(
        rolling="rolling" in how, split_batches="split" in how, outer_lr=float(outer_lr) if outer_lr else "auto"
    )
    batches = 1 if averaging.split_batches else models  # of a step
    data = workload.data(folder, workload.batch_size, batches)
    curve = _Curve(workload, epochs * REACHED_AFTER if target is None else epochs, target)
    strategy: Any = "auto"
    if algorithm != SYNCHRONOUS:
        strategy = AvgPipeStrategy(
            num_stages=devices, num_microbatches=MICROBATCHES, num_pipelines=models, costs="flops",
            averaging=averaging, **workload.options, **OURS.get(kind, {}),
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        trainer = quiet_trainer(
            strategy=strategy, devices=1, max_epochs=epochs, val_check_interval=1 / CHECKS,
            gradient_clip_val=workload.clip, num_sanity_val_steps=0, callbacks=[curve], default_root_dir=made,
        )  # fmt: skip
        try:
            trainer.fit(workload.module(batches), data)
        except AvgPipeError as error:
            return {"refused": str(error).split("\n")[0]}
    return {"curve": curve.points, "batches": int(trainer.num_training_batches) * batches, "epochs": epochs}


def begun_before(ends: float, *arguments: Any) -> dict[str, Any] | None:
    """Train as :func:`train` does; return None if it is later than ``ends``, a value of ``time.monotonic``."""
    return None if time.monotonic() > ends else train(*arguments)
