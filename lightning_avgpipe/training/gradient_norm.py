"""Gradient norms over all stages, wherever gradients are clipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.utils.patching import replaced


@contextlib.contextmanager
def norms_over_stages(parameters: Sequence[Tensor], cluster: Cluster) -> Iterator[None]:
    """Within this context ``torch.nn.utils.clip_grad_norm_`` clips by the norm over all processes.

    Every process must then call it equally often. It works for whoever calls it: the precision plugin, or a user's own
    code, under whatever name that code has imported it.

    Args:
        parameters: the same parameters, in the same order, on all processes; gradients only where they are owned.
    """

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = global_norm(gradients, parameters, cluster, float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of the gradients of all stages is {total.item()}, which cannot be clipped")
        return total.to(cluster.device, non_blocking=True)  # which torch would wait for

    with replaced(clip_grad, "_get_total_norm", total_norm):
        yield


@torch.no_grad()
def global_norm(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], cluster: Cluster, norm_type: float = 2.0
) -> Tensor:
    """The norm of the gradients of all processes. Every process calls it.

    Args:
        gradients: those of this process. If one is the ``grad`` of a parameter that several processes hold, it counts
            once.
        parameters: see :func:`norms_over_stages`.
    Returns:
        On the host, shape ``()``. It equals the norm in a single process bit for bit: every parameter's norm is
        computed by its owner, and the norm of the norms by everybody in the same order.
    """
    position = {id(p.grad): i for i, p in enumerate(parameters) if p.grad is not None}
    places = [position.get(id(gradient)) for gradient in gradients]
    known = [i for i in places if i is not None]
    # float64 is exact for the sum with other processes' zeros, and for the mean of equal norms
    norms = torch.zeros(2, len(parameters) + cluster.group.world_size, dtype=torch.float64)
    if known:
        own = [gradient for gradient, i in zip(gradients, places, strict=True) if i is not None]
        norms[0, known] = torch.stack(torch._foreach_norm(own, norm_type)).cpu().double()
        norms[1, known] = 1.0
    others = [gradient for gradient, i in zip(gradients, places, strict=True) if i is None]
    if others:  # of no parameter that all processes know, such as a plugin's copies in another precision
        of_others = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(others, norm_type)), norm_type)
        norms[:, len(parameters) + cluster.rank] = torch.stack(
            [of_others.cpu().double(), torch.ones((), dtype=torch.float64)]
        )
    cluster.group.sum(norms)
    dtype = parameters[0].dtype if parameters else torch.float32
    present = norms[1] > 0
    return torch.linalg.vector_norm((norms[0, present] / norms[1, present]).to(dtype), norm_type)
