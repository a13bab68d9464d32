"""Lightning's side of the simulated device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from tests.simulated import device


class SimulatedAccelerator(Accelerator):
    """``Trainer(accelerator=SimulatedAccelerator())``."""

    def setup_device(self, device: torch.device) -> None:
        torch.get_device_module(device).set_device(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else [int(number) for number in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(device.NAME, number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        return device.NUM_DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return device.NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}
