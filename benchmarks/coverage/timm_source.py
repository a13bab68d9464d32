"""The smallest model of each file of timm, with small images where it takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import timm
import torch
from timm.models import _registry
from torch import nn

from benchmarks.coverage.case import Case, Example, example

BATCH, PARTS, LABELS, LARGEST = 4, 2, 3, 12e6
# words for sizes in names, from small to large
_SIZES = "test zepto atto femto pico nano xxxs xxs xs tiny xtiny mini t n micro x s small m medium b base l large xl h"


class Source:
    """timm."""

    name = "timm"
    version = timm.__version__

    def cases(self) -> Iterator[Case]:
        """One for each file of models."""
        for family in sorted(_registry._module_to_models):
            names = sorted(_registry._module_to_models[family], key=rank)[:3]
            tries = [partial(made, name, size) for name in names for size in (64, 128, 0)]
            yield Case(family, "image classification", True, tries)


def rank(name: str) -> tuple[int, int, str]:
    """Small ones first: by the word for the size, then by the first number."""
    words, sizes = re.split(r"[_\d]+", name), _SIZES.split()
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return min([sizes.index(w) for w in words if w in sizes] or [12]), numbers[0] if numbers else 0, name


def made(name: str, image: int) -> Example:
    """A model and images for it; 0 is the size that it asks for."""
    with torch.device("meta"):
        count = sum(p.numel() for p in timm.create_model(name, num_classes=LABELS).parameters())
    if count > LARGEST:
        raise ValueError(f"it has {count / 1e6:.0f} million parameters")
    model = _sized(name, image)
    height, width = (image, image) if image else model.default_cfg["input_size"][1:]
    labels = torch.randint(LABELS, (BATCH,))
    return example(Classifier(model), {"image": torch.randn(BATCH, 3, height, width), "label": labels}, PARTS)


def _sized(name: str, image: int) -> nn.Module:
    if not image:
        return timm.create_model(name, num_classes=LABELS)
    try:
        return timm.create_model(name, num_classes=LABELS, img_size=image)
    except TypeError:  # any size of image is fine
        return timm.create_model(name, num_classes=LABELS)


class Classifier(nn.Module):
    """A model whose loss is that of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss."""
        logits = self.net(image)
        while not isinstance(logits, torch.Tensor):
            logits = next(iter(logits.values())) if isinstance(logits, dict) else logits[0]
        return (nn.functional.cross_entropy(logits, label),)
