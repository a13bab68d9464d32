"""The scripts of lightly's documentation, as they are, on random images.

``LIGHTLY_EXAMPLES`` names the folder ``examples/pytorch_lightning`` of a checkout; the package itself has no examples.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightly
import torch
import torchvision
from PIL import Image

from benchmarks.coverage.case import Case, Example
from benchmarks.coverage.caught import caught

SAMPLES, PARTS = 8, 2


class Source:
    """lightly."""

    name = "lightly"
    version = lightly.__version__

    def cases(self) -> Iterator[Case]:
        """All scripts."""
        folder = os.environ.get("LIGHTLY_EXAMPLES")
        if folder is None:
            raise ImportError("LIGHTLY_EXAMPLES does not name the folder with lightly's examples")
        for path in sorted(Path(folder).glob("*.py")):
            yield Case(path.stem, "self-supervised", True, [partial(made, path)])


class Images(torch.utils.data.Dataset):
    """In the place of all data sets."""

    def __init__(self, *_: Any, transform: Any = None, **__: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        image = Image.fromarray(pixels.numpy())
        return (image if self.transform is None else self.transform(image)), index % 3


def made(path: Path) -> Example:
    """Run the script up to its ``fit``."""
    replaced = [
        mock.patch.object(torchvision.datasets, n, Images) for n in ("CIFAR10", "VOCDetection", "VOCSegmentation")
    ]
    with contextlib.ExitStack() as stack:
        for one in (*replaced, mock.patch.object(sys, "argv", [str(path)])):
            stack.enter_context(one)
        return caught(lambda: runpy.run_path(str(path), run_name="__main__"), SAMPLES, PARTS)
