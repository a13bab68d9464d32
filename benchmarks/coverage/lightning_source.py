"""The LightningModules of Lightning's own demos."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos import LightningLSTM, LightningTransformer, boring_classes

from benchmarks.coverage.case import Case, Example, loader_of

BATCH, VOCABULARY, LENGTH = 8, 1000, 12


class Source:
    """Lightning."""

    name = "lightning.pytorch.demos"
    version = L.__version__

    def cases(self) -> Iterator[Case]:
        """All."""
        words = [(torch.randint(VOCABULARY, (LENGTH,)), torch.randint(VOCABULARY, (LENGTH,))) for _ in range(BATCH)]
        for cls in (LightningTransformer, LightningLSTM):
            yield Case(cls.__name__, "language model", True, [partial(made, partial(cls, VOCABULARY), words, 4)])
        vectors = [torch.randn(32) for _ in range(BATCH)]
        for name, samples, parts in (
            ("BoringModel", vectors, 4), ("ManualOptimBoringModel", vectors, 1), ("DemoModel", vectors, 4),
        ):  # fmt: skip
            yield Case(name, "demo", True, [partial(made, getattr(boring_classes, name), samples, parts)])


def made(cls: Any, samples: list[Any], parts: int) -> Example:
    """A module and its data, in the place of what it would fetch."""
    module = cls()
    module.prepare_data = lambda: None
    return Example(module, loader_of(samples), BATCH, parts)
