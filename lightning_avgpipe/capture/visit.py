"""Move the tensors of a model that is larger than a device to the device, one unit at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from lightning_avgpipe.utils.device import port_of


@contextlib.contextmanager
def visiting(tensors: Collection[Tensor], device: torch.device | None) -> Iterator[None]:
    """Move tensors to a device within this context, and back after it."""
    moves = device is not None and not port_of(device).is_host
    # tensors without contents here are fetched on demand instead
    homes = [(t, t.data) for t in tensors if moves and t.device != device and not t.is_meta]
    for tensor, home in homes:
        tensor.data = home.to(device)
    try:
        yield
    finally:
        for tensor, home in homes:
            home.copy_(tensor.data)
            tensor.data = home
