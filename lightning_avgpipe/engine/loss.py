"""Find the loss in the result of a training step, and compute its weight in the mean over the batch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent

# A function that returns the weight of a micro-batch, or the name of a leaf whose entries other than _IGNORED count.
LossWeight = Callable[[Any], Any] | str

_IGNORED = -100  # the default ignore_index of torch's losses


def trainable_loss(result: Any) -> torch.Tensor:
    """Return the loss, from which a backward can start, in what training_step returned for a micro-batch.

    Raises:
        ConfigurationError: there is no loss, it is not a single number, or it needs no gradient.
    """
    found = loss_in(result)
    if found.numel() != 1:
        raise ConfigurationError(
            f"training_step returned a loss of shape {tuple(found.shape)}, and a backward starts from one number; "
            "reduce it, for instance by loss.mean()"
        )
    if not found.requires_grad:
        raise ConfigurationError(
            "training_step returned a loss that needs no gradient, so that nothing would be trained: it was detached "
            "(.detach(), .item(), torch.no_grad()), or no parameter that it depends on has requires_grad=True. Return "
            "the loss with its graph and unfreeze what is to be trained, or return None to skip the batch"
        )
    return found


def loss_in(result: Any) -> torch.Tensor:
    """Return the loss in what training_step returned; only its type is checked.

    Raises:
        ConfigurationError: there is no loss, or it is no tensor.
    """
    found = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(found, torch.Tensor):
        raise ConfigurationError(
            f"training_step returned {type(result).__name__} without a loss for one micro-batch; it must return a "
            "tensor, or a dict with the key 'loss', or None to skip it"
        )
    return found


def weighted(parts: Sequence[MicroBatch], loss_weight: LossWeight) -> list[MicroBatch]:
    """Return the micro-batches, each weighted by its share of the batch's weight.

    If all weights are 0, the micro-batches keep their weights: the loss of such a batch is NaN anyway.

    Args:
        parts: micro-batches of a batch.
        loss_weight: returns the weight of a micro-batch, in any unit; or the name of a leaf.
    Raises:
        ConfigurationError: no leaf has the name, or a weight is not a finite number of at least 0.
    """
    weights = counts([part.data for part in parts], loss_weight)
    total = sum(weights)
    return [
        replace(part, weight=weight / total if total else part.weight, count=weight)
        for part, weight in zip(parts, weights, strict=True)
    ]


def counts(parts: Sequence[Any], loss_weight: LossWeight) -> list[float]:
    """Return the weights of micro-batches, in any unit. The host waits for the device once.

    Raises:
        ConfigurationError: no leaf has the name, or a weight is not a finite number of at least 0.
    """
    if isinstance(loss_weight, str):
        return _numbers(_targets([_leaf(data, loss_weight) for data in parts]))
    found = [loss_weight(data) for data in parts]
    weights = _numbers(found)
    for given, weight in zip(found, weights, strict=True):
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigurationError(
                f"loss_weight returned {given!r} for a micro-batch; it must be a number of at least 0"
            )
    return weights


def _numbers(found: Sequence[Any]) -> list[float]:
    """Return numbers, which may be in tensors. If all tensors are of one kind, the host waits for the device once."""
    alike = {(one.device, one.dtype, one.numel()) if isinstance(one, Tensor) else None for one in found}
    if len(alike) == 1 and (kind := next(iter(alike))) is not None and kind[2] == 1:
        found = torch.stack([one.detach().reshape(()) for one in found]).tolist()
    return list(map(float, found))


def _targets(labels: Sequence[Tensor]) -> list[Tensor]:
    """Return the number of entries of each tensor that are not ignored, as tensors on the device of the first."""
    return [(leaf != _IGNORED).sum().to(labels[0].device) for leaf in labels]


def _leaf(data: Any, name: str) -> Tensor:
    leaves = {_plain(path): leaf for path, leaf in tree.flatten_with_names(data)[0] if isinstance(leaf, Tensor)}
    if name not in leaves:
        raise ConfigurationError(
            f"loss_weight={name!r}: the batch has no such tensor, but {', '.join(map(repr, leaves))}; name one of "
            "them, or give a function of a micro-batch that returns a number"
        )
    return leaves[name]


def _plain(path: str) -> str:
    """Return a leaf's name as users write it: ``['labels']`` is ``labels``, ``[1].mask`` is ``1.mask``."""
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", path).lstrip(".")


def uneven_targets(parts: Sequence[MicroBatch]) -> str | None:
    """Return the name of an integer tensor whose share of ignored entries differs between micro-batches, or None."""
    labels = [
        (_plain(path), leaf)
        for part in parts
        for path, leaf in tree.flatten_with_names(part.data)[0]
        if isinstance(leaf, Tensor) and not isinstance(leaf, Absent) and _holds_labels(leaf)
    ]
    shares: dict[str, set[float]] = {}
    for (name, leaf), count in zip(labels, _numbers(_targets([leaf for _, leaf in labels])), strict=True):
        shares.setdefault(name, set()).add(count / leaf.numel())
    return next((name for name, found in shares.items() if len(found) > 1), None)


def _holds_labels(leaf: Tensor) -> bool:
    integer = not (leaf.is_floating_point() or leaf.is_complex() or leaf.is_nested) and leaf.dtype.itemsize > 1
    return integer and leaf.dim() > 0 and leaf.numel() > 0
