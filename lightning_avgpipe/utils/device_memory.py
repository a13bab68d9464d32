"""The total and used memory of a device, in bytes."""

from __future__ import annotations

import os
from typing import Any

import torch


class DeviceMemory:
    """The memory of the host, for which torch does not count allocations.

    Attributes:
        is_counted: whether an allocator counts what is allocated.
    """

    is_counted = False

    def total_bytes(self) -> int:
        """Return the total memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_bytes(self) -> int:
        """Return the memory that is free now, or the total where the host does not report this."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except ValueError:
            return self.total_bytes()

    def other_bytes(self) -> int:
        """Return the used memory without the part that this process's allocator has reserved."""
        return 0

    def allocated_bytes(self) -> int:
        """Return the memory that tensors of this process use now; 0 where it is not counted."""
        return 0

    def peak_bytes(self) -> int:
        """Return the peak memory of tensors since the last :meth:`reset_peak`; 0 where it is not counted."""
        return 0

    def reset_peak(self) -> None:
        """Reset the peak to what is used now."""


class AllocatorMemory(DeviceMemory):
    """The memory of a device that has an allocator of torch.

    Args:
        device: device whose memory this is.
        module: torch's module for the device, such as ``torch.cuda``.
    """

    is_counted = True

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._torch = module

    def total_bytes(self) -> int:
        return int(self._torch.get_device_properties(self._device).total_memory)

    def free_bytes(self) -> int:
        return int(self._torch.mem_get_info(self._device)[0])

    def other_bytes(self) -> int:
        free, total = self._torch.mem_get_info(self._device)
        return max(0, total - free - self._torch.memory_reserved(self._device))

    def allocated_bytes(self) -> int:
        return int(self._torch.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        # includes memory that was freed while other streams used it, such as messages, as it is not available either
        found = self._torch.memory_stats(self._device).get("active_bytes.all.peak")
        return int(self._torch.max_memory_allocated(self._device) if found is None else found)

    def reset_peak(self) -> None:
        self._torch.reset_peak_memory_stats(self._device)
