"""Ranges of nodes: the costs of every possible stage, and the dynamic programs that choose K of them.

Points 0..n-1 are the positions at which a stage may begin or end; a stage is a range of points ``[i, j)``::

    point     0          1        2             3          n - 1 = 4
              | embed    | block0 | block1 add  | head     |
    stage       [0, 1)     [ 1 .............3 )
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.wire_format import wire_bytes
from lightning_avgpipe.planning.memory import Memory, Need

# Times are rounded to this fraction of their sum, so that equal times stay equal in sums of any order.
_GRAIN = 2.0**-40


@dataclass(frozen=True)
class Ranges:
    """The costs of all ranges of n points.

    Attributes:
        num_stages: K, number of stages.
        work: time of a stage from point i to point j, shape ``(n, n)``; infinite where ``j <= i``.
        forward: time of the forward of this stage, to be added if it repeats its forwards, shape ``(n, n)``.
        transfer: time for which a cut at each point occupies each hop, shape ``(K-1, n)``.
        persistent: bytes of weights, gradients and optimizer states from point i to point j, shape ``(n, n)``.
        extra: ``Memory.extra_bytes`` from point i to point j, shape ``(n, n)``.
        stash: bytes that one micro-batch stashes before each point, shape ``(n,)``.
        crossing: bytes that cross a cut at each point, shape ``(n,)``.
        memory: memory limit and numbers of micro-batches in flight.
    """

    num_stages: int
    work: np.ndarray
    forward: np.ndarray
    transfer: np.ndarray
    persistent: np.ndarray
    extra: np.ndarray
    stash: np.ndarray
    crossing: np.ndarray
    memory: Memory

    @classmethod
    def of(cls, graph: CallGraph, costs: Costs, positions: Sequence[int], num_stages: int, memory: Memory) -> Ranges:
        """Compute the ranges between positions of a graph, the first of which is 0 and the last ``len(graph.nodes)``.

        A parameter that is used inside and outside a range has copies, whose gradients are summed once in an iteration.
        This is counted as a transfer of its bytes over the slowest link.
        """
        points = np.asarray(positions)
        crossing = np.array([graph.boundary_bytes[p] for p in positions], dtype=float)
        crossing[[0, -1]] = 0.0
        sent = graph.crossing(partial(wire_bytes, wire=costs.planning_format))
        travels = np.array([sent[p] for p in positions], dtype=float) * (crossing > 0)
        used, alone = _owned(graph, points, memory.weights)
        slowest = max((costs.link(hop).per_byte for hop in range(num_stages - 1)), default=0.0)
        node = np.asarray(costs.node, dtype=float)
        grain = float(node.sum()) * _GRAIN or 1.0
        before = np.concatenate([[0.0], np.cumsum(np.rint(node / grain))])[points] * grain
        forward = np.concatenate([[0.0], np.cumsum(np.rint(np.asarray(costs.forward) / grain))])[points] * grain
        work = before[None, :] - before[:, None] + (used - alone) * slowest / memory.num_microbatches
        work[np.tri(len(points), dtype=bool)] = np.inf
        return cls(
            num_stages,
            work,
            forward[None, :] - forward[:, None],
            np.array([costs.link(hop).per_byte for hop in range(num_stages - 1)])[:, None] * travels,
            _owned(graph, points, memory.persistent)[0],
            _owned(graph, points, memory.extra_bytes)[0],
            np.concatenate([[0.0], np.cumsum(costs.stash_bytes, dtype=float)])[points],
            crossing,
            memory,
        )

    def _parts(self, stage: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the parts of the memory that a stage from point i to point j needs, each of shape ``(n, n)``."""
        flow = self.memory.flow(stage)
        held = self.persistent + self.extra * flow.extra
        stash = (self.stash[None, :] - self.stash[:, None]) * flow.stashed
        boundary = self.crossing[:, None] * flow.in_flight
        return held, stash, np.broadcast_to(boundary, held.shape)

    def needed(self, stage: int) -> np.ndarray:
        """Return the bytes that a stage from point i to point j needs, shape ``(n, n)``; infinite where ``j <= i``."""
        return np.where(np.isinf(self.work), np.inf, sum(self._parts(stage)))

    def need(self, stage: int, first: int, last: int) -> Need:
        """Return the memory that a stage from point ``first`` to point ``last`` needs."""
        return Need(*(int(part[first, last]) for part in self._parts(stage)))

    def times(self, stage: int) -> np.ndarray:
        """Return the time of a stage from point i to point j, shape ``(n, n)``; infinite where memory is too small."""
        work = self.work + self.forward if self.memory.flow(stage).repeats else self.work
        if np.isinf(self.memory.limit):
            return work
        return np.where(self.needed(stage) <= self.memory.limit, work, np.inf)

    def leanest(self) -> tuple[list[int], int]:
        """Return the inner points that minimise the largest memory need of a stage, and the stage with this need."""
        stages = [self.needed(k) for k in range(self.num_stages)]
        free = np.zeros_like(self.transfer)
        limit = least_bottleneck(stages, free)
        chosen = evenest(stages, free, limit)
        bounds = [0, *chosen, len(self.work) - 1]
        return chosen, int(np.argmax([stages[k][bounds[k], bounds[k + 1]] for k in range(self.num_stages)]))


