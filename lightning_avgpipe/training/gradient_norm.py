"""Gradient norms over all stages, for gradient clipping."""

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
    """Let ``torch.nn.utils.clip_grad_norm_`` clip by the norm over all processes within this context.

    Every process must then call it equally often. It works for every caller: the precision plugin, or a user's own
    code, under any name by which that code has imported it.

    Args:
        parameters: parameters of all processes, in the same order on each; only owners have gradients.
        cluster: cluster of the processes.
    """

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = global_norm(gradients, parameters, cluster, float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of the gradients of all stages is {total.item()}, which cannot be clipped")
        return total.to(cluster.device, non_blocking=True)  # torch would move it and wait

    with replaced(clip_grad, "_get_total_norm", total_norm):
        yield


@torch.no_grad()
def global_norm(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], cluster: Cluster, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the gradients of all processes. Every process calls it.

    Args:
        gradients: gradients of this process. The ``grad`` of a parameter that several processes hold counts once.
        parameters: as of :func:`norms_over_stages`.
        cluster: cluster of the processes.
        norm_type: order of the norm.

    Returns:
        The norm on the host, shape ``()``. It equals the norm in a single process bit for bit: every parameter's norm
        is computed by its owner, and the norm of the norms by all processes in the same order.
    """
    position = {id(p.grad): i for i, p in enumerate(parameters) if p.grad is not None}
    places = [position.get(id(gradient)) for gradient in gradients]
    known = [i for i in places if i is not None]
    # float64 is exact for the sum with other processes' zeros, and for the mean of equal norms
    norms = torch.zeros(2, len(parameters) + cluster.group.world_size, dtype=torch.float64, device="cpu")
    if known:
        own = [gradient for gradient, i in zip(gradients, places, strict=True) if i is not None]
        norms[0, known] = torch.stack(torch._foreach_norm(own, norm_type)).cpu().double()
        norms[1, known] = 1.0
    others = [gradient for gradient, i in zip(gradients, places, strict=True) if i is None]
    if others:  # gradients of other tensors, such as a plugin's copies of parameters in another precision
        of_others = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(others, norm_type)), norm_type)
        norms[:, len(parameters) + cluster.rank] = torch.stack(
            [of_others.cpu().double(), torch.ones((), dtype=torch.float64, device="cpu")]
        )
    cluster.group.sum(norms)
    dtype = parameters[0].dtype if parameters else torch.float32
    present = norms[1] > 0
    return torch.linalg.vector_norm((norms[0, present] / norms[1, present]).to(dtype), norm_type)
