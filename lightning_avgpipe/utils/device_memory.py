"""What memory a device has, and what is used of it, in bytes."""

from __future__ import annotations

import os
from typing import Any

import torch


class DeviceMemory:
    """The memory of the host, which counts nothing.

    Attributes:
        is_counted: whether an allocator says what is allocated.
    """

    is_counted = False

    def total_bytes(self) -> int:
        """All that there is."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_bytes(self) -> int:
        """What nobody uses now; on a host that does not tell, all of it."""
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except ValueError:
            return self.total_bytes()

    def other_bytes(self) -> int:
        """What is used besides what the allocator has reserved."""
        return 0

    def allocated_bytes(self) -> int:
        """What tensors of this process use now; 0 where this is not counted."""
        return 0

    def peak_bytes(self) -> int:
        """The most that they used since the last :meth:`reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Begin anew to look for the peak."""


class AllocatorMemory(DeviceMemory):
    """Memory with an allocator of torch's.

    Args:
        device: the device.
        module: torch's for it, such as ``torch.cuda``.
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
        # with what was freed while other streams were using it, such as messages: nobody can have that either
        found = self._torch.memory_stats(self._device).get("active_bytes.all.peak")
        return int(self._torch.max_memory_allocated(self._device) if found is None else found)

    def reset_peak(self) -> None:
        self._torch.reset_peak_memory_stats(self._device)
