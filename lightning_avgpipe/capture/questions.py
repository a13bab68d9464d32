"""Find out where a step reads numbers of values, so that what it does next may differ between micro-batches.

::

    if chosen.any(): ...                        a number
    for expert in hit.nonzero().squeeze(-1):    as many tensors as the numbers have it
    if len(torch.where(chosen == 3)[0]): ...    a length that depends on numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.utils import tree

# Functions whose results have a length that depends on numbers, ...
_LENGTHS = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"))
# ... functions that keep such a length, ...
_SAME = frozenset(("squeeze", "flatten", "view", "reshape", "to", "cpu", "long", "int", "detach", "__getitem__"))
# ... and functions that return it.
_TELL = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel))  # type: ignore[attr-defined]


class Questions:
    """A record of the values of one step whose length depends on numbers."""

    def __init__(self) -> None:
        self._sized: set[int] = set()  # values whose length depends on numbers

    def asked(self, name: str, inputs: Sequence[int], result: Any) -> bool:
        """Return whether a glue operation on these values gave plain numbers, or as many tensors as numbers tell."""
        if name == "unbind":
            return not self._sized.isdisjoint(inputs)
        return bool(inputs) and any(isinstance(leaf, (bool, int, float)) for leaf in tree.flatten(result)[0])

    def told(self, func: Any, inputs: Sequence[int]) -> bool:
        """Return whether a function that reads a description of these values returns a length that depends on data."""
        return func in _TELL and not self._sized.isdisjoint(inputs)

    def note(
        self, name: str, args: Sequence[Any], inputs: Sequence[int], masks: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Note an operation, in case the length of its results depends on numbers.

        Args:
            name: name of the function.
            args: arguments of the function.
            inputs: values among the arguments.
            masks: values among the arguments after the first that are boolean tensors.
            outputs: values that the function returned.
        """
        new = name in _LENGTHS or (name == "where" and len(args) == 1) or (name == "__getitem__" and masks)
        if (new and inputs) or (name in _SAME and not self._sized.isdisjoint(inputs)):
            self._sized.update(outputs)
