"""Libraries of models for images: each function imports its library and returns the cases that are tried."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.coverage.case import Case, Example, Source, WithLoss, classified, example, first, loader_of

BATCH, PARTS, LABELS, IMAGE = 4, 2, 3, 64

# -- timm --------------------------------------------------------------------------------------------------------------

_LARGEST_OF_TIMM = 12e6  # parameters
# words for sizes in names, from small to large
_SIZES = "test zepto atto femto pico nano xxxs xxs xs tiny xtiny mini t n micro x s small m medium b base l large xl h"


def of_timm() -> Source:
    """The smallest model of each file of timm, with small images where it takes them."""
    import timm
    from timm.models import _registry

    def sized(name: str, image: int) -> nn.Module:
        if not image:
            return timm.create_model(name, num_classes=LABELS)
        try:
            return timm.create_model(name, num_classes=LABELS, img_size=image)
        except TypeError:  # any size of image is fine
            return timm.create_model(name, num_classes=LABELS)

    def made(name: str, image: int) -> Example:
        """A model and images for it; 0 is the size that it asks for."""
        with torch.device("meta"):
            count = sum(p.numel() for p in timm.create_model(name, num_classes=LABELS).parameters())
        if count > _LARGEST_OF_TIMM:
            raise ValueError(f"it has {count / 1e6:.0f} million parameters")
        model: Any = sized(name, image)
        height, width = (image, image) if image else model.default_cfg["input_size"][1:]
        batch = {"image": torch.randn(BATCH, 3, height, width), "label": torch.randint(LABELS, (BATCH,))}
        return example(WithLoss(model, classified), batch, PARTS)

    def cases() -> Iterator[Case]:
        for family in sorted(_registry._module_to_models):
            names = sorted(_registry._module_to_models[family], key=_rank)[:3]
            tries = [partial(made, name, size) for name in names for size in (64, 128, 0)]
            yield Case(family, "image classification", True, tries)

    return Source("timm", timm.__version__, cases())


def _rank(name: str) -> tuple[int, int, str]:
    """Small ones first: by the word for the size, then by the first number."""
    words, sizes = re.split(r"[_\d]+", name), _SIZES.split()
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return min([sizes.index(w) for w in words if w in sizes] or [12]), numbers[0] if numbers else 0, name


# -- torchvision -------------------------------------------------------------------------------------------------------

_LARGEST_OF_TORCHVISION = 45e6  # parameters


def of_torchvision() -> Source:
    """The smallest model of each file of torchvision, with small images."""
    import torchvision
    from torchvision import models

    kinds = {
        "image classification": models,
        "semantic segmentation": models.segmentation,
        "detection": models.detection,
        "video classification": models.video,
    }

    def arguments(name: str) -> dict[str, Any]:
        """Without weights that are fetched."""
        module = models.get_model_builder(name).__module__
        backbone = module.startswith((models.detection.__name__, models.segmentation.__name__))
        quick = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
        return {"weights": None, "num_classes": LABELS} | ({"weights_backbone": None} if backbone else {}) | quick

    def size(name: str) -> int:
        """In parameters."""
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in models.get_model(name, **arguments(name)).parameters())
        except NotImplementedError:  # it reads its weights
            return sum(p.numel() for p in models.get_model(name, **arguments(name)).parameters())

    def made(name: str, kind: str, image: int) -> Example:
        """A model and images for it."""
        if size(name) > _LARGEST_OF_TORCHVISION:
            raise ValueError(f"it has {size(name) / 1e6:.0f} million parameters")
        model = models.get_model(name, **arguments(name))
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
        return example(WithLoss(model, classified), batch, PARTS)

    def cases() -> Iterator[Case]:
        for kind, module in kinds.items():
            families = defaultdict[str, list[str]](list)
            for name in models.list_models(module=module):
                if not name.startswith("quantized"):
                    families[models.get_model_builder(name).__module__.rsplit(".", 1)[-1]].append(name)
            for names in families.values():
                chosen = min(names, key=size)
                yield Case(chosen, kind, True, [partial(made, chosen, kind, image) for image in (64, 128, 224)])

    return Source("torchvision", torchvision.__version__, cases())


# -- segmentation_models_pytorch ---------------------------------------------------------------------------------------


class _Segmentation(nn.Module):
    """A model with one of the library's losses."""

    def __init__(self, net: nn.Module, dice: nn.Module) -> None:
        super().__init__()
        self.net, self.dice = net, dice

    def forward(self, image: Tensor, mask: Tensor) -> tuple[Tensor]:
        """The loss."""
        return (self.dice(self.net(image), mask),)


def of_segmentation() -> Source:
    """All architectures of segmentation_models_pytorch, with a small encoder."""
    import segmentation_models_pytorch as smp

    def made(name: str, encoder: str) -> Example:
        """A model and images for it."""
        model = smp.create_model(name, encoder, encoder_weights=None, classes=1)
        masks = (torch.rand(BATCH, 1, IMAGE, IMAGE) > 0.5).float()
        net = _Segmentation(model, smp.losses.DiceLoss("binary"))
        return example(net, {"image": torch.randn(BATCH, 3, IMAGE, IMAGE), "mask": masks}, PARTS)

    encoders = ("resnet18", "mit_b0", "tu-resnet18")
    cases = [
        Case(name, "semantic segmentation", True, [partial(made, name, encoder) for encoder in encoders])
        for name in smp.MODEL_ARCHITECTURES_MAPPING
    ]
    return Source("segmentation_models_pytorch", smp.__version__, cases)


# -- MONAI -------------------------------------------------------------------------------------------------------------

