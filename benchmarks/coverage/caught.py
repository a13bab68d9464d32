"""Catch the module and the data that a script, or a library, gives to a Trainer of ``pytorch_lightning``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.coverage.case import Example, loader_of
from lightning_avgpipe.utils.lightning import pl

__all__ = ["caught"]

if pl.__name__ != "pytorch_lightning":
    raise ImportError("it trains with pytorch_lightning; name the sources that do in --source, and no other")


class _Found(BaseException):
    pass


def caught(run: Callable[[], object], size: int, parts: int) -> Example:
    """Run up to the first ``fit``.

    Args:
        run: makes a Trainer and calls its ``fit``.
        size: samples of a batch; the loader must have as many.
        parts: micro-batches.
    """
    found: dict[str, Any] = {}

    class Trainer:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def fit(self, model: Any, train_dataloaders: Any = None, *_: Any, datamodule: Any = None, **__: Any) -> None:
            found["model"] = model
            found["loader"] = datamodule.train_dataloader() if train_dataloaders is None else train_dataloaders
            raise _Found

    with mock.patch.object(pl, "Trainer", Trainer), contextlib.suppress(_Found):
        run()
    loader = found["loader"]
    return Example(found["model"], loader_of([loader.dataset[i] for i in range(size)], loader.collate_fn), size, parts)
