"""Checks of parallel models between steps: for hooks that change only one model, and for infinite or NaN values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.tensors import digest

_FIRST = 2  # number of first steps after which checksums are taken


class Checksums:
    """A detector of hooks that change weights between steps: hooks see the weights of pipeline 0 only.

    A hook that clamps weights after each step would silently leave all other models unchanged. Most hooks act from the
    first step on, or at the end of an epoch. So checksums are taken after the first steps and after the last step of an
    epoch, and compared when the next step begins.

    Args:
        weights: weights that hooks see between steps, by name; the mapping is read at each check.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._left = _FIRST
        self._marked: tuple[list[str], Tensor] | None = None

    def set(self, last: bool) -> None:
        """Take checksums at the end of a step, if it is one of the first or the last of an epoch.

        Args:
            last: whether the step is the last one of an epoch.
        """
        self._marked = None
        if self._weights and (self._left or last):
            self._left = max(0, self._left - 1)
            self._marked = list(self._weights), digests(self._weights)

    def forget(self) -> None:
        """Drop the checksums, because this package, or user code that sees all models, is about to change weights."""
        self._marked = None

    def check(self, others: int) -> None:
        """Compare the weights with their checksums, at the beginning of a step.

        Args:
            others: number of models that hooks do not see, for the message.

        Raises:
            ConfigurationError: some weights have changed; the message names them.
        """
        if self._marked is None:
            return
        (names, before), self._marked = self._marked, None
        here = {name: self._weights[name] for name in names}
        differ = (digests(here) != before).tolist()
        changed = [f"'{name}'" for name, differs in zip(names, differ, strict=True) if differs]
        if changed:
            raise ConfigurationError(
                f"between two steps a hook (say on_train_batch_end, or code after the step in optimizer_step) has "
                f"changed {listed(changed)} of pipeline 0's model, which hooks see, and not of the "
                f"{others} other parallel model(s). Change each of them, 'for n in range(strategy.num_pipelines): with "
                "strategy.parallel_model(n) as model: ...', or use num_pipelines=1"
            )


def digests(weights: Mapping[str, Tensor]) -> Tensor:
    """Return the checksums of weights, in their order."""
    found = [digest(weight) for weight in weights.values()]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device="cpu")


def has_nonfinite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a scalar tensor on the device: 1 if a tensor has an infinite or NaN element, otherwise 0.

    It reads each tensor once, which takes about as long as clipping, and does not wait for the device.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        if real.numel():
            by_type.setdefault((real.dtype, real.device), []).append(real)
    found = torch.zeros((), device=device)
    for same_type in by_type.values():
        largest = torch.stack(torch._foreach_norm(same_type, math.inf))  # NaN if an element is
        found = torch.maximum(found, (~torch.isfinite(largest)).any().to(device, found.dtype))
    return found


def first_nonfinite(named: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that has an infinite or NaN element; None if there is none."""
    return next((name for name, tensor in named.items() if has_nonfinite([tensor], tensor.device)), None)
