"""Operators of torchvision in Python, if its library does not load with this torch: import this before all else."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["LIBRARY"]


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Boxes that no better one overlaps, best first."""
    from torchvision.ops import box_iou

    overlaps, kept = box_iou(dets, dets), list[int]()
    for i in scores.argsort(descending=True).tolist():
        if all(overlaps[i, j] <= iou_threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


def _needed() -> bool:
    found = importlib.util.find_spec("torchvision")
    libraries = list(Path(found.origin).parent.glob("_C*.so")) if found is not None and found.origin else []
    for path in libraries:
        try:
            torch.ops.load_library(str(path))
        except OSError:
            return True
    return False


LIBRARY = None
if _needed():
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # torchvision compiles its own stand-ins, and so rounds otherwise
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.impl("nms", nms, "CPU")
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None
