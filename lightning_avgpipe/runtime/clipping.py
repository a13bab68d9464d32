"""Clipping by the norm of all stages' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_avgpipe.runtime.mesh import Mesh

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(
    parameters: Sequence[Tensor], max_norm: float, mesh: Mesh, counts: Callable[[Tensor], bool]
) -> Tensor:
    """Scale the gradients of this process such that the norm over all processes is at most ``max_norm``.

    Args:
        parameters: the same parameters, in the same order, on all processes; gradients only where they are owned.
        max_norm: largest norm.
        counts: whether this process answers for a parameter; copies on several processes count once.
    Returns:
        The norm before clipping, on the host, shape ``()``. It equals the one of a single process bit for bit: every
        parameter's norm is computed by its owner, and the norm of the norms by everybody in the same order.
    """
    own = [i for i, p in enumerate(parameters) if p.grad is not None and counts(p)]
    gradients = [gradient for i in own if (gradient := parameters[i].grad) is not None]
    norms = torch.zeros(2, len(parameters), dtype=torch.float64)  # exact for the sum with other processes' zeros
    if gradients:
        norms[0, own] = torch.stack(torch._foreach_norm(gradients)).cpu().double()
        norms[1, own] = 1.0
    mesh.sum(norms)
    dtype = parameters[0].dtype if parameters else torch.float32
    total = torch.linalg.vector_norm(norms[0, norms[1] > 0].to(dtype))
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, total)
    return total
