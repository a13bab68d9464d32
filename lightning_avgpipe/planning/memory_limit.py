"""How much memory a stage may use on its device."""

from __future__ import annotations

import math
import os
import re

import torch

from lightning_avgpipe.errors import ConfigurationError

__all__ = ["MemoryLimit", "free_bytes", "limit_of", "parse_limit"]

MemoryLimit = str | int | float | None
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_limit(limit: MemoryLimit) -> float:
    """Bytes, or a fraction of the device if it is at most 1; infinite for None.

    Raises:
        ConfigurationError: neither bytes, nor a size such as "10GB", nor a fraction.
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
    """Bytes that one stage may use.

    Args:
        limit: as the user gave it: bytes for each stage, or a fraction of the device for all of its stages.
        device: that hosts the stage.
        sharing: stages that share the device.
    """
    number = parse_limit(limit)
    return number * _total(device) / sharing if number <= 1 else number


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses now; on a host that does not tell, all of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except ValueError:
        return _total(device)


def _total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
