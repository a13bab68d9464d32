"""Visits: a model that is larger than a device passes through it one unit at a time."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_avgpipe.utils.device import port_of


class Visit:
    """Tensors are on a device within this context, and at home after it."""

    def __init__(self, tensors: Collection[Tensor], device: torch.device | None) -> None:
        moves = device is not None and not port_of(device).is_host
        # what has no contents here is lent, if it is needed
        self._tensors = [t for t in tensors if moves and t.device != device and not t.is_meta]
        self._device = device

    def __enter__(self) -> None:
        self._homes = [t.data for t in self._tensors]
        for tensor in self._tensors:
            tensor.data = tensor.data.to(self._device)

    def __exit__(self, *exc_info: object) -> None:
        for tensor, home in zip(self._tensors, self._homes, strict=True):
            home.copy_(tensor.data)
            tensor.data = home
