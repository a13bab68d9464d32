"""Loss scaling: one decision for all stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from lightning_avgpipe.runtime.mesh import Mesh

__all__ = ["scaling_together"]


@contextlib.contextmanager
def scaling_together(scaler: GradScaler, mesh: Mesh) -> Iterator[None]:
    """Within this context an infinite gradient on one process is one on all processes.

    Then all of them skip the same steps and change their scale alike. A scaler learns of its device when it scales the
    first loss, which only the last stage has, so it is told here; and a stage without gradients has nothing to object.
    Every process enters it.
    """
    if not scaler.is_enabled():
        yield
        return
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(mesh.device)
    look = scaler._unscale_grads_

    def unscale_and_agree(optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = look(optimizer, *args)
        votes = torch.zeros((), dtype=torch.float64)
        for vote in found.values():
            votes += vote.cpu()
        anywhere = mesh.sum(votes) > 0
        return {mesh.device: anywhere.to(mesh.device, torch.float32)}

    vars(scaler)["_unscale_grads_"] = unscale_and_agree
    try:
        yield
    finally:
        del vars(scaler)["_unscale_grads_"]
