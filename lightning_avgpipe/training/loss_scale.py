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
    """Within this context an infinite gradient on one process, or in one pipeline, is one everywhere.

    Then all of them skip the same steps and change their scale alike, once. A scaler learns of its device when it
    scales the first loss, which only the last stage has, so it is told here; and a stage without gradients has nothing
    to object. Every process enters it.

    Args:
        scaler: of this process.
        cluster: connects the processes; all groups decide together.
        others: optimizer of the first pipeline -> those of other pipelines, which step after it.
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
    """One decision on the gradients of all optimizers that step together: the first one's turn settles it."""

    def __init__(
        self, scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
    ) -> None:
        self._look = scaler._unscale_grads_
        self._update = scaler.update
        self._cluster = cluster
        self._others = others
        self._waiting: list[Optimizer] = []  # unscaled already, and yet to step
        self._turns_left = 0
        self._found: dict[torch.device, Tensor] = {}

    def unscale(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        if any(optimizer is waiting for waiting in self._waiting):
            return self._found
        self._waiting = list(self._others(optimizer))
        self._turns_left = len(self._waiting)
        votes = torch.zeros((), dtype=torch.float64)
        for looked_at in (optimizer, *self._waiting):
            for vote in self._look(looked_at, *args).values():
                votes += vote.cpu()
        anywhere = self._cluster.world.sum(votes) > 0
        self._found = {self._cluster.device: anywhere.to(self._cluster.device, torch.float32)}
        return self._found

    def update(self, *args: Any) -> None:
        """Called after every optimizer's step: the scale changes after the last one's."""
        if self._turns_left:
            self._turns_left -= 1
            return
        self._waiting = []
        self._update(*args)
