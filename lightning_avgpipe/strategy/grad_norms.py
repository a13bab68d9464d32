"""``lightning.pytorch.utilities.grad_norm`` over all stages, under whatever name user code has imported it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.utils.lightning import grad_norm

# Lightning's own function, which stays as it is while the code of grad_norm is replaced.
_of_process = FunctionType(grad_norm.__code__, grad_norm.__globals__, grad_norm.__name__, grad_norm.__defaults__)


@contextlib.contextmanager
def reports_over_stages(cluster: Cluster) -> Iterator[None]:
    """Within this context ``grad_norm`` reports the gradients of all processes. Each must call it equally often."""
    code, attributes = grad_norm.__code__, dict(vars(grad_norm))
    grad_norm.__code__ = _redirected.__code__
    grad_norm.over_stages = partial(norms_over_stages, cluster)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        grad_norm.__code__, grad_norm.__dict__ = code, attributes


def norms_over_stages(
    cluster: Cluster, module: nn.Module, norm_type: float | int | str, group_separator: str
) -> dict[str, Tensor]:
    """Return what ``grad_norm`` returns, for the gradients of all processes, on the host. Every process calls it."""
    prefix = "_".join(("grad", str(float(norm_type)), "norm"))
    own = {name: norm.cpu() for name, norm in _of_process(module, norm_type, group_separator).items()}
    found = {name: norm for norms in cluster.group.exchange_objects(own) for name, norm in norms.items()}
    names = (f"{prefix}{group_separator}{name}" for name, _ in module.named_parameters())
    norms = {name: found[name] for name in names if name in found}
    if norms:
        norms[f"{prefix}_total"] = torch.tensor(list(norms.values()), device="cpu").norm(float(norm_type))
    return norms


def _redirected(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> Any:
    # its code takes the place of that of grad_norm, which finds itself in its own file
    return grad_norm.over_stages(module, norm_type, group_separator)  # type: ignore[attr-defined]
