"""Types of options: a command line refuses wrong ones while parsing, if jsonargparse is there to parse it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_avgpipe.utils.durations import PATTERN

__all__ = ["Count", "Duration", "Natural", "TensorName"]

if TYPE_CHECKING:
    Count = int
    Natural = int
    Duration = str
    TensorName = str
else:
    try:
        from jsonargparse.typing import NonNegativeInt as Natural
        from jsonargparse.typing import PositiveInt as Count
        from jsonargparse.typing import restricted_string_type

        Duration = restricted_string_type("Duration", PATTERN)
        # Beside functions: what has a dot is an import path of one.
        TensorName = restricted_string_type("TensorName", "^[^.]+$")
    except ImportError:  # no LightningCLI either; all of it is checked once more
        Count = Natural = int
        Duration = TensorName = str
