"""The same training on one device and as a pipeline, with the same micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.models import Regression, loader
from tests.trainers import pipeline, trainer

MICROBATCHES = 4  # a power of two: dividing by it is exact, so both trainings agree bit for bit
BATCH = 8


def twins(model: type[Regression], **options: Any) -> tuple[Any, Any]:
    """Two equal modules."""
    torch.manual_seed(3)
    one = model(**options)
    return one, copy.deepcopy(one)


def loaders(model: type[Regression], samples: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The same samples, in micro-batches for one device and in batches for the pipeline."""
    return loader(model, samples, BATCH // MICROBATCHES), loader(model, samples, BATCH)


def single(accumulate: int = 1, **options: Any) -> Any:
    """One device that accumulates micro-batches."""
    return trainer(accumulate_grad_batches=accumulate * MICROBATCHES, **options)


def staged(num_stages: int = 2, accumulate: int = 1, **options: Any) -> Any:
    """All stages in this process."""
    strategy = {"num_microbatches": MICROBATCHES, **options.pop("strategy", {})}
    return pipeline(num_stages, strategy=strategy, accumulate_grad_batches=accumulate, **options)
