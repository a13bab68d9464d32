"""Costs of units in the form that SPP's planner takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_avgpipe.errors import PartitionError


@dataclass(frozen=True)
class SppCosts:
    """The costs of the L units of a model, for one micro-batch on one device.

    Attributes:
        forward_s: seconds of the forward of each unit, shape ``(L,)``.
        backward_s: seconds of the backward of each unit, shape ``(L,)``.
        bytes_forward: bytes of activations from each unit to the next, shape ``(L-1,)``.
        bytes_backward: bytes of gradients to each unit from the next, shape ``(L-1,)``.
        parameter_bytes: bytes of the parameters of each unit, shape ``(L,)``.
    Raises:
        PartitionError: no unit, lengths that do not fit together, or a number that is negative or not finite.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    bytes_forward: tuple[float, ...]
    bytes_backward: tuple[float, ...]
    parameter_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        units = self.num_units
        if units == 0:
            raise PartitionError("forward_s has no entries; give one per unit, at least one")
        between = ("bytes_forward", "bytes_backward")
        for name in ("forward_s", "backward_s", "parameter_bytes", *between):
            numbers, length = getattr(self, name), units - (name in between)
            if len(numbers) != length:
                raise PartitionError(f"{name} has {len(numbers)} entries, but needs {length}: forward_s has {units}")
            if not all(0 <= number < math.inf for number in numbers):
                raise PartitionError(f"{name}={list(numbers)}: numbers must be finite and not negative")

    @property
    def num_units(self) -> int:
        """The number of units L."""
        return len(self.forward_s)

    @cached_property
    def busy_s(self) -> np.ndarray:
        """The seconds of the forwards and backwards of the first l units, shape ``(L+1,)``."""
        return np.concatenate([[0.0], np.cumsum(np.add(self.forward_s, self.backward_s))])

    @cached_property
    def parameters(self) -> np.ndarray:
        """The bytes of the parameters of the first l units, shape ``(L+1,)``."""
        return np.concatenate([[0.0], np.cumsum(self.parameter_bytes)])

    @cached_property
    def messages(self) -> np.ndarray:
        """The bytes that are sent forwards and backwards after each unit, shape ``(2, L)``; 0 after the last one."""
        return np.array([(*self.bytes_forward, 0.0), (*self.bytes_backward, 0.0)])
