"""Batch normalisation over the micro-batches that the replicas of a stage process at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work

# The arguments of torch.batch_norm, whose order differs from torch.nn.functional's.
_IN_TORCH = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
_WHAT = "a batch normalisation (sync_batchnorm=True)"


class SharedStatistics(Observer):
    """An observer that makes ``batch_norm`` in training use the statistics of all replicas, as ``SyncBatchNorm`` does.

    All replicas of the stage run the same actions in the same order. Each gathers count, mean and variance from all of
    them in the forward, and two sums per channel in the backward, and combines them in the order of the replicas. So
    all get bitwise equal results, also in running statistics. This works for any module that calls
    :func:`torch.nn.functional.batch_norm`.

    Args:
        members: replicas of the stage, connected by a process group of their own.
        on_host: whether tensors are gathered on the host.
    """

    def __init__(self, members: Collectives, on_host: bool) -> None:
        self._members = members
        self._on_host = on_host

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action within the mode, which autograd also enters in its threads for the backward."""
        with _Synchronised(self.gathered):
            return do()

    def gathered(self, mine: Tensor) -> Tensor:
        """Gather the tensors of all R replicas; return a tensor of shape ``(R, *mine.shape)``."""
        sent = mine.detach().cpu() if self._on_host else mine.detach().contiguous()
        parts = [torch.empty_like(sent) for _ in self._members.ranks]
        work = self._members.process_group.allgather(parts, sent)
        self._members.wait_for(work, _WHAT)
        return torch.stack(parts).to(mine.device)


class _Synchronised(TorchFunctionMode):
    """A context in which ``batch_norm`` in training normalises with the statistics of all replicas."""

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._gather = gather

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return self._normalised(*args, **kwargs)
        if func is torch.batch_norm:
            given = {**dict(zip(_IN_TORCH, args, strict=False)), **kwargs}
            return self._normalised(**{name: value for name, value in given.items() if name != "cudnn_enabled"})
        return func(*args, **kwargs)

    def _normalised(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        normalised, mean, variance, count = _Normalise.apply(input, eps, self._gather)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        shape = _of_channels(input)
        if weight is not None:
            normalised = normalised * weight.view(shape)
        if bias is not None:
            normalised = normalised + bias.view(shape)
        return normalised.to(input.dtype)


class _Normalise(torch.autograd.Function):
    """A normalisation by channel, ``(x - mean) / sqrt(variance + eps)``, with mean and variance of all replicas.

    The gradient, where xhat is the result, and sums run over the N samples and positions of all replicas::

        dx = (dy - sum(dy) / N - xhat sum(dy xhat) / N) / sqrt(variance + eps)
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, eps: float, gather: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims, shape = _but_channels(x), _of_channels(x)
        mine = x.numel() / max(1, x.shape[1])
        own = torch.full((1,), mine, dtype=wide.dtype, device=wide.device)
        if x.numel():
            variance, mean = torch.var_mean(wide, dims, correction=0)
        else:
            variance = mean = wide.new_zeros(x.shape[1])
        found = gather(torch.cat([own, mean, variance]))
        counts, means, variances = found[:, :1], *found[:, 1:].chunk(2, dim=1)
        count = counts.sum()
        if mine <= 1 and count <= 1:  # comparing the sum makes the host wait, so only if this replica has so few
            raise ValueError(
                f"batch normalisation in training needs more than one value per channel of all replicas together, but "
                f"the input of this one has the shape {tuple(x.shape)}"
            )
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        inverse = (variance + eps).rsqrt()
        normalised = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normalised, inverse, count)
        ctx.gather, ctx.dtype = gather, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        normalised, inverse, count = ctx.saved_tensors
        dims, shape = _but_channels(normalised), _of_channels(normalised)
        own = torch.cat([gradient.sum(dims), (gradient * normalised).sum(dims)])
        first, second = (ctx.gather(own).sum(0) / count).chunk(2)
        found = gradient - first.view(shape) - normalised * second.view(shape)
        return (found * inverse.view(shape)).to(ctx.dtype), None, None


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _of_channels(x: Tensor) -> list[int]:
    """Return the shape in which values by channel broadcast to ``x``."""
    return [-1 if dim == 1 else 1 for dim in range(x.ndim)]
