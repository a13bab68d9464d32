"""Types of integer options: a command line refuses wrong ones while parsing, if jsonargparse is there to parse it."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Count", "Natural"]

if TYPE_CHECKING:
    Count = int
    Natural = int
else:
    try:
        from jsonargparse.typing import NonNegativeInt as Natural
        from jsonargparse.typing import PositiveInt as Count
    except ImportError:  # no LightningCLI either; checks.py checks all of it once more
        Count = Natural = int
