"""The planning problem of SPP, and the times of plans for it."""

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
"""The least bytes of gradients that are all-reduced as one message during a backward, except the last message."""

_SLACK = 0.1  # share above evenly shared work within which plans are searched first; it is doubled until one is found


class PlacedStage(NamedTuple):
    """A stage with the units ``begin .. end-1`` on the devices ``first .. stop-1`` of the order."""

    begin: int
    end: int
    first: int
    stop: int

    @property
    def replicas(self) -> int:
        """The number of replicas r."""
        return self.stop - self.first


@dataclass(frozen=True)
class Problem:
    """A problem: assign units to devices, which are numbered in a given order.

    Attributes:
        costs: costs of the units, on a device that is not slow.
        network: network of the devices.
        num_microbatches: M, number of micro-batches of an iteration.
        memory_limit: bytes of parameters that a device may hold; None: no limit.
        slowness: time of each device in units of a device that is not slow, shape ``(V,)``; empty: none is slow. The
            simulation of turns and the bottleneck use it; SPP's own simulation ignores it.
        bucket_bytes: bytes of gradients that are all-reduced as one message while the last backward still computes.
            SPP's own simulation all-reduces after the last backward instead.
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
        """Return the seconds of an all-reduce per byte over devices ``first .. stop-1``."""
        replicas = stop - first
        if replicas == 1:
            return 0.0
        return 2 * (replicas - 1) / replicas / float(self.network.within[first, stop])

    def reduce_s(self, stage: PlacedStage) -> float:
        """Return the seconds of the all-reduce of a stage's gradients."""
        parameters = self.costs.parameters
        return float(parameters[stage.end] - parameters[stage.begin]) * self.reduce_s_per_byte(stage.first, stage.stop)

    def slow(self, first: int, stop: int) -> float:
        """Return the slowness of the slowest of the devices ``first .. stop-1``."""
        return max(self.slowness[first:stop], default=1.0)

    def reduce_left_s(self, stage: PlacedStage) -> float:
        """Return how many seconds the all-reduce, which begins during the last backward, continues after it."""
        costs, per_byte = self.costs, self.reduce_s_per_byte(stage.first, stage.stop)
        slow, clock_s, done_s, held = self.slow(stage.first, stage.stop), 0.0, 0.0, 0.0
        for unit in reversed(range(stage.begin, stage.end)):
            clock_s += costs.backward_s[unit] * slow
            held += costs.parameter_bytes[unit]
            if held >= self.bucket_bytes or unit == stage.begin:
                done_s = max(done_s, clock_s) + held * per_byte
                held = 0.0
        return done_s - clock_s

    def stage_costs(self, stages: Sequence[PlacedStage]) -> StageCosts:
        """Return the seconds per micro-batch of each stage and hop, with each micro-batch sliced over the replicas."""
        costs, forward, backward = self.costs, self.network.forward, self.network.backward
        hops = [(a.end - 1, a.replicas * b.replicas, (a.first, a.stop, b.stop)) for a, b in pairwise(stages)]
        return StageCosts(
            [sum(costs.forward_s[s.begin : s.end]) / s.replicas for s in stages],
            [sum(costs.backward_s[s.begin : s.end]) / s.replicas for s in stages],
            [float(costs.bytes_forward[unit] / (pairs * forward[where])) for unit, pairs, where in hops],
            [float(costs.bytes_backward[unit] / (pairs * backward[where])) for unit, pairs, where in hops],
            [0.0] * len(hops),
        )

    def bound_s(self, stages: Sequence[PlacedStage]) -> float:
        """Return W: the seconds of all micro-batches on the slowest stage, with its all-reduce, or the slowest link."""
        costs, count = self.stage_costs(stages), self.num_microbatches
        busy = zip(costs.forward_s, costs.backward_s, stages, strict=True)
        work = [count * (forward_s + backward_s) + self.reduce_s(stage) for forward_s, backward_s, stage in busy]
        return max([*work, *(count * seconds for seconds in (*costs.send_forward_s, *costs.send_backward_s))])

    def least_s(self, stages: Sequence[PlacedStage]) -> float:
        """Return a lower bound for the seconds of an iteration with any order of execution, which is at least W."""
        return max(self.bound_s(stages), least_possible_s(self.stage_costs(stages), self.num_microbatches))

    def makespan(self, stages: Sequence[PlacedStage], schedules: Iterable[Schedule]) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of an iteration with the fastest of these schedules, and the warm-up of this schedule."""
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
        """The largest possible number of stages: one per unit and per device."""
        return min(self.costs.num_units, len(self.network))

    def limits_s(self) -> Iterator[float]:
        """Yield growing limits for W: from slightly above evenly shared work to a value that no plan exceeds."""
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
        """Return whether ``nbytes`` bytes of parameters fit on a device, elementwise."""
        return nbytes <= (math.inf if self.memory_limit is None else self.memory_limit)

    def too_little_memory(self) -> PartitionError:
        """Make the error that says how many bytes of parameters a device would have to hold."""
        evenly = float(self.costs.parameters[-1]) / self.most_stages
        need = max(evenly, max(self.costs.parameter_bytes))
        return PartitionError(
            f"no plan keeps the parameters of every device within memory_limit={self.memory_limit:g} bytes: "
            f"{self.costs.num_units} units on {len(self.network)} devices need {need:g} or more on one of them; use "
            "more devices, smaller units, or raise memory_limit"
        )