def least_bottleneck(stages: Sequence[np.ndarray], transfer: np.ndarray) -> float:
    """Return the smallest possible maximum of stages and transfers, over all choices of K-1 inner points.

    Args:
        stages: for each stage its cost from point i to point j, each of shape ``(n, n)``; infinite: not allowed.
        transfer: cost of a cut at each point for each hop, shape ``(K-1, n)``.
    Returns:
        The maximum; infinite if no choice is allowed.
    """
    best = stages[0][0]
    for stage, sent in zip(stages[1:], transfer, strict=True):
        best = np.maximum(np.maximum(best, sent)[:, None], stage).min(axis=0)
    return float(best[-1])


def evenest(stages: Sequence[np.ndarray], transfer: np.ndarray, limit: float) -> list[int]:
    """Return the inner points with the smallest sum of ``stage squared / limit`` and transfers.

    No stage or transfer may exceed the limit, which must be at least the result of :func:`least_bottleneck`. Of equal
    choices the earliest points are taken. The other arguments are those of :func:`least_bottleneck`.
    """
    scale = 1.0 / limit if limit > 0 else 0.0

    def bounded(cost: np.ndarray, result: np.ndarray) -> np.ndarray:
        # rounded, so that the order of additions does not decide between equal choices
        return np.where(cost <= limit, np.round(result * scale, 9), np.inf)

    def squared(stage: np.ndarray) -> np.ndarray:
        finite = np.where(np.isinf(stage), 0.0, stage)
        return bounded(stage, finite * finite * scale)

    squares = {id(stage): squared(stage) for stage in stages}  # one array for all stages if there is no memory limit
    best = squares[id(stages[0])][0]
    choices: list[np.ndarray] = []
    for stage, sent in zip(stages[1:], transfer, strict=True):
        total = (best + bounded(sent, sent))[:, None] + squares[id(stage)]
        choices.append(total.argmin(axis=0))
        best = np.round(total.min(axis=0), 9)
    chosen, point = [], len(stages[0]) - 1
    for choice in reversed(choices):
        point = int(choice[point])
        chosen.append(point)
    return chosen[::-1]


def uses_of(graph: CallGraph) -> dict[str, list[int]]:
    """Return the nodes that use each parameter and changed buffer; upkeep counts where it is executed."""
    uses: dict[str, list[int]] = defaultdict(list)
    for node in graph.nodes:
        for name in dict.fromkeys((*node.parameters, *node.states)):
            uses[name].append(graph.upkeep.get(node.index, node.index))
    return uses


def _owned(graph: CallGraph, points: np.ndarray, sizes: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of names used between points i and j, and of names used only there, each ``(n, n)``."""
    n = len(points)
    users = {name: np.searchsorted(points, sorted(sites), side="right") - 1 for name, sites in uses_of(graph).items()}
    uses = np.zeros(n)
    both = np.zeros((n, n))  # [a, b]: bytes of names used in interval a and next in interval b
    ends = np.zeros((n, n))  # [a, b]: bytes of names used first in interval a and last in interval b
    for name, intervals in users.items():
        size = sizes.get(name, 0)
        for one, other in itertools.pairwise(intervals):
            both[one, other] += size
        for interval in intervals:
            uses[interval] += size
        ends[intervals[0], intervals[-1]] += size
    before = np.concatenate([[0.0], np.cumsum(uses)])[:n]
    return before[None, :] - before[:, None] - _inside(both), _inside(ends)


def _inside(pairs: np.ndarray) -> np.ndarray:
    """Return for points i and j the sum of ``pairs[a, b]`` with ``i <= a`` and ``b < j``."""
    summed = np.cumsum(np.cumsum(pairs[::-1], axis=0)[::-1], axis=1)
    return np.concatenate([np.zeros((len(pairs), 1)), summed[:, :-1]], axis=1)
