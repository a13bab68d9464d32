"""What is tried: a model of a library, with a batch for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

__all__ = ["Case", "Source"]


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: unique in its source.
        kind: what the model is for, such as ``causal language model``.
        first: whether no case before has the same body; with another head it is tried once more.
        candidates: each makes the model and a batch, a dict of its keyword arguments that can be split along the first
            dimension; the first candidate counts that trains without stages.
        loss: what training minimises, given what the model returned.
    """

    name: str
    kind: str
    first: bool
    candidates: Sequence[Callable[[], tuple[nn.Module, dict[str, Any]]]]
    loss: Callable[[Any], Any] = lambda output: output["loss"] if isinstance(output, dict) else output[0]


class Source(Protocol):
    """A library."""

    name: str
    version: str

    def cases(self) -> Iterator[Case]:
        """All that is tried, in order."""
