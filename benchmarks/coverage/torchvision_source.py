"""The smallest model of each file of torchvision, with small images."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torchvision
from torchvision import models

from benchmarks.coverage.case import Case, Example, example
from benchmarks.coverage.timm_source import Classifier

BATCH, PARTS, LABELS, LARGEST = 4, 2, 3, 45e6
KINDS = {
    "image classification": models,
    "semantic segmentation": models.segmentation,
    "detection": models.detection,
    "video classification": models.video,
}


class Source:
    """torchvision."""

    name = "torchvision"
    version = torchvision.__version__

    def cases(self) -> Iterator[Case]:
        """One for each file of models."""
        for kind, module in KINDS.items():
            families = defaultdict[str, list[str]](list)
            for name in models.list_models(module=module):
                if not name.startswith("quantized"):
                    families[models.get_model_builder(name).__module__.rsplit(".", 1)[-1]].append(name)
            for names in families.values():
                chosen = min(names, key=size)
                tries = [partial(made, chosen, kind, image) for image in (64, 128, 224)]
                yield Case(chosen, kind, True, tries)


def arguments(name: str) -> dict[str, Any]:
    """Without weights that are fetched."""
    detects = models.get_model_builder(name).__module__.startswith(models.detection.__name__)
    segments = models.get_model_builder(name).__module__.startswith(models.segmentation.__name__)
    return {"weights": None, "num_classes": LABELS} | ({"weights_backbone": None} if detects or segments else {})


def size(name: str) -> int:
    """In parameters."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in models.get_model(name, **_without(name)).parameters())
    except NotImplementedError:  # it reads its weights
        return sum(p.numel() for p in models.get_model(name, **_without(name)).parameters())


def _without(name: str) -> dict[str, Any]:
    quick = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    return arguments(name) | quick


def made(name: str, kind: str, image: int) -> Example:
    """A model and images for it."""
    if size(name) > LARGEST:
        raise ValueError(f"it has {size(name) / 1e6:.0f} million parameters")
    model = models.get_model(name, **_without(name))
    if kind == "detection":
        boxes = [torch.tensor([[4.0, 4.0, 20.0 + i, 24.0], [10.0, 8.0, 40.0, 30.0 + i]]) for i in range(BATCH)]
        masks = torch.zeros(2, image, image, dtype=torch.uint8)
        targets = [
            {"boxes": b, "labels": torch.tensor([1, 2]), "masks": masks, "keypoints": torch.ones(2, 17, 3)}
            for b in boxes
        ]
        model.transform.min_size, model.transform.max_size = (image,), image
        batch = {"images": [torch.rand(3, image, image) for _ in range(BATCH)], "targets": targets}
        return example(model, batch, PARTS, lambda losses: sum(losses.values()))
    shape = {"video classification": (3, 16, image, image)}.get(kind, (3, image, image))
    labels = (BATCH, image, image) if kind == "semantic segmentation" else (BATCH,)
    batch = {"image": torch.randn(BATCH, *shape), "label": torch.randint(LABELS, labels)}
    return example(Classifier(model), batch, PARTS)
