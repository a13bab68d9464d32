"""Choice of cuts: positions in a call graph at which to divide it into stages of about equal time.

::

    node      0      1    2       3    4       5    6
              embed  add  block0  add  block1  add  head
    gaps            [   ]        [    ]       [   ]          between two calls; one position of each is enough
    cuts                  |            |                     3 stages

Of each gap only the legal position where the fewest bytes cross is considered, and the earliest of equal ones, so that
glue belongs to the same stage as the call that reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.memory import Memory, nbytes
from lightning_avgpipe.planning.ranges import Ranges, evenest, least_bottleneck
from lightning_avgpipe.utils.names import is_within

# Of the partitions whose bottleneck is at most this share above the best one, the most even, with little traffic, wins.
_SLACK = 0.01
_SHOWN = 3  # largest number of reasons in an error
_LEAST = 0.05  # parts of a step with a smaller share of the time are not given as reasons


@dataclass(frozen=True)
class Gap:
    """A gap between two consecutive calls of units, with the best position for a cut.

    Attributes:
        before: index of the call after the gap.
        position: legal position where the fewest bytes cross; the best illegal one if none is legal.
        obstacle: why no position is legal; None if one is.
    """

    before: int
    position: int
    obstacle: str | None


def gaps(graph: CallGraph) -> list[Gap]:
    """Return the gaps between all consecutive calls of units, in program order.

    Glue with parameters (``F.linear(x, self.fc.weight)``) counts as a call. A cut with no parameters on one of its
    sides counts as illegal, because a stage there would have nothing to train.
    """
    calls = [node.index for node in _calls(graph)]
    trained = [node.index for node in graph.nodes if node.parameters and node.index not in graph.upkeep]
    found = []
    for first, second in itertools.pairwise(calls):
        positions = range(first + 1, second + 1)
        legal = [p for p in positions if graph.obstacles[p] is None]
        best = min(legal or positions, key=lambda p: graph.boundary_bytes[p])
        obstacle = None if legal else graph.obstacles[best]
        if not trained or best <= trained[0] or best > trained[-1]:
            obstacle = obstacle or "there are no parameters on one of its sides"
        found.append(Gap(second, best, obstacle))
    return found


def _calls(graph: CallGraph) -> list[Node]:
    fixed = (node for node in graph.nodes if node.index not in graph.upkeep)
    return [node for node in fixed if node.kind != "glue" or node.parameters]


def cut_balanced(
    graph: CallGraph,
    costs: Costs,
    num_stages: int,
    memory: Memory | None = None,
    whole: Mapping[str, str] | None = None,
    replicas: Sequence[int] = (),
    slack: float = _SLACK,
) -> tuple[int, ...]:
    """Return the cuts that make the slowest stage or transfer as fast as possible, and the others even.

    Among the partitions within ``slack`` of the best bottleneck, the one with the smallest sum of transfer times and of
    ``stage time squared / bottleneck`` is taken. So the other stages are even too if one unit alone is the bottleneck.
    Of equal partitions the one with the earliest cuts is taken.

    Args:
        graph: call graph to be cut.
        costs: costs of its nodes and hops.
        num_stages: K, number of stages.
        memory: memory limit of the stages, and sizes of parameters, which a cut may duplicate.
        whole: unit -> why it cannot be opened, for messages.
        replicas: number of replicas of each stage, which share its micro-batches; empty: one of each.
        slack: share by which the slowest stage or transfer may exceed the best possible bottleneck.
    Returns:
        K-1 increasing positions.
    Raises:
        PartitionError: there are fewer than K-1 legal cuts, or stages do not fit into memory. The message says what
            forbids cuts, or how much memory is missing.
    Source: the dynamic program of PipeDream (Narayanan et al., SOSP 2019), without replicated stages.
    """
    memory = memory or Memory()
    legal = [gap for gap in gaps(graph) if gap.obstacle is None]
    if len(legal) < num_stages - 1:
        raise _too_few_cuts(graph, costs, num_stages, len(legal), whole or {})
    positions = [0, *(gap.position for gap in legal), len(graph.nodes)]
    ranges = Ranges.of(graph, costs, positions, num_stages, memory)
    stages = [ranges.times(k) / count for k, count in enumerate(replicas or (1,) * num_stages)]
    bottleneck = least_bottleneck(stages, ranges.transfer)
    if not np.isfinite(bottleneck):
        raise _too_little_memory(graph, ranges, positions)
    chosen = evenest(stages, ranges.transfer, bottleneck * (1 + slack))
    return tuple(positions[j] for j in chosen)


def cut_at(graph: CallGraph, split_points: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Return the cuts before the first call of each named unit.

    Args:
        graph: call graph to be cut.
        split_points: names of the units (or of modules that hold units) at which stages 1..K-1 begin.
        num_stages: K, number of stages.
    Raises:
        PartitionError: a wrong number of names, a name that is never called, names out of order, or an illegal cut.
    """
    if len(split_points) != num_stages - 1:
        raise PartitionError(
            f"split_points names {len(split_points)} units, but num_stages={num_stages} needs {num_stages - 1}: "
            "one for each stage after the first"
        )
    calls = _calls(graph)
    called = ", ".join(dict.fromkeys(node.name for node in calls))
    before = {gap.before: gap for gap in gaps(graph)}
    cuts: list[int] = []
    for name in split_points:
        first = next((node for node in calls if _belongs(node, name)), None)
        if first is None:
            raise PartitionError(f"split point {name!r} is never called by {graph.step}; it calls: {called}")
        if first is calls[0]:
            reason = graph.obstacles[first.index] or "stage 0 would be empty"
            raise PartitionError(f"split point {name!r} is the first call of {graph.step}; {reason}")
        gap = before[first.index]
        if gap.obstacle is not None:
            raise PartitionError(f"no cut may lie before split point {name!r}: {gap.obstacle}")
        if cuts and gap.position <= cuts[-1]:
            raise PartitionError(
                f"split point {name!r} is called before the one named before it; name split points in the order "
                f"of their calls: {called}"
            )
        cuts.append(gap.position)
    return tuple(cuts)


