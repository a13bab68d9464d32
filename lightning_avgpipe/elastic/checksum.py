"""Checksums: whether hooks between two steps have changed the weights of pipeline 0, which are the ones that they see.

A hook that clamps weights after each step would leave all other models as they are, and no error would tell. What hooks
do they do from the beginning on, or at the end of an epoch, so checksums are taken after the first steps and after the
last one of an epoch, and compared when the next begins. A checksum is two numbers for each tensor: its sum, and that of
its bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import listed

_FIRST = 2  # steps
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksums:
    """Of one model's weights.

    Args:
        weights: that hooks see between steps, by name, as they are at any time.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._left = _FIRST
        self._marked: tuple[list[str], Tensor] | None = None

    def set(self, last: bool) -> None:
        """A step has ended; ``last``: of an epoch."""
        self._marked = None
        if self._weights and (self._left or last):
            self._left = max(0, self._left - 1)
            self._marked = list(self._weights), _sums(self._weights)

    def forget(self) -> None:
        """Somebody may change the weights who changes those of all models."""
        self._marked = None

    def check(self, others: int) -> None:
        """The next step begins.

        Args:
            others: number of models that no hook has seen.
        Raises:
            ConfigurationError: they are not as they were; names them.
        """
        if self._marked is None:
            return
        (names, before), self._marked = self._marked, None
        here = {name: self._weights[name] for name in names}
        differ = (_sums(here) != before).any(1).tolist()
        changed = [f"'{name}'" for name, differs in zip(names, differ, strict=True) if differs]
        if changed:
            raise ConfigurationError(
                f"between two steps a hook (say on_train_batch_end, or code after the step in optimizer_step) has "
                f"changed {listed(changed)} of pipeline 0's model, which hooks see, and not of the "
                f"{others} other parallel model(s). Change each of them, 'for n in range(strategy.num_pipelines): with "
                "strategy.parallel_model(n) as model: ...', or use num_pipelines=1"
            )


def _sums(weights: Mapping[str, Tensor]) -> Tensor:
    """Shape ``(tensors, 2)``."""
    found = []
    for weight in weights.values():
        numbers = torch.view_as_real(weight.detach()) if weight.is_complex() else weight.detach()
        bits = numbers.view(_INTEGERS[numbers.element_size()])
        # as bits too, for of numbers that are none no two are equal
        total = numbers.sum(dtype=torch.float64).view(torch.int64)
        found.append(torch.stack([total, bits.sum(dtype=torch.int64)]))
    return torch.stack(found)
