"""The three workloads: the examples' models and data, unchanged, on a part of their corpora."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

__all__ = ["WORKLOADS", "Workload", "prepare"]

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

    def better(self, one: float, other: float) -> bool:
        """Whether a metric is at least as good as another one."""
        return one <= other if self.goal == "min" else one >= other


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "gnmt", "debian", "val_loss", "min", 64, 1.0, 5.0, 4,
            lambda models: gnmt.GNMT(warmup=100),
            lambda folder, batch_size, models: gnmt.Sentences(folder, batch_size=batch_size),
            lambda parameters: torch.optim.Adam(parameters, 2e-3),
            {"loss_weight": "labels"},
        ),
        Workload(
            "bert", "verses", "val_accuracy", "max", 32, 1.0, None, 4,
            lambda models: bert.SentencePairs(),
            lambda folder, batch_size, models: bert.Pairs(folder, batch_size=batch_size),
            lambda parameters: torch.optim.AdamW(parameters, 5e-4),
        ),
        Workload(
            "awd_lstm", "", "val_loss", "min", 32, 2.0, 0.25, 3,
            lambda models: awd_lstm.AWDLSTM(streams=32 * models),
            lambda folder, batch_size, models: awd_lstm.Words(folder, batch_size=batch_size, groups=models),
            lambda parameters: torch.optim.ASGD(parameters, 10.0, lambd=0.0, t0=float("inf"), weight_decay=1.2e-6),
        ),
    )
}  # fmt: skip


def prepare(workload: Workload, given: Path, folder: Path, lines: int) -> Path:
    """A folder with the first lines of a corpus, and what its data module makes from them once.

    Args:
        given: has a folder for each corpus; one that is missing is fetched.
        folder: for the results.
        lines: of training.
    """
    made, count = folder / f"{workload.name}-{lines}", int(lines * workload.line_factor)
    if not made.exists():
        made.mkdir(parents=True)
        for path, text in _texts(workload, given):
            most = count if path.startswith("train") else max(1, count // HELD_OUT)
            header = path.endswith(".tsv")
            corpora.write(made / path, itertools.islice(text, most + header))
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


def names(chosen: Sequence[str] | None) -> list[Workload]:
    """Workloads by name; None: all."""
    return [WORKLOADS[name] for name in chosen or WORKLOADS]
