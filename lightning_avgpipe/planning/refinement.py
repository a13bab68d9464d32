"""Refinement: open units as far as the balance of stages needs it, and close those again in which no cut lies.

::

    opened    embed | norm  qkv  out  up  down | norm  qkv  out  up  down | head
    cut                                                  |
    closed    embed | block0                   | norm  qkv  out  up  down | head

A stage then runs a whole block as in plain PyTorch, instead of call by call. Nothing else changes: a module is closed
only if its calls use exactly its own parameters, change only its own buffers and observe nothing, and if its parts have
no forward hooks and are not called from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph, FollowedCall
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.plan import Plan
from lightning_avgpipe.utils.names import is_within

# Refining ends when the slowest stage is within this share of a perfect balance ...
_BALANCED = 1.03
# ... and opens only units that weigh more than this share of a stage's fair share,
_HEAVY = 0.25
# then, at most _NEAR_CUTS times, units next to a cut that weigh more than the share _MOVES of a stage's fair share.
_NEAR_CUTS = 3
_MOVES = 0.03
# Finer units must make the slowest stage or the unevenness smaller by this factor.
_WORTH = 0.99
# A unit that reads numbers in tensors (``.item()``) may call other modules for other micro-batches. This is allowed
# for a whole unit, and an error for an opened one. So such a unit stays whole unless the slowest stage exceeds its fair
# share by this factor.
_SPARED = 1.8


class Refinement:
    """A search that opens the units of one step until its stages are balanced.

    Args:
        subject: module whose step is captured.
        step: step that is captured with finer and finer units.
        num_stages: K, number of stages.

    Attributes:
        spared: units that stay whole, because they read numbers in tensors.
    """

    def __init__(self, subject: Divisible, step: Step, num_stages: int) -> None:
        self._subject = subject
        self._step = step
        self._num_stages = num_stages
        self.spared: set[str] = set()

    def best(
        self, graph: CallGraph, costs_of: Callable[[CallGraph], Costs], cut: Callable[[CallGraph, Costs], Plan]
    ) -> tuple[Plan, Costs]:
        """Return the best plan for this graph or a finer one, and the costs of its nodes.

        Args:
            graph: call graph to begin with.
            costs_of: function that returns the costs of a graph's nodes.
            cut: function that returns the best plan for a graph and its costs.
        Raises:
            PartitionError: there are not enough legal cuts, however fine the units, or memory is too small.
        """
        best: tuple[Plan, Costs] | None = None
        closer = _NEAR_CUTS
        tried: set[str] = set()  # all units that were ever spared
        costs = costs_of(graph)
        while True:
            plan: Plan | None = None
            try:
                plan = cut(graph, costs)
            except PartitionError as error:
                failure = error
            else:
                if best is None or _gains(plan, best[0]):
                    best = plan, costs
                if plan.slowest.share * self._num_stages <= _BALANCED:
                    return best
            heavy = self._too_heavy(graph, costs, plan)
            if not heavy and plan is not None and closer > 0:
                closer -= 1
                near = _beside_cuts(plan) - self.spared
                least_s = _MOVES * sum(costs.node) / self._num_stages
                heavy = [name for name in self._heavy_units(graph, costs, least_s) if name in near]
            if not heavy:
                if best is None:
                    raise failure
                return best
            units, opened = self._opened(graph, costs, heavy)
            finer = self._subject.capture(self._step, units)
            if found := (finer.number_readers & opened) - tried:
                tried |= found
                self.spared |= found
                continue
            graph, costs = finer, costs_of(finer)

    def _too_heavy(self, graph: CallGraph, costs: Costs, plan: Plan | None) -> list[str]:
        """Return the units to open; spared units only if no plan without them is good enough."""
        fair_s = sum(costs.node) / self._num_stages
        found = self._heavy_units(graph, costs, fair_s * _HEAVY if plan is not None else 0.0)
        found += [unit for unit in sorted(graph.leaking) if unit not in found and self._subject.opens(unit)]
        heavy = [unit for unit in found if unit not in self.spared]
        if not heavy and (plan is None or plan.slowest.share * self._num_stages > _SPARED):
            heavy = [unit for unit in found if unit in self.spared]
            self.spared.clear()
        return heavy

    def _opened(self, graph: CallGraph, costs: Costs, chosen: Sequence[str]) -> tuple[tuple[str, ...], set[str]]:
        """Return the units with the chosen ones opened, and all units that were opened.

        A module in a chosen unit is opened at once if it alone takes longer than a balanced stage, by its share of the
        unit's operations, since it would be opened in the end.
        """
        weights, whole = _sums(graph, costs.node), _sums(graph, [node.flops for node in graph.nodes])
        per_flop = {unit: weights[unit] / whole[unit] for unit in chosen if whole.get(unit)}
        flops = graph.inner_flops
        units, opened, heavy = graph.units, set[str](), list(chosen)
        limit = _BALANCED * sum(costs.node) / self._num_stages
        while heavy:
            opened.update(heavy)
            units, before = self._subject.refine(units, heavy), set(units)
            heavy = []
            for path in set(units).difference(before, self.spared):
                above = next((unit for unit in per_flop if is_within(path, unit)), None)
                if above is not None and flops.get(path, 0.0) * per_flop[above] > limit and self._subject.opens(path):
                    heavy.append(path)
        return units, opened

    def _heavy_units(self, graph: CallGraph, costs: Costs, limit: float) -> list[str]:
        weights = _sums(graph, costs.node)
        return [unit for unit, weight in weights.items() if weight >= limit and self._subject.opens(unit)]


def _sums(graph: CallGraph, numbers: Sequence[float]) -> dict[str, float]:
    """Return the sum of numbers of nodes over all calls of each unit."""
    sums: dict[str, float] = {}
    for node, number in zip(graph.nodes, numbers, strict=True):
        if node.kind == "call":
            sums[node.name] = sums.get(node.name, 0.0) + number
    return sums


def _unevenness(plan: Plan) -> float:
    return sum(stage.share**2 for stage in plan.stages)


def _beside_cuts(plan: Plan) -> set[str]:
    """Return the units next to cuts: the last unit of each stage, and the first of the next."""
    ends = {unit for stage in plan.stages[:-1] for unit in stage.units[-1:]}
    return ends | {unit for stage in plan.stages[1:] for unit in stage.units[:1]}


def _gains(plan: Plan, best: Plan) -> bool:
    """Return whether a plan with finer units is enough faster or more even to justify its additional calls."""
    now, before = plan.slowest.share, best.slowest.share
    return now < before * _WORTH or (now <= before and _unevenness(plan) < _unevenness(best) * _WORTH)


# -- closing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Closing:
    """A mapping from a graph with open units to one with coarser units.

    Attributes:
        graph: graph as captured with the open units.
        units: paths of the coarser units.
        names: names of the nodes with the coarser units, in order.
        bounds: the nodes ``bounds[i] .. bounds[i + 1] - 1`` of the graph become node i.
    """

    graph: CallGraph
    units: tuple[str, ...]
    names: tuple[str, ...]
    bounds: tuple[int, ...]

    def cuts(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Return cuts of the graph as positions among the coarser nodes."""
        return tuple(self.bounds.index(cut) for cut in cuts)

    def costs(self, costs: Costs) -> Costs:
        """Return the costs of the coarser nodes: the sums over their parts."""
        ranges = [slice(*pair) for pair in zip(self.bounds, self.bounds[1:], strict=False)]
        return replace(
            costs,
            forward=tuple(sum(costs.forward[r]) for r in ranges),
            backward=tuple(sum(costs.backward[r]) for r in ranges),
            stash_bytes=tuple(sum(costs.stash_bytes[r]) for r in ranges),
        )

    def is_met_by(self, graph: CallGraph, cuts: Sequence[int]) -> bool:
        """Return whether a capture with the coarser units has the expected nodes, and allows the same cuts."""
        fine = self.graph
        if tuple(node.name for node in graph.nodes) != self.names:
            return False
        for node, begin, end in zip(graph.nodes, self.bounds, self.bounds[1:], strict=False):
            parts = fine.nodes[begin:end]
            if set(node.parameters) != {name for part in parts for name in part.parameters}:
                return False
            if set(node.states) != {name for part in parts for name in part.states}:
                return False
        return all(
            graph.obstacles[new] is None and graph.boundary_bytes[new] == fine.boundary_bytes[old]
            for old, new in zip(cuts, self.cuts(cuts), strict=True)
        )


