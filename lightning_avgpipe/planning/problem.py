"""A planning problem, and what a plan for it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.network import Network
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.schedule import Schedule, StageCosts, simulate
from lightning_avgpipe.schedule.costs import least_possible_s

BUCKET_BYTES = 4 * 1024**2
"""Of gradients that are all-reduced as one message while a backward computes, at least, but for the last message."""

_SLACK = 0.1  # plans are looked for within this share above evenly shared work, then within twice as much, ...


class Stage(NamedTuple):
    """The units ``begin .. end-1`` on the devices ``first .. stop-1`` of the order."""

    begin: int
    end: int
    first: int
    stop: int

    @property
    def replicas(self) -> int:
        """r."""
        return self.stop - self.first


@dataclass(frozen=True)
class Problem:
    """Units for devices, which are numbered in their order.

    Attributes:
        costs: of the units, on a device that is not slow.
        network: of the devices.
        num_microbatches: M.
        memory_limit: bytes of parameters on a device.
        slowness: how many times as long each device takes, shape ``(V,)``; empty: all take what units cost. Turns know
            of it, and the slowest stage; SPP does not.
        bucket_bytes: of gradients that are all-reduced as one message, while a last backward still computes; turns
            know of it, SPP all-reduces after it.
    """

    costs: SppCosts
    network: Network
    num_microbatches: int
    memory_limit: float | None
    slowness: tuple[float, ...] = ()
    bucket_bytes: float = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.slowness and (len(self.slowness) != len(self.network) or not min(self.slowness) > 0):
            raise PartitionError(
                f"slowness={list(self.slowness)}: {len(self.network)} devices need as many numbers above 0"
            )
        if self.num_microbatches < 1:
            raise PartitionError(f"num_microbatches={self.num_microbatches}: at least 1 is needed")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise PartitionError(f"memory_limit={self.memory_limit}: bytes must be more than 0")

    # -- one plan --------------------------------------------------------------------------------------------------

    def reduce_s_per_byte(self, first: int, stop: int) -> float:
        """Seconds to all-reduce a byte over devices ``first .. stop-1``."""
        replicas = stop - first
        if replicas == 1:
            return 0.0
        return 2 * (replicas - 1) / replicas / float(self.network.within[first, stop])

    def reduce_s(self, stage: Stage) -> float:
        """Seconds to all-reduce the gradients of a stage."""
        parameters = self.costs.parameters
        return float(parameters[stage.end] - parameters[stage.begin]) * self.reduce_s_per_byte(stage.first, stage.stop)

    def slow(self, first: int, stop: int) -> float:
        """How many times as long the slowest of the devices ``first .. stop-1`` takes."""
        return max(self.slowness[first:stop], default=1.0)

    def reduce_left_s(self, stage: Stage) -> float:
        """Seconds that an all-reduce goes on after the last backward, in which it begins, unit by unit."""
        costs, per_byte = self.costs, self.reduce_s_per_byte(stage.first, stage.stop)
        slow, clock_s, done_s, held = self.slow(stage.first, stage.stop), 0.0, 0.0, 0.0
        for unit in reversed(range(stage.begin, stage.end)):
            clock_s += costs.backward_s[unit] * slow
            held += costs.parameter_bytes[unit]
            if held >= self.bucket_bytes or unit == stage.begin:
                done_s = max(done_s, clock_s) + held * per_byte
                held = 0.0
        return done_s - clock_s

    def stage_costs(self, stages: Sequence[Stage]) -> StageCosts:
        """Seconds per micro-batch."""
        costs, forward, backward = self.costs, self.network.forward, self.network.backward
        hops = [(a.end - 1, a.replicas * b.replicas, (a.first, a.stop, b.stop)) for a, b in pairwise(stages)]
        return StageCosts(
            [sum(costs.forward_s[s.begin : s.end]) / s.replicas for s in stages],
            [sum(costs.backward_s[s.begin : s.end]) / s.replicas for s in stages],
            [float(costs.bytes_forward[unit] / (pairs * forward[where])) for unit, pairs, where in hops],
            [float(costs.bytes_backward[unit] / (pairs * backward[where])) for unit, pairs, where in hops],
            [0.0] * len(hops),
        )

    def bound_s(self, stages: Sequence[Stage]) -> float:
        """W: seconds that the slowest stage, with its all-reduce, or the slowest link needs for all micro-batches."""
        costs, count = self.stage_costs(stages), self.num_microbatches
        busy = zip(costs.forward_s, costs.backward_s, stages, strict=True)
        work = [count * (forward_s + backward_s) + self.reduce_s(stage) for forward_s, backward_s, stage in busy]
        return max([*work, *(count * seconds for seconds in (*costs.send_forward_s, *costs.send_backward_s))])

    def least_s(self, stages: Sequence[Stage]) -> float:
        """Seconds that no order of execution falls short of; at least W."""
        return max(self.bound_s(stages), least_possible_s(self.stage_costs(stages), self.num_microbatches))

    def makespan(self, stages: Sequence[Stage], schedules: Iterable[Schedule]) -> tuple[float, tuple[int, ...]]:
        """Seconds of an iteration with the fastest of these schedules, and its warm-up."""
        costs, reduce_s = self.stage_costs(stages), [self.reduce_s(stage) for stage in stages]
        found = []
        for schedule in schedules:
            ends = [0.0] * len(stages)
            for span in simulate(schedule, costs).spans:
                ends[span.stage] = max(ends[span.stage], span.end_s)
            found.append((max(map(float.__add__, ends, reduce_s)), schedule.warm_up))
        return min(found, key=lambda result: result[0])

    # -- all plans -------------------------------------------------------------------------------------------------

    @property
    def most_stages(self) -> int:
        """As many as there are units and devices."""
        return min(self.costs.num_units, len(self.network))

    def limits_s(self) -> Iterator[float]:
        """Growing limits for W: from a little more than evenly shared work takes, to what no plan exceeds."""
        costs, count = self.costs, self.num_microbatches
        slowest = min(min(row[:u] + row[u + 1 :], default=math.inf) for u, row in enumerate(self.network.bandwidth))
        largest = max((*costs.bytes_forward, *costs.bytes_backward), default=0.0)
        alone_s = count * float(costs.busy_s[-1])
        most_s = (
            alone_s * self.slow(0, len(self.network)) + max(count * largest, 2 * float(costs.parameters[-1])) / slowest
        )
        evenly_s, slack = alone_s / len(self.network), _SLACK
        while 0 < evenly_s * (1 + slack) < most_s:
            yield evenly_s * (1 + slack)
            slack *= 2
        yield most_s

    def fits(self, nbytes: np.ndarray) -> np.ndarray:
        """Whether so many bytes of parameters fit on a device."""
        return nbytes <= (math.inf if self.memory_limit is None else self.memory_limit)

    def too_little_memory(self) -> PartitionError:
        """The error that says what a device would have to hold."""
        evenly = float(self.costs.parameters[-1]) / self.most_stages
        need = max(evenly, max(self.costs.parameter_bytes))
        return PartitionError(
            f"no plan keeps the parameters of every device within memory_limit={self.memory_limit:g} bytes: "
            f"{self.costs.num_units} units on {len(self.network)} devices need {need:g} or more on one of them; use "
            "more devices, smaller units, or raise memory_limit"
        )
