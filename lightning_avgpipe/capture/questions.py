"""Questions: where a step learns numbers of values, so that what it does next may differ between micro-batches.

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

# Their results are as long as the numbers have it, ...
_LENGTHS = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"))
# ... and so are those of these, given such a result ...
_SAME = frozenset(("squeeze", "flatten", "view", "reshape", "to", "cpu", "long", "int", "detach", "__getitem__"))
# ... which these tell.
_TELL = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel))  # type: ignore[attr-defined]


class Questions:
    """Follows the glue of one step."""

    def __init__(self) -> None:
        self._sized: set[int] = set()  # values whose length depends on numbers

    def asked(self, name: str, inputs: Sequence[int], result: Any) -> bool:
        """Whether a glue operation that took these values gave numbers, or as many tensors as numbers have it."""
        if name == "unbind":
            return not self._sized.isdisjoint(inputs)
        return bool(inputs) and any(isinstance(leaf, (bool, int, float)) for leaf in tree.flatten(result)[0])

    def told(self, func: Any, inputs: Sequence[int]) -> bool:
        """Whether a function that reads a description of these values gives a length that depends on numbers."""
        return func in _TELL and not self._sized.isdisjoint(inputs)

    def note(
        self, name: str, args: Sequence[Any], inputs: Sequence[int], masks: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """An operation gave these values.

        Args:
            name: of its function.
            args: what it took.
            inputs: values among that.
            masks: those of them that are tensors of truth values, and not the first thing that it took.
            outputs: what it gave.
        """
        new = name in _LENGTHS or (name == "where" and len(args) == 1) or (name == "__getitem__" and masks)
        if (new and inputs) or (name in _SAME and not self._sized.isdisjoint(inputs)):
            self._sized.update(outputs)
