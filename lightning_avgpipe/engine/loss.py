"""Find the loss in what a training step returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_avgpipe.errors import ConfigurationError


def trainable_loss(result: Any) -> torch.Tensor:
    """Return the loss in what training_step returned for a micro-batch, from which a backward can start.

    Raises:
        ConfigurationError: there is no loss, it is no single number, or it needs no gradient.
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
    """Return the loss in what training_step returned, unchecked apart from its type."""
    found = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(found, torch.Tensor):
        raise ConfigurationError(
            f"training_step returned {type(result).__name__} without a loss for one micro-batch; it must return a "
            "tensor, or a dict with the key 'loss', or None to skip it"
        )
    return found
