"""SPP's planning problem: units, the network of devices, and the times of plans.

Units and devices are counted from 0. A stage slices each micro-batch over its r replicas. A message of d bytes to a
stage of r' replicas takes ``d / (r r' b)`` seconds, b being the least bandwidth between the two, and the all-reduce of
a stage's gradients ``2 (r-1)/r bytes / b`` seconds, b being the least within it. Links are full-duplex and do not
disturb each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

import networkx as nx
import numpy as np

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts, all_reduce_s
from lightning_avgpipe.schedule import Schedule, StageCosts, simulate
from lightning_avgpipe.schedule.costs import least_possible_s
from lightning_avgpipe.schedule.turns import Matrix
from lightning_avgpipe.training.gradient_sums import BUCKET_BYTES

_SLACK = 0.1  # share above evenly shared work within which plans are searched first; it is doubled until one is found


@dataclass(frozen=True)
class Network:
    """A network of V devices with the bandwidth between every two of them.

    Attributes:
        bandwidth: bytes per second from device u to device v, shape ``(V, V)``; the diagonal is ignored.
        ranks: ranks of the devices, if they all-reduce in a ring of ascending ranks; empty: an all-reduce uses the
            links between every two of them.
    Raises:
        PartitionError: there is no device, the matrix is not square, or a bandwidth is not positive.
    """

    bandwidth: tuple[tuple[float, ...], ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.bandwidth)
        if size == 0 or any(len(row) != size for row in self.bandwidth):
            raise PartitionError(
                f"bandwidth has rows of {[len(row) for row in self.bandwidth]} entries; it needs V rows of V each, "
                "with at least one device"
            )
        for u, row in enumerate(self.bandwidth):
            for v, speed in enumerate(row):
                if u != v and not speed > 0:
                    raise PartitionError(f"bandwidth[{u}][{v}]={speed}: every two devices need more than 0 bytes/s")

    @classmethod
    def of(cls, bandwidth: Matrix, rings: bool = False) -> Network:
        """Make a network from a matrix; ``rings`` says whether devices all-reduce in rings."""
        return cls(tuple(tuple(map(float, row)) for row in bandwidth), tuple(range(len(bandwidth))) if rings else ())

    def __len__(self) -> int:
        return len(self.bandwidth)

    def ordered(self, order: Sequence[int]) -> Network:
        """Return the network with its devices in another order: device i is ``order[i]`` of this network."""
        ranks = tuple(self.ranks[u] for u in order) if self.ranks else ()
        return Network(tuple(tuple(self.bandwidth[u][v] for v in order) for u in order), ranks)

    @cached_property
    def within(self) -> np.ndarray:
        """The least bandwidth of the links over which devices ``a .. b-1`` all-reduce, in either direction.

        Its shape is ``(V+1, V+1)``; it is infinite for one device.
        """
        size = len(self)
        least = np.full((size + 1, size + 1), math.inf)
        if self.ranks:
            for b in range(2, size + 1):
                for a in range(b - 1):
                    ring = sorted(range(a, b), key=self.ranks.__getitem__)
                    links = zip(ring, [*ring[1:], ring[0]], strict=True)
                    least[a, b] = min(min(self.bandwidth[u][v], self.bandwidth[v][u]) for u, v in links)
            return least
        for b in range(2, size + 1):
            for a in range(b - 2, -1, -1):
                ends = min(self._array[a, b - 1], self._array[b - 1, a])
                least[a, b] = min(least[a + 1, b], least[a, b - 1], ends)
        return least

    @cached_property
    def forward(self) -> np.ndarray:
        """The least bandwidth from devices ``a .. b-1`` to devices ``b .. c-1``, shape ``(V+1, V+1, V+1)``."""
        return _between(self._array)

    @cached_property
    def backward(self) -> np.ndarray:
        """The least bandwidth from devices ``b .. c-1`` to devices ``a .. b-1``, shape ``(V+1, V+1, V+1)``."""
        return _between(self._array.T)

    @cached_property
    def _array(self) -> np.ndarray:
        return np.array(self.bandwidth)


def _between(bandwidth: np.ndarray) -> np.ndarray:
    size = len(bandwidth)
    least = np.full((size + 1, size + 1, size + 1), math.inf)
    for b in range(1, size):
        from_a = np.minimum.accumulate(bandwidth[:b, b:][::-1], axis=0)[::-1]  # row a: of devices a .. b-1
        least[:b, b, b + 1 :] = np.minimum.accumulate(from_a, axis=1)
    return least


def device_order(bandwidth: Matrix) -> tuple[int, ...]:
    """Return an order of devices in which neighbours have fast links, by cutting the network recursively.

    Args:
        bandwidth: bytes per second between every two devices, shape ``(V, V)``; the sum of both directions is used.
    Returns:
        All devices. Of the two sides of a cut, the one with the lowest device index comes first.
    Raises:
        PartitionError: as for :class:`Network`.
    Source: RDO in Luo et al., INFOCOM 2022; global minimum cuts by Stoer and Wagner.
    """
    speeds = Network.of(bandwidth).bandwidth
    graph = nx.Graph()
    graph.add_nodes_from(range(len(speeds)))
    graph.add_weighted_edges_from((u, v, speeds[u][v] + speeds[v][u]) for u, v in combinations(range(len(speeds)), 2))
    return tuple(_ordered(graph))


def _ordered(graph: nx.Graph) -> list[int]:
    if len(graph) < 3:
        return sorted(graph)
    _, sides = nx.stoer_wagner(graph)
    return [device for side in sorted(sides, key=min) for device in _ordered(graph.subgraph(side).copy())]


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
        slowness: time of each device relative to one that is not slow, shape ``(V,)``; empty: none is slow. The
            simulation of turns and the bottleneck use it; SPP's own simulation ignores it.
        bucket_bytes: bytes of gradients that are all-reduced as one message while the last backward still computes.
            SPP's own simulation all-reduces after the last backward instead.
        half_duplex: whether W adds the transfers of a link in both directions, as the paper does. In simulations links
            are full-duplex.
    """

    costs: UnitCosts
    network: Network
    num_microbatches: int
    slowness: tuple[float, ...] = ()
    bucket_bytes: float = BUCKET_BYTES
    half_duplex: bool = False

    def __post_init__(self) -> None:
        if self.slowness and (len(self.slowness) != len(self.network) or not min(self.slowness) > 0):
            raise PartitionError(
                f"slowness={list(self.slowness)}: {len(self.network)} devices need as many numbers above 0"
            )
        if self.num_microbatches < 1:
            raise PartitionError(f"num_microbatches={self.num_microbatches}: at least 1 is needed")

    @cached_property
    def messages(self) -> np.ndarray:
        """The bytes that are sent forwards and backwards after each unit, shape ``(2, L)``; 0 after the last one."""
        return np.array([(*self.costs.bytes_forward, 0.0), (*self.costs.bytes_backward, 0.0)])

    # -- one plan --------------------------------------------------------------------------------------------------

    def reduce_s_per_byte(self, first: int, stop: int) -> float:
        """Return the seconds of an all-reduce per byte over devices ``first .. stop-1``."""
        return all_reduce_s(1.0, stop - first, float(self.network.within[first, stop]))

    def reduce_s(self, stage: PlacedStage) -> float:
        """Return the seconds of the all-reduce of a stage's gradients."""
        parameters = self.costs.parameters
        return float(parameters[stage.end] - parameters[stage.begin]) * self.reduce_s_per_byte(stage.first, stage.stop)

    def slow(self, first: int, stop: int) -> float:
        """Return the slowness of the slowest of the devices ``first .. stop-1``."""
        return max(self.slowness[first:stop], default=1.0)

    def reduce_left_s(self, stage: PlacedStage) -> float:
        """Return for how many seconds the all-reduce, which begins during the last backward, goes on after it."""
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
        sends_s = map(self.both_ways, costs.send_forward_s, costs.send_backward_s)
        return max([*work, *(count * float(seconds) for seconds in sends_s)])

    @property
    def both_ways(self) -> np.ufunc:
        """The function of a link's seconds in each direction that returns for how long the link is busy."""
        return np.add if self.half_duplex else np.maximum

    def least_s(self, stages: Sequence[PlacedStage]) -> float:
        """Return a lower bound for the seconds of an iteration in any order of execution, with full-duplex links."""
        bound_s = replace(self, half_duplex=False).bound_s(stages)
        return max(bound_s, least_possible_s(self.stage_costs(stages), self.num_microbatches))

    def makespan(self, stages: Sequence[PlacedStage], schedules: Iterable[Schedule]) -> float:
        """Return the seconds of an iteration with the fastest of these schedules."""
        costs, reduce_s = self.stage_costs(stages), [self.reduce_s(stage) for stage in stages]
        found = []
        for schedule in schedules:
            ends = [0.0] * len(stages)
            for span in simulate(schedule, costs).spans:
                ends[span.stage] = max(ends[span.stage], span.end_s)
            found.append(max(map(float.__add__, ends, reduce_s)))
        return min(found)

    # -- all plans -------------------------------------------------------------------------------------------------

    @property
    def most_stages(self) -> int:
        """The largest possible number of stages: one per unit and per device."""
        return min(self.costs.num_units, len(self.network))

    def limits_s(self) -> Iterator[float]:
        """Yield growing limits for W: from slightly above evenly shared work to a value that no plan exceeds."""
        costs, count = self.costs, self.num_microbatches
        slowest = min(min(row[:u] + row[u + 1 :], default=math.inf) for u, row in enumerate(self.network.bandwidth))
        largest = max(costs.bytes_forward, default=0.0) + max(costs.bytes_backward, default=0.0)
        alone_s = count * float(costs.busy_s[-1])
        most_s = (
            alone_s * self.slow(0, len(self.network)) + max(count * largest, 2 * float(costs.parameters[-1])) / slowest
        )
        evenly_s, slack = alone_s / len(self.network), _SLACK
        while 0 < evenly_s * (1 + slack) < most_s:
            yield evenly_s * (1 + slack)
            slack *= 2
        yield most_s
