"""Questions: where a step learns numbers of values, so that what it does next may differ between micro-batches.

::

    if chosen.any(): ...                        a number
    for expert in hit.nonzero().squeeze(-1):    as many tensors as the numbers have it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_avgpipe.utils import tree

# Their results are as long as the numbers have it, ...
_LENGTHS = frozenset(("nonzero", "argwhere", "unique", "unique_consecutive"))
# ... and so are those of these, given such a result.
_SAME = frozenset(("squeeze", "flatten", "view", "reshape", "to", "cpu", "long", "int", "detach"))


class Questions:
    """Follows the glue of one step."""

    def __init__(self) -> None:
        self._sized: set[int] = set()  # values whose length depends on numbers

    def asked(self, name: str, inputs: Sequence[int], result: Any) -> bool:
        """Whether a glue operation that took these values gave numbers, or as many tensors as numbers have it."""
        if name == "unbind":
            return not self._sized.isdisjoint(inputs)
        return bool(inputs) and any(isinstance(leaf, (bool, int, float)) for leaf in tree.flatten(result)[0])

    def note(self, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """An operation gave these values."""
        if (name in _LENGTHS and inputs) or (name in _SAME and not self._sized.isdisjoint(inputs)):
            self._sized.update(outputs)
