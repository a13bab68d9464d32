"""Random profiles of pipelines, for tests of the tuner."""

from __future__ import annotations

import functools
import operator
import random

from lightning_avgpipe.planning import Link
from lightning_avgpipe.tuning.profile import Curve, HopProfile, Profile, StageMemory, StageProfile


def random_profile(seed: int, in_turns: bool = False) -> Profile:
    """Make a pipeline of 2 to 6 uneven stages, profiled at M=64 and N=1; the same for the same seed."""
    rng = random.Random(seed)
    num_stages = rng.randint(2, 6)
    fullness, transfer = rng.uniform(0.02, 0.4), rng.uniform(0.02, 1.0)
    mib = 2**20

    def curve(seconds: float) -> Curve:
        shares = [rng.uniform(0.2, 1) for _ in range(4)]
        used = [min(1.0, fullness * rng.uniform(0.2, 1.8)) for _ in shares]
        total = functools.reduce(operator.add, shares)  # sum() rounds otherwise from Python 3.12 on
        return Curve(tuple(seconds * share / total for share in shares), tuple(used))

    stages = []
    for _ in range(num_stages):
        forward_s = 1e-3 * rng.uniform(0.7, 1.3)
        memory = StageMemory(
            300 * mib, rng.randint(50, 200) * mib, rng.randint(20, 80) * mib, rng.randint(100, 900) * mib,
            rng.randint(10, 90) * mib, rng.randint(1, 30) * mib,
        )  # fmt: skip
        stages.append(StageProfile(curve(forward_s), curve(forward_s * rng.uniform(1.5, 2.5)), memory))
    hops = []
    for _ in range(num_stages - 1):
        size = 1e5 * rng.uniform(0.5, 1.5)
        link = Link(transfer * 1e-3 * fullness / 1e5, rng.uniform(0, 1e-4))
        hops.append(HopProfile(size, size, link))
    return Profile(64, 64, tuple(stages), tuple(hops), in_turns, tuple(range(num_stages)))
