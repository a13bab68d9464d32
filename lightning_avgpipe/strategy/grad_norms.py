"""``lightning.pytorch.utilities.grad_norm`` over all stages, under whatever name user code has imported it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_avgpipe.comm.cluster import Cluster

# Lightning's own, also while that does something else.
_of_process = FunctionType(grad_norm.__code__, grad_norm.__globals__, grad_norm.__name__, grad_norm.__defaults__)


@contextlib.contextmanager
def reports_over_stages(cluster: Cluster) -> Iterator[None]:
    """Within this context ``grad_norm`` tells of the gradients of all processes. Each must call it equally often."""
    code, attributes = grad_norm.__code__, vars(grad_norm)
    grad_norm.__code__, attributes["over_stages"] = _redirected.__code__, partial(norms_over_stages, cluster)
    try:
        yield
    finally:
        grad_norm.__code__ = code
        del attributes["over_stages"]


def norms_over_stages(
    cluster: Cluster, module: nn.Module, norm_type: float | int | str, group_separator: str
) -> dict[str, Tensor]:
    """As ``grad_norm``, of the gradients of all processes. All of them call it, and get the same, on the host."""
    prefix = "_".join(("grad", str(float(norm_type)), "norm"))
    own = {name: norm.cpu() for name, norm in _of_process(module, norm_type, group_separator).items()}
    found = {name: norm for norms in cluster.group.exchange_objects(own) for name, norm in norms.items()}
    names = (f"{prefix}{group_separator}{name}" for name, _ in module.named_parameters())
    norms = {name: found[name] for name in names if name in found}
    if norms:
        norms[f"{prefix}_total"] = torch.tensor(list(norms.values())).norm(float(norm_type))
    return norms


def _redirected(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> Any:
    # its code takes the place of that of grad_norm, which finds itself in its own file
    return grad_norm.over_stages(module, norm_type, group_separator)  # type: ignore[attr-defined]
