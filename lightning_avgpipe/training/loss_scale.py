"""Loss scaling: one decision for all stages of all pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.utils.patching import replaced


@contextlib.contextmanager
def scaling_together(
    scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]] = lambda optimizer: ()
) -> Iterator[None]:
    """Treat an infinite gradient on one process, or in one pipeline, as one everywhere, within this context.

    Then all processes skip the same steps and change their scale equally, once. Every process enters the context. A
    scaler initialises itself when it scales the first loss, which only the last stage has, so this context initialises
    it. A stage without gradients reports no infinite one.

    Args:
        scaler: gradient scaler of this process.
        cluster: cluster of the processes; all groups decide together.
        others: returns, for an optimizer of the first pipeline, those of other pipelines that step after it.
    """
    if not scaler.is_enabled():
        yield
        return
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(cluster.device)
    agreement = _Agreement(scaler, cluster, others)
    with replaced(scaler, "_unscale_grads_", agreement.unscale), replaced(scaler, "update", agreement.update):
        yield


class _Agreement:
    """One decision on the gradients of all optimizers that step together, made when the first one is unscaled."""

    def __init__(
        self, scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
    ) -> None:
        self._look = scaler._unscale_grads_
        self._update = scaler.update
        self._cluster = cluster
        self._others = others
        self._waiting: list[Optimizer] = []  # optimizers that are unscaled already and step later
        self._turns_left = 0
        self._found: dict[torch.device, Tensor] = {}

    def unscale(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        if any(optimizer is waiting for waiting in self._waiting):
            return self._found
        self._waiting = list(self._others(optimizer))
        self._turns_left = len(self._waiting)
        votes = torch.zeros((), dtype=torch.float64, device="cpu")
        for looked_at in (optimizer, *self._waiting):
            for vote in self._look(looked_at, *args).values():
                votes += vote.cpu()
        anywhere = self._cluster.world.sum(votes) > 0
        self._found = {self._cluster.device: anywhere.to(self._cluster.device, torch.float32)}
        return self._found

    def update(self, *args: Any) -> None:
        """Update the scale after the step of the last optimizer; a scaler calls this method after every step."""
        if self._turns_left:
            self._turns_left -= 1
            return
        self._waiting = []
        self._update(*args)