def _belongs(node: Node, name: str) -> bool:
    """Return whether a node is a call of the named module or of one of its submodules, or glue with its parameters."""
    if node.kind == "glue":
        return any(parameter.startswith(f"{name}.") for parameter in node.parameters)
    return is_within(node.name, name)


def cut_like(graph: CallGraph, stages_of: Mapping[str, Sequence[int]], num_stages: int) -> tuple[int, ...]:
    """Return cuts for another step function of a module, so that each parameter is used on the stage that has it.

    Args:
        graph: call graph of the other step function.
        stages_of: unit, parameter or changed buffer -> its stages in the plan.
        num_stages: K, number of stages.
    Returns:
        K-1 positions that do not decrease; a stage may be empty in this step.
    Raises:
        PartitionError: the step goes back to an earlier stage, no legal cut separates two stages, or a unit has
            parameters of several stages.
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


def scattered(graph: CallGraph, stages_of: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Return the units for which no stage has all their parameters; the arguments are those of :func:`cut_like`."""
    found = []
    for node in graph.nodes:
        holders = [set(stages_of[name]) for name in node.parameters if name in stages_of]
        if node.kind == "call" and holders and not set.intersection(*holders):
            found.append(node.name)
    return tuple(dict.fromkeys(found))


def _stages_like(graph: CallGraph, stages_of: Mapping[str, Sequence[int]]) -> list[int | None]:
    """Return for each node the first stage that has all its parameters and states; None if it needs none.

    Stages do not decrease from node to node.
    """
    stages: list[int | None] = []
    current, latest = 0, None
    for node in graph.nodes:
        if node.index in graph.upkeep:  # upkeep runs on the stages that need it
            stages.append(None)
            continue
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
                f"{graph.step} goes back from stage {current} ({latest}) to stage {able[-1]} ({node}), since it does "
                "not call units in the order in which training_step does"
            )
        current, latest = next(stage for stage in able if stage >= current), node
        stages.append(current)
    return stages


