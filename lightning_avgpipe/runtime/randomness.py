"""Random numbers that depend on what is computed, not on where or when.

A drawing node gets a stream of its own, seeded by (seed, iteration, pipeline, micro-batch, name, occurrence), so
partition, schedule and advance do not change a result. The process's own streams are left as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["RandomKey", "host_stream", "stream"]


@dataclass(frozen=True)
class RandomKey:
    """Names one execution of a step function.

    Attributes:
        seed: of the run, the same on all ranks.
        iteration: batches seen so far.
        pipeline: n, 0-based.
        micro_batch: i, 0-based.
    """

    seed: int
    iteration: int = 0
    pipeline: int = 0
    micro_batch: int = 0

    def derive(self, name: str, occurrence: int = 0) -> int:
        """A 63-bit seed for one drawing node of this execution."""
        text = f"{self.seed}/{self.iteration}/{self.pipeline}/{self.micro_batch}/{name}/{occurrence}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def stream(seed: int, device: torch.device) -> Iterator[None]:
    """Draw torch's random numbers from a fresh stream, then go on with the old one."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def host_stream(seed: int) -> Iterator[None]:
    """The same for the generators of Python and NumPy."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