# what a network calls its sizes, and what it gets; names that it does not know are left out
_MONAI_SIZES: dict[str, Any] = {
    "spatial_dims": 2, "dimensions": 2, "in_channels": 1, "n_input_channels": 1, "out_channels": 2, "num_classes": 2,
    "img_size": (IMAGE, IMAGE), "patch_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_heads": 4, "num_layers": 2,
    "channels": (8, 16, 32), "strides": (2, 2), "features": (8, 8, 16, 16, 32, 8), "feature_size": 12,
    "kernel_size": (3, 3, 3), "upsample_kernel_size": (2, 2), "init_filters": 8, "depths": (1, 1, 1, 1),
    "in_shape": (1, IMAGE, IMAGE), "out_shape": (2,), "classes": 2, "growth_rate": 8, "init_features": 8,
    "block_config": (2, 2), "block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 32, 64),
    "conv1_t_size": 3, "model_name": "efficientnet-b0", "pretrained": False, "num_channel_initial": 4,
}  # fmt: skip
_MONAI_SPECIAL: dict[str, dict[str, Any]] = {"DynUNet": {"strides": (1, 2, 2)}, "SwinUNETR": {"depths": (1, 1, 1, 1)}}


def of_monai() -> Source:
    """All classes of ``monai.networks.nets`` that can be made small, in two dimensions, and take one image."""
    import monai
    from monai.networks import nets

    def made(name: str, keys: list[str] | None) -> Example:
        """A network and images for it; without keys only those sizes that it asks for."""
        cls = getattr(nets, name)
        takes = inspect.signature(cls).parameters
        wanted = [n for n, p in takes.items() if p.default is p.empty] if keys is None else keys
        known = {**_MONAI_SIZES, **_MONAI_SPECIAL.get(name, {})}
        sizes = {n: v for n, v in known.items() if n in takes and n in wanted}
        if "spatial_dims" in takes:
            sizes["spatial_dims"] = 2
        model = cls(**sizes)
        if sum(p.numel() for p in model.parameters()) > 20e6:
            raise ValueError("it is too large")
        images = torch.randn(BATCH, 1, IMAGE, IMAGE)
        wanted_images = torch.randn_like(first(model(images)))
        return example(WithLoss(model, _imitated), {"image": images, "wanted": wanted_images}, PARTS)

    classes = {
        cls: name
        for name, cls in sorted(vars(nets).items(), reverse=True)  # of several names of a class the first stays
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and "spatial" not in name.lower()
    }
    cases = [
        Case(name, "medical images", True, [partial(made, name, keys) for keys in (list(_MONAI_SIZES), None)])
        for name in sorted(classes.values())
    ]
    return Source("monai", monai.__version__, cases)


def _imitated(net: nn.Module, image: Tensor, wanted: Tensor) -> Tensor:
    """The loss of a network that learns to give what is wanted."""
    return nn.functional.mse_loss(first(net(image)), wanted)


# -- anomalib ----------------------------------------------------------------------------------------------------------


def of_anomalib() -> Source:
    """The LightningModules of anomalib that train by gradients and can be made without fetching weights."""
    from anomalib.data import ImageBatch
    from anomalib.models import image

    options = {"batch_size": BATCH, "pre_trained": False, "pretrained": False, "visualizer": False, "evaluator": False}

    def collated(samples: list[Tensor]) -> ImageBatch:
        """A batch as anomalib's data modules make it."""
        return ImageBatch(image=torch.stack(samples), gt_label=torch.zeros(len(samples), dtype=torch.bool))

    def made(cls: Any, size: int) -> Example:
        """A module and normal images."""
        takes = inspect.signature(cls).parameters
        given = {name: value for name, value in options.items() if name in takes}
        if "pre_processor" in takes and hasattr(cls, "configure_pre_processor"):
            given["pre_processor"] = cls.configure_pre_processor(image_size=(size, size))
        module = cls(**given)
        samples = [torch.rand(3, size, size) for _ in range(BATCH)]
        return Example(module, loader_of(samples, collated), BATCH, 1)

    cases = [
        Case(name, "anomaly detection", True, [partial(made, cls, size) for size in (IMAGE, 256)])
        for name, cls in sorted(vars(image).items())
        if inspect.isclass(cls)
    ]
    return Source("anomalib", importlib.metadata.version("anomalib"), cases)


# -- lightly -----------------------------------------------------------------------------------------------------------


class _Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """In the place of all data sets."""

    def __init__(self, *_: Any, transform: Any = None, **__: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        image = Image.fromarray(pixels.numpy())
        return (image if self.transform is None else self.transform(image)), index % 3


def of_lightly() -> Source:
    """The scripts of lightly's documentation, as they are, on random images.

    ``LIGHTLY_EXAMPLES`` names the folder ``examples/pytorch_lightning`` of a checkout; the package has no examples.
    """
    import lightly
    from torchvision import datasets

    from benchmarks.coverage.caught import caught

    folder = os.environ.get("LIGHTLY_EXAMPLES")
    if folder is None:
        raise ImportError("LIGHTLY_EXAMPLES does not name the folder with lightly's examples")

    def made(path: Path) -> Example:
        """Run the script up to its ``fit``."""
        with contextlib.ExitStack() as stack:
            for name in ("CIFAR10", "VOCDetection", "VOCSegmentation"):
                stack.enter_context(mock.patch.object(datasets, name, _Images))
            stack.enter_context(mock.patch.object(sys, "argv", [str(path)]))
            return caught(lambda: runpy.run_path(str(path), run_name="__main__"), len(_Images()), PARTS)

    scripts = sorted(Path(folder).glob("*.py"))
    cases = [Case(path.stem, "self-supervised", True, [partial(made, path)]) for path in scripts]
    return Source("lightly", lightly.__version__, cases)
