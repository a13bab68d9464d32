"""Where to cut: positions in a call graph that give every stage its share.

::

    node      0      1    2       3    4       5    6
              embed  add  block0  add  block1  add  head
    gaps            [   ]        [    ]       [   ]          between two calls; one position of each is enough
    cuts                  |            |                     3 stages

A gap offers the position where the fewest bytes cross; of equals the earliest, so glue goes with the call that reads
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError

__all__ = ["Costs", "Gap", "cut_at", "cut_balanced", "cut_like", "gaps"]

# Among partitions within this share of the best bottleneck the evenest with the least traffic is taken.
_SLACK = 0.02


@dataclass(frozen=True)
class Costs:
    """What nodes and boundaries cost, in any one unit of time.

    Attributes:
        node: forward plus backward time of each node, shape ``(len(graph.nodes),)``.
        per_byte: time to move one byte over a hop, in one direction.
    """

    node: tuple[float, ...]
    per_byte: float = 0.0

    @classmethod
    def from_flops(cls, graph: CallGraph, flops_per_byte: float = 20.0) -> Costs:
        """Counted operations (a backward costs two forwards); a byte on a link costs as much as so many of them."""
        return cls(tuple(3.0 * node.flops for node in graph.nodes), flops_per_byte)


@dataclass(frozen=True)
class Gap:
    """Between two consecutive calls: the best legal position, or why there is none."""

    after: str
    before: str
    position: int
    nbytes: int
    obstacle: str | None


def gaps(graph: CallGraph) -> list[Gap]:
    """One gap between every two consecutive calls of units, in program order.

    A cut without parameters on one of its sides would be of no use: it counts as illegal.
    """
    calls = [node.index for node in graph.nodes if node.kind != "glue"]
    trained = [node.index for node in graph.nodes if node.parameters]
    found = []
    for first, second in itertools.pairwise(calls):
        positions = range(first + 1, second + 1)
        legal = [p for p in positions if graph.obstacles[p] is None]
        best = min(legal or positions, key=lambda p: graph.boundary_bytes[p])
        obstacle = None if legal else graph.obstacles[best]
        if not trained or best <= trained[0] or best > trained[-1]:
            obstacle = obstacle or "there are no parameters on one of its sides"
        found.append(
            Gap(
                graph.nodes[first].name,
                graph.nodes[second].name,
                best,
                graph.boundary_bytes[best],
                obstacle,
            )
        )
    return found


def cut_balanced(graph: CallGraph, costs: Costs, num_stages: int) -> tuple[int, ...]:
    """Cuts that make the slowest stage or transfer as fast as possible; of these, the evenest with the least traffic.

    Even: where one unit alone sets the pace, the other stages still share the rest (and its memory). The sum of
    ``stage time squared / bottleneck`` plus all transfers is minimised.

    Args:
        graph: to be cut.
        costs: of its nodes.
        num_stages: K.
    Returns:
        K-1 increasing positions.
    Raises:
        PartitionError: fewer than K-1 legal cuts; says how many there are and what forbids the others.
    Source: the dynamic program of PipeDream (Narayanan et al., SOSP 2019), without replicated stages.
    """
    legal = [gap for gap in gaps(graph) if gap.obstacle is None]
    if len(legal) < num_stages - 1:
        raise too_few_cuts(graph, num_stages)
    position = np.array([0, *(gap.position for gap in legal), len(graph.nodes)])
    transfer = costs.per_byte * np.array([0, *(gap.nbytes for gap in legal), 0])
    work = np.concatenate([[0.0], np.cumsum(costs.node)])[position]
    bottleneck = _least_bottleneck(work, transfer, num_stages)
    chosen = _evenest(work, transfer, num_stages, bottleneck * (1 + _SLACK))
    return tuple(int(position[j]) for j in chosen)


def _least_bottleneck(work: np.ndarray, transfer: np.ndarray, num_stages: int) -> float:
    """The smallest possible maximum of stage times and transfers, over all ways to take K-1 of the inner points."""
    n = len(work)
    best = np.maximum(work - work[0], transfer)  # one stage up to point j
    best[0] = np.inf
    for _ in range(num_stages - 1):
        following = np.full(n, np.inf)
        for j in range(1, n):
            following[j] = np.maximum(np.maximum(best[:j], work[j] - work[:j]), transfer[j]).min()
        best = following
    return float(best[-1])


def _evenest(work: np.ndarray, transfer: np.ndarray, num_stages: int, limit: float) -> list[int]:
    """Inner points with the least sum of squared stage times and transfers, none of which exceeds the limit."""
    n = len(work)
    scale = 1.0 / limit if limit > 0 else 0.0

    def cost(begin: np.ndarray, end: float) -> np.ndarray:
        return np.where(end - begin <= limit, (end - begin) ** 2 * scale, np.inf)

    best = np.where(transfer <= limit, [cost(work[:1], end)[0] for end in work] + transfer, np.inf)
    best[0] = np.inf
    choices: list[np.ndarray] = []
    for _ in range(num_stages - 1):
        following, choice = np.full(n, np.inf), np.zeros(n, dtype=int)
        for j in range(1, n):
            if transfer[j] > limit:
                continue
            total = best[:j] + cost(work[:j], work[j])
            choice[j] = int(total.argmin())
            following[j] = total[choice[j]] + transfer[j]
        best = following
        choices.append(choice)
    points, j = [], n - 1
    for choice in reversed(choices):
        j = int(choice[j])
        points.append(j)
    return points[::-1]


def cut_at(graph: CallGraph, split_points: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Cuts before the first call of each named unit.

    Args:
        split_points: names of the units (or of modules that hold units) at which stages 1..K-1 begin.
    Raises:
        PartitionError: a wrong number of names, a name that is never called, names out of order, or an illegal cut.
    """
    if len(split_points) != num_stages - 1:
        raise PartitionError(
            f"split_points names {len(split_points)} units, but num_stages={num_stages} needs {num_stages - 1}: "
            "one for each stage after the first"
        )
    calls = [node for node in graph.nodes if node.kind != "glue"]
    before = {gap.before: gap for gap in reversed(gaps(graph))}
    cuts: list[int] = []
    for name in split_points:
        first = next((node for node in calls if node.name == name or node.name.startswith(f"{name}.")), None)
        if first is None:
            called = ", ".join(dict.fromkeys(node.name for node in calls))
            raise PartitionError(f"split point {name!r} is never called by {graph.step}; it calls: {called}")
        if first is calls[0]:
            raise PartitionError(f"split point {name!r} is the first call of {graph.step}; stage 0 would be empty")
        gap = before[first.name]
        if gap.obstacle is not None:
            raise PartitionError(f"no cut may lie before split point {name!r}: {gap.obstacle}")
        if cuts and gap.position <= cuts[-1]:
            raise PartitionError(
                f"split point {name!r} is called before the one named before it; name split points in the order "
                f"of their calls: {', '.join(dict.fromkeys(node.name for node in calls))}"
            )
        cuts.append(gap.position)
    return tuple(cuts)


