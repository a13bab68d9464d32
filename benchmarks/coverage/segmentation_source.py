"""All architectures of segmentation_models_pytorch, with a small encoder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import segmentation_models_pytorch as smp
import torch
from torch import nn

from benchmarks.coverage.case import Case, Example, example

BATCH, PARTS, IMAGE = 4, 2, 64


class Source:
    """segmentation_models_pytorch."""

    name = "segmentation_models_pytorch"
    version = smp.__version__

    def cases(self) -> Iterator[Case]:
        """All that create_model knows."""
        for name in smp.MODEL_ARCHITECTURES_MAPPING:
            tries = [partial(made, name, encoder) for encoder in ("resnet18", "mit_b0", "tu-resnet18")]
            yield Case(name, "semantic segmentation", True, tries)


class Segmentation(nn.Module):
    """A model with one of the library's losses."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.dice = smp.losses.DiceLoss("binary")

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss."""
        return (self.dice(self.net(image), mask),)


def made(name: str, encoder: str) -> Example:
    """A model and images for it."""
    model = smp.create_model(name, encoder, encoder_weights=None, classes=1)
    masks = (torch.rand(BATCH, 1, IMAGE, IMAGE) > 0.5).float()
    return example(Segmentation(model), {"image": torch.randn(BATCH, 3, IMAGE, IMAGE), "mask": masks}, PARTS)
