"""The three workloads: the examples' models and data, unchanged, on a part of their corpora."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import awd_lstm  # noqa: E402
import bert  # noqa: E402
import corpora  # noqa: E402
import gnmt  # noqa: E402

__all__ = ["WORKLOADS", "Workload", "prepare", "workloads"]

HELD_OUT = 10  # one line of validation for so many of training


@dataclass(frozen=True)
class Workload:
    """A training.

    Attributes:
        corpus: of ``examples/corpora.py``; "": the sources of Python's standard library.
        metric: that validation logs.
        goal: whether it falls or rises: "min" or "max".
        batch_size: B; of ``awd_lstm`` streams.
        line_factor: lines of its files for each one that is asked for.
        clip: largest norm of the gradient; None: not clipped.
        options: of the strategy.
        copies: of the weights in a model with gradients and optimizer states.
        module: makes the LightningModule for so many parallel models.
        data: makes the LightningDataModule from a folder, a batch size, and a number of parallel models.
        optimizer: of parameters, without a trainer; as the module's.
        devices: number of processes, and of stages of a pipeline.
        slowness: how many times as slow as a core each device is, see ``slowed.py``.
    """

    name: str
    corpus: str
    metric: str
    goal: str
    batch_size: int
    line_factor: float
    clip: float | None
    copies: int
    module: Callable[[int], L.LightningModule]
    data: Callable[[Path, int, int], L.LightningDataModule]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    slowness: float = 1.0

    def better(self, one: float, other: float) -> bool:
        """Whether a metric is at least as good as another one."""
        return one <= other if self.goal == "min" else one >= other


def _gnmt(layers: int, batch_size: int) -> Workload:
    return Workload(
        "gnmt", "debian", "val_loss", "min", batch_size, 1.0, 5.0, 4,
        lambda models: gnmt.GNMT(warmup=100, layers=layers),
        lambda folder, batch_size, models: gnmt.Sentences(folder, batch_size=batch_size),
        lambda parameters: torch.optim.Adam(parameters, 2e-3),
        {"loss_weight": "labels"},
    )  # fmt: skip


def _bert(layers: int, batch_size: int) -> Workload:
    return Workload(
        "bert", "verses", "val_accuracy", "max", batch_size, 1.0, None, 4,
        lambda models: bert.SentencePairs(layers=layers),
        lambda folder, batch_size, models: bert.Pairs(folder, batch_size=batch_size),
        lambda parameters: torch.optim.AdamW(parameters, 5e-4),
    )  # fmt: skip


def _awd_lstm(layers: int, batch_size: int) -> Workload:
    return Workload(
        "awd_lstm", "", "val_loss", "min", batch_size, 2.0, 0.25, 3,
        lambda models: awd_lstm.AWDLSTM(streams=batch_size * models, layers=layers),
        lambda folder, batch_size, models: awd_lstm.Words(folder, batch_size=batch_size, groups=models),
        lambda parameters: torch.optim.ASGD(parameters, 10.0, lambd=0.0, t0=float("inf"), weight_decay=1.2e-6),
    )  # fmt: skip


def workloads(devices: int, slowness: float = 1.0) -> dict[str, Workload]:
    """Return the workloads for so many devices: the examples' sizes for two, more layers and samples for six.

    Args:
        devices: 2 or 6.
        slowness: how many times as slow as a core each device is.
    """
    sizes = {2: ((4, 64), (4, 32), (3, 32)), 6: ((6, 96), (12, 48), (6, 48))}[devices]
    made = [make(*size) for make, size in zip((_gnmt, _bert, _awd_lstm), sizes, strict=True)]
    return {w.name: replace(w, devices=devices, slowness=slowness) for w in made}


WORKLOADS = workloads(2)


def prepare(workload: Workload, given: Path, folder: Path, lines: int) -> Path:
    """A folder with the first lines of a corpus, and what its data module makes from them once.

    Args:
        given: has a folder for each corpus; one that is missing is fetched.
        folder: for the results.
        lines: of training.
    """
    made, count = folder / f"{workload.name}-{lines}", int(lines * workload.line_factor)
    if not made.exists():
        begun = made.with_suffix(".part")
        begun.mkdir(parents=True, exist_ok=True)
        for path, text in _texts(workload, given):
            most = count if path.startswith("train") else max(1, count // HELD_OUT)
            header = path.endswith(".tsv")
            corpora.write(begun / path, itertools.islice(text, most + header))
        begun.rename(made)  # the folder is there only if it is whole
    workload.data(made, workload.batch_size, 1).prepare_data()
    return made


def _texts(workload: Workload, given: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Names of files, and their lines."""
    if not workload.corpus:
        yield from (("train.txt", _signs(False)), ("valid.txt", _signs(True)))
        return
    source = given / workload.corpus
    if not source.exists():
        corpora.CORPORA[workload.corpus](source)
    for path in sorted(source.glob("*.*")):
        if path.suffix in (".en", ".de", ".tsv"):
            yield path.name, iter(path.read_text(encoding="utf-8").splitlines())


def _signs(held_out: bool) -> Iterator[str]:
    """Lines of Python's sources with spaces between names and signs; empty ones are left out."""
    for path in awd_lstm.standard_library(held_out):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if words := re.findall(r"\w+|\S", line):
                yield " ".join(words)