def cut_like(graph: CallGraph, stages_of: Mapping[str, Sequence[int]], num_stages: int) -> tuple[int, ...]:
    """Cuts for another step function of the same module, so that every parameter is used where a plan has put it.

    Args:
        graph: of the other step function.
        stages_of: unit, parameter or changed buffer -> the stages that a plan gave it.
        num_stages: K.
    Returns:
        K-1 positions that do not decrease; a stage may be empty in this step.
    Raises:
        PartitionError: the step goes back to an earlier stage, or must be cut where no cut is legal.
    """
    stages = _stages_like(graph, stages_of)
    cuts: list[int] = []
    for k in range(1, num_stages):
        low = max((i + 1 for i, stage in enumerate(stages) if stage is not None and stage < k), default=0)
        high = next((i for i, stage in enumerate(stages) if stage is not None and stage >= k), len(graph.nodes))
        positions = range(max([low, *cuts]), high + 1)
        legal = [p for p in positions if graph.obstacles[p] is None]
        if not legal:
            raise PartitionError(
                f"{graph.step} cannot be cut between stages {k - 1} and {k}: {graph.obstacles[low] or 'no position'}"
            )
        cuts.append(min(legal, key=lambda p: graph.boundary_bytes[p]))
    return tuple(cuts)


def _stages_like(graph: CallGraph, stages_of: Mapping[str, Sequence[int]]) -> list[int | None]:
    """For each node the first stage, not before the node before it, that has all it needs; None if it needs nothing."""
    stages: list[int | None] = []
    current, latest = 0, None
    for node in graph.nodes:
        names = [name for name in (*node.parameters, *node.states) if name in stages_of]
        if not names and node.kind == "call" and node.name in graph.resident and node.name in stages_of:
            names = [node.name]
        if not names:
            stages.append(None)
            continue
        able = sorted(set.intersection(*(set(stages_of[name]) for name in names)))
        if not able:
            owners = sorted({stage for name in names for stage in stages_of[name]})
            raise PartitionError(f"{graph.step}: {node} needs parameters of stages {owners}")
        if able[-1] < current:
            raise PartitionError(
                f"{graph.step} goes back from stage {current} ({latest}) to stage {able[-1]} ({node}); a step must "
                "call units in the order in which training_step does. Use split_points to keep both on one stage"
            )
        current, latest = next(stage for stage in able if stage >= current), node
        stages.append(current)
    return stages


def too_few_cuts(graph: CallGraph, num_stages: int) -> PartitionError:
    """The error that says how many cuts are legal, and what forbids the others."""
    all_gaps = gaps(graph)
    count = sum(gap.obstacle is None for gap in all_gaps)
    calls = sum(node.kind != "glue" for node in graph.nodes)
    obstacles = list(dict.fromkeys(gap.obstacle for gap in all_gaps if gap.obstacle is not None))
    because = "".join(f"\n  - {obstacle}" for obstacle in obstacles[:3])
    return PartitionError(
        f"num_stages={num_stages} needs {num_stages - 1} cuts, but {count} "
        f"{'cut is' if count == 1 else 'cuts are'} legal in {graph.step}, which calls {calls} "
        f"{'unit' if calls == 1 else 'units'}; lower num_stages to {count + 1}"
        + (f", or remove what forbids the others:{because}" if because else "")
    )
