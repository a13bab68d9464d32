"""The option ``memory_limit``: how much memory a stage may use on its device."""

from __future__ import annotations

import math
import re

import torch

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.device import port_of

MemoryLimit = str | int | float | None
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_limit(limit: MemoryLimit) -> float:
    """Parse a limit into bytes or, if the result is at most 1, a fraction of the device's memory; infinite for None.

    Raises:
        ConfigurationError: the limit is not a number of bytes, a size such as "10GB", or a fraction.
    """
    if limit is None:
        return math.inf
    number = -1.0
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", limit, re.IGNORECASE)
        if found is not None:
            base = 1024 if found.group(3) else 1000
            number = float(found.group(1)) * base ** _PREFIXES[found.group(2).upper()]
    elif isinstance(limit, (int, float)) and not isinstance(limit, bool):
        number = float(limit)
    if not 0 < number < math.inf:
        raise ConfigurationError(
            f"memory_limit={limit!r}: must be a size such as '10GB' or '512MiB', a number of bytes, or a fraction of "
            "the device's memory between 0 and 1"
        )
    return number


def limit_of(limit: MemoryLimit, device: torch.device, sharing: int) -> float:
    """Return the bytes that one stage may use.

    Args:
        limit: limit as the user gave it: bytes for each stage, or a fraction of the device for all of its stages.
        device: device that hosts the stage.
        sharing: number of stages that share the device.
    """
    number = parse_limit(limit)
    return number * port_of(device).memory.total_bytes() / sharing if number <= 1 else number