# -- why stages cannot be more even, or do not fit ---------------------------------------------------------------------


def limits(
    graph: CallGraph, costs: Costs, whole: Mapping[str, str], start: int = 0, end: int | None = None
) -> list[str]:
    """Return lines that say which parts between two positions of a graph cannot be divided, and why, largest first.

    Args:
        graph: call graph of a step.
        costs: costs of its nodes.
        whole: unit -> why it cannot be opened.
        start: first position.
        end: last position; None: the end of the graph.
    """
    total = sum(costs.node) or 1.0
    nodes = graph.nodes[start:end]
    reasons: dict[str, float] = {}
    for node in nodes:
        if node.kind == "call" and node.name in whole:
            reason = f"unit '{node.name}' {whole[node.name]}"
            reasons[reason] = reasons.get(reason, 0.0) + costs.node[node.index]
        elif node.kind == "region":
            reason = f"{node} is repeated in one piece; checkpoint its parts one by one, or use use_reentrant=False"
            reasons[reason] = reasons.get(reason, 0.0) + costs.node[node.index]
    for obstacle, group in itertools.groupby(nodes[1:], lambda node: graph.obstacles[node.index]):
        if obstacle is not None:
            positions = [node.index for node in group]
            reasons[f"no cut may lie there: {obstacle}"] = sum(costs.node[positions[0] - 1 : positions[-1] + 1])
    large = sorted(((cost / total, reason) for reason, cost in reasons.items()), key=lambda found: -found[0])
    return [f"{share:.0%} of the time: {reason}" for share, reason in large if share >= _LEAST]


def _too_little_memory(graph: CallGraph, ranges: Ranges, positions: Sequence[int]) -> PartitionError:
    """Make the error that says how much memory even the leanest partition lacks, and what would help."""
    chosen, k = ranges.leanest()
    bounds = [0, *chosen, len(positions) - 1]
    need, limit = ranges.need(k, bounds[k], bounds[k + 1]), ranges.memory.limit
    units = [n.name for n in graph.nodes[positions[bounds[k]] : positions[bounds[k + 1]]] if n.kind != "glue"]
    first_to_last = " .. ".join(dict.fromkeys([units[0], units[-1]]))
    flow = ranges.memory.flow(k)
    count = flow.in_flight
    flying, them = ("1 micro-batch in flight", "it") if count == 1 else (f"{count} micro-batches in flight", "them")
    stashed = "the micro-batch that is being repeated" if flow.repeats else flying
    parts = {
        f"{nbytes(need.persistent)} of weights, gradients and optimizer states": need.persistent,
        f"{nbytes(need.stash)} stashed by {stashed}": need.stash,
        f"{nbytes(need.boundary)} of values received for {them}": need.boundary,
    }
    advice = "use more stages"
    if need.persistent < need.total / 2:
        advice += ", more (and so smaller) micro-batches, or a smaller advance"
    return PartitionError(
        f"{graph.step} does not fit into num_stages={ranges.num_stages} stages with memory_limit={nbytes(limit)}: "
        f"however it is cut, a stage needs at least {nbytes(need.total)}, which is {nbytes(need.total - limit)} too "
        f"much. That is stage {k} ({first_to_last}), with {', '.join(p for p, n in parts.items() if n)}; "
        f"{advice}, or raise memory_limit"
    )


def _too_few_cuts(
    graph: CallGraph, costs: Costs, num_stages: int, count: int, whole: Mapping[str, str]
) -> PartitionError:
    """Make the error that says how many cuts are legal, and what forbids the others."""
    calls = len(_calls(graph))
    because = "".join(f"\n  - {limit}" for limit in limits(graph, costs, whole)[:_SHOWN])
    return PartitionError(
        f"num_stages={num_stages} needs {num_stages - 1} cuts, but {count} "
        f"{'cut is' if count == 1 else 'cuts are'} legal in {graph.step}, which calls {calls} "
        f"{'unit' if calls == 1 else 'units'}; lower num_stages to {count + 1}"
        + (f", or change what cannot be divided:{because}" if because else "")
    )
