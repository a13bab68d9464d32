"""The LightningModules of anomalib that train by gradients and can be made without fetching weights."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from anomalib.data import ImageBatch
from anomalib.models import image

from benchmarks.coverage.case import Case, Example, loader_of

SAMPLES, IMAGE = 4, 64
_GIVEN = {"batch_size": SAMPLES, "pre_trained": False, "pretrained": False, "visualizer": False, "evaluator": False}


class Source:
    """anomalib."""

    name = "anomalib"
    version = importlib.metadata.version("anomalib")

    def cases(self) -> Iterator[Case]:
        """All models for images."""
        for name, cls in sorted(vars(image).items()):
            if inspect.isclass(cls):
                yield Case(name, "anomaly detection", True, [partial(made, cls, size) for size in (IMAGE, 256)])


def made(cls: Any, size: int) -> Example:
    """A module and normal images."""
    takes = inspect.signature(cls).parameters
    given = {name: value for name, value in _GIVEN.items() if name in takes}
    if "pre_processor" in takes and hasattr(cls, "configure_pre_processor"):
        given["pre_processor"] = cls.configure_pre_processor(image_size=(size, size))
    module = cls(**given)
    samples = [torch.rand(3, size, size) for _ in range(SAMPLES)]
    return Example(module, loader_of(samples, collated), SAMPLES, 1)


def collated(samples: list[torch.Tensor]) -> ImageBatch:
    """A batch as anomalib's data modules make it."""
    labels = torch.zeros(len(samples), dtype=torch.bool)
    return ImageBatch(image=torch.stack(samples), gt_label=labels)
