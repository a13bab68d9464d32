"""Notes at parameters on meta: each says where the contents lie, until it is known which process reads them.

A note stays with the parameter object, whatever name or module the parameter gets afterwards.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_NOTE = "_avgpipe_note"


class Stored(Protocol):
    """A store of weights, each under a key."""

    @property
    def keys(self) -> Collection[str]:
        """The keys of all parameters that have a note."""

    def read(self, key: str, parameter: nn.Parameter, device: torch.device, example: bool = False) -> Tensor:
        """Read the contents of a parameter into memory of their own.

        Args:
            key: key in the note of the parameter.
            parameter: parameter with the note.
            device: device of the contents.
            example: whether other numbers will do, because a step is only captured with them.
        """

    def forget(self, parameter: nn.Parameter) -> None:
        """Remove what reading an example has left in a parameter without contents."""


@dataclass(frozen=True)
class Note:
    """A note that says where the contents of one parameter lie.

    Attributes:
        stored: store that has the contents.
        key: key of the parameter in the store.
    """

    stored: Stored
    key: str


def leave_note(parameter: nn.Parameter, note: Note) -> None:
    """Leave a note at a parameter."""
    setattr(parameter, _NOTE, note)


def note_of(parameter: nn.Parameter) -> Note | None:
    """Return the note at a parameter without contents, or None if it has none."""
    return getattr(parameter, _NOTE, None) if parameter.is_meta else None
