"""Networks of MONAI, in two dimensions, small."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import monai
import torch
from monai.networks import nets
from torch import nn

from benchmarks.coverage.case import Case, Example, example

BATCH, PARTS, IMAGE = 4, 2, 64
# what a network calls its sizes, and what it gets; names that it does not know are left out
_SIZES: dict[str, Any] = {
    "spatial_dims": 2, "dimensions": 2, "in_channels": 1, "n_input_channels": 1, "out_channels": 2, "num_classes": 2,
    "img_size": (IMAGE, IMAGE), "patch_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_heads": 4, "num_layers": 2,
    "channels": (8, 16, 32), "strides": (2, 2), "features": (8, 8, 16, 16, 32, 8), "feature_size": 12,
    "kernel_size": (3, 3, 3), "upsample_kernel_size": (2, 2), "init_filters": 8, "depths": (1, 1, 1, 1),
    "in_shape": (1, IMAGE, IMAGE), "out_shape": (2,), "classes": 2, "growth_rate": 8, "init_features": 8,
    "block_config": (2, 2), "block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 32, 64),
    "conv1_t_size": 3, "model_name": "efficientnet-b0", "pretrained": False, "num_channel_initial": 4,
}  # fmt: skip
_SPECIAL: dict[str, dict[str, Any]] = {"DynUNet": {"strides": (1, 2, 2)}, "SwinUNETR": {"depths": (1, 1, 1, 1)}}


class Source:
    """MONAI."""

    name = "monai"
    version = monai.__version__

    def cases(self) -> Iterator[Case]:
        """All classes of ``monai.networks.nets`` that can be made with these sizes and take one image."""
        seen: set[type] = set()
        for name, cls in sorted(vars(nets).items()):
            if (
                inspect.isclass(cls)
                and issubclass(cls, nn.Module)
                and cls not in seen
                and "spatial" not in name.lower()
            ):
                seen.add(cls)
                yield Case(name, "medical images", True, [partial(made, name, keys) for keys in (list(_SIZES), None)])


class Imitation(nn.Module):
    """A network that learns to give what was asked for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss."""
        return (nn.functional.mse_loss(first(self.net(image)), wanted),)


def first(output: Any) -> torch.Tensor:
    """The first tensor."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def made(name: str, keys: list[str] | None) -> Example:
    """A network and images for it; without keys only those sizes that it asks for."""
    cls = getattr(nets, name)
    takes = inspect.signature(cls).parameters
    wanted = [n for n, p in takes.items() if p.default is p.empty] if keys is None else keys
    sizes = {n: v for n, v in ({**_SIZES, **_SPECIAL.get(name, {})}).items() if n in takes and n in wanted}
    if "spatial_dims" in takes:
        sizes["spatial_dims"] = 2
    model = cls(**sizes)
    if sum(p.numel() for p in model.parameters()) > 20e6:
        raise ValueError("it is too large")
    images = torch.randn(BATCH, 1, IMAGE, IMAGE)
    return example(Imitation(model), {"image": images, "wanted": torch.randn_like(first(model(images)))}, PARTS)
