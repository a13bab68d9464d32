"""The optimizer step, which all processes take together: norms of gradients, and the loss scale."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils import _foreach_utils as grouping

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.utils.patching import Replacement, all_replaced, replaced


class NormsOverStages:
    """Norms of gradients over the stages of all processes. Processes wait for each other when a norm is computed.

    Attributes:
        cluster: as given.
        taken: whether a norm was computed since this was last set to False; the same on all processes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.taken = cluster, False

    def clipping(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context within which ``torch.nn.utils.clip_grad_norm_`` clips by the norm over all processes.

        Within it, every process must call that function equally often. It works for every caller: the precision
        plugin, and a user's own code, under whatever name that has imported the function.

        Args:
            parameters: parameters of all processes, in the same order on each; only owners have gradients.
        """

        def total_norm(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> Tensor:
            gradients = [g for g in ([tensors] if isinstance(tensors, Tensor) else tensors) if not g.is_meta]
            self.taken = True
            total = global_norm(gradients, parameters, self.cluster, float(norm_type))
            if error_if_nonfinite and not total.isfinite():
                norm = total.item()
                raise RuntimeError(f"the norm of the gradients of all stages is {norm}, which cannot be clipped")
            return total.to(self.cluster.device, non_blocking=True)  # otherwise torch would move it, and wait

        return replaced(clip_grad, "_get_total_norm", total_norm)


@torch.no_grad()
def global_norm(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], cluster: Cluster, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the gradients of all processes. Every process calls it.

    Args:
        gradients: gradients of this process. The ``grad`` of a parameter that several processes hold counts once.
        parameters: as for :meth:`NormsOverStages.clipping`.
        cluster: cluster of the processes.
        norm_type: order of the norm.

    Returns:
        The norm on the host, shape ``()``. It equals the norm in a single process bit for bit: every parameter's norm
        is computed by its owner, and the norm of the norms by all processes in the order that torch has on the host.
    """
    position = {id(p.grad): i for i, p in enumerate(parameters) if p.grad is not None}
    places = [position.get(id(gradient)) for gradient in gradients]
    known = [i for i in places if i is not None]
    # in float64, adding the zeros of other processes and taking the mean of equal norms are exact
    norms = torch.zeros(2, len(parameters) + cluster.group.world_size, dtype=torch.float64, device="cpu")
    if known:
        own = [gradient for gradient, i in zip(gradients, places, strict=True) if i is not None]
        norms[0, known] = _norms(own, norm_type).cpu().double()
        norms[1, known] = 1.0
    others = [gradient for gradient, i in zip(gradients, places, strict=True) if i is None]
    if others:  # gradients of other tensors, such as a plugin's copies of parameters in another precision
        of_others = torch.linalg.vector_norm(_norms(others, norm_type), norm_type)
        norms[:, len(parameters) + cluster.rank] = torch.stack(
            [of_others.cpu().double(), torch.ones((), dtype=torch.float64, device="cpu")]
        )
    cluster.group.sum(norms)
    dtypes = [p.dtype.to_real() for p in parameters]
    dtypes += [torch.float64 if torch.float64 in dtypes else torch.float32] * cluster.group.world_size  # for others
    present: list[int] = (norms[1] > 0).nonzero().flatten().tolist()
    found = dict.fromkeys(dtypes[i] for i in present) or {torch.float32: None}
    kinds: list[Any] = [torch.empty(0, dtype=dtype, device="cpu") for dtype in found]  # the same order on all devices
    order = [dtype for _, dtype in grouping._group_tensors_by_device_and_dtype([kinds])]
    present.sort(key=lambda i: order.index(dtypes[i]))
    total = functools.reduce(torch.promote_types, order)
    return torch.linalg.vector_norm((norms[0, present] / norms[1, present]).to(total), norm_type)


def _norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each gradient, computed as in torch, which groups them by data type."""
    listed: list[Any] = list(gradients)
    groups: dict[Any, Any] = grouping._group_tensors_by_device_and_dtype([listed], with_indices=True)
    found: dict[int, Tensor] = {}
    for (same_type,), numbers in groups.values():
        found.update(zip(numbers, torch._foreach_norm(same_type, norm_type), strict=True))
    return torch.stack([found[i] for i in range(len(listed))])


@contextlib.contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hide the gradients of parameters within this context.

    A parameter that has moved to another process or device within it does not get its gradient back.
    """
    gradients = [(p, p.grad) for p in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            same = gradient is not None and gradient.device == parameter.device
            parameter.grad = gradient if same else None


# -- the loss scale ----------------------------------------------------------------------------------------------------


def scalers_of(precision: Any) -> list[GradScaler]:
    """Return the gradient scalers that a precision plugin has in its attributes."""
    return [value for value in vars(precision).values() if isinstance(value, GradScaler)]


def scaling_together(
    precision: Any, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
) -> AbstractContextManager[None]:
    """Return a context within which gradient scalers count an infinite gradient of any process or pipeline.

    So all processes skip the same steps, and change their scale equally and once. Every process enters the context. A
    scaler usually initialises itself when it scales the first loss; only the last stage has losses, so this function
    initialises it. A stage without gradients reports no infinite one.

    Args:
        precision: precision plugin of this process, which has the gradient scalers.
        cluster: cluster of the processes; all groups decide together.
        others: returns, for an optimizer of the first pipeline, those of the other pipelines, which step after it.
    """
    replacements: list[Replacement] = []
    for scaler in filter(GradScaler.is_enabled, scalers_of(precision)):
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(cluster.device)
        agreement = _Agreement(scaler, cluster, others)
        replacements.append((scaler, "_unscale_grads_", agreement.unscale))
        replacements.append((scaler, "update", agreement.update))
    return all_replaced(replacements)


class _Agreement:
    """One decision on the gradients of all optimizers that step together, made when the first one is unscaled."""

    def __init__(
        self, scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
    ) -> None:
        self._look = scaler._unscale_grads_
        self._update = scaler.update
        self._cluster = cluster
        self._others = others
        self._waiting: list[Optimizer] = []  # optimizers whose gradients are unscaled already, and that step later
        self._turns_left = 0
        self._found: dict[torch.device, Tensor] = {}

    def unscale(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        if any(optimizer is waiting for waiting in self._waiting):
            return self._found
        self._waiting = list(self._others(optimizer))
        self._turns_left = len(self._waiting)
        found = [vote for each in (optimizer, *self._waiting) for vote in self._look(each, *args).values()]
        votes = torch.zeros((), dtype=torch.float64, device="cpu")
        if found:
            votes += torch.stack([vote.reshape(()) for vote in found]).sum().cpu()
        anywhere = self._cluster.world.sum(votes) > 0
        self._found = {self._cluster.device: anywhere.to(self._cluster.device, torch.float32)}
        return self._found

    def update(self, *args: Any) -> None:
        """Update the scale after the step of the last optimizer only; this is called after every optimizer's step."""
        if self._turns_left:
            self._turns_left -= 1
            return
        self._waiting = []
        self._update(*args)