def closing(subject: Divisible, graph: CallGraph, cuts: Sequence[int], keep: Collection[str]) -> Closing | None:
    """Find the units that can be closed; None if there are none.

    Args:
        subject: module whose step was captured.
        graph: graph as captured with the open units.
        cuts: positions that must stay possible cuts.
        keep: paths of modules that stay units, or hold units.
    """
    calls: dict[str, list[FollowedCall]] = {}
    for call in graph.followed_calls:
        calls.setdefault(call.path, []).append(call)
    full_names = {id(p): name for name, p in subject.module.named_parameters()}
    observers = set(map(id, subject.observers))

    def may_be_closed(path: str) -> bool:
        """Return whether a module may become a unit, given all of its calls."""
        module, below = subject.module.get_submodule(path), f"{path}."
        if any(name.startswith(below) for name in keep):
            return False
        if any(inner._forward_hooks or id(inner) in observers for inner in module.modules()):
            return False  # hooks are glue, which every stage executes
        own = {full_names[id(p)] for p in module.parameters()}
        for call in calls[path]:
            nodes = graph.nodes[call.begin : call.end]
            if not nodes or call.observes or any(call.begin < cut < call.end for cut in cuts):
                return False
            used = {name for node in nodes for name in node.parameters}
            if used != own or not all(name.startswith(below) for node in nodes for name in node.states):
                return False
        inside = {i for call in calls[path] for i in range(call.begin, call.end)}
        return all(n.index in inside for n in graph.nodes if n.kind == "call" and n.name.startswith(below))

    allowed = [path for path in calls if may_be_closed(path)]
    chosen = [path for path in allowed if not any(path.startswith(f"{other}.") for other in allowed)]
    if not chosen:
        return None
    wholes = {call.begin: call for path in chosen for call in calls[path]}
    names, bounds = [], [0]
    while bounds[-1] < len(graph.nodes):
        whole = wholes.get(bounds[-1])
        names.append(graph.nodes[bounds[-1]].name if whole is None else whole.path)
        bounds.append(bounds[-1] + 1 if whole is None else whole.end)
    outer = (next((path for path in chosen if unit.startswith(f"{path}.")), unit) for unit in graph.units)
    return Closing(graph, tuple(dict.fromkeys(outer)), tuple(names), tuple(bounds))
