"""Refinement: open units as far as the balance of stages needs it."""

from __future__ import annotations

from collections.abc import Callable

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.plan import Plan

# Refining ends when the slowest stage is within this share of a perfect balance ...
_BALANCED = 1.03
# ... and opens only units that weigh more than this share of a stage's fair share,
_HEAVY = 0.25
# then, at most _NEAR_CUTS times, units next to a cut that weigh more than the share _MOVES of a stage's fair share.
_NEAR_CUTS = 3
_MOVES = 0.03
# Finer units must make the slowest stage or the unevenness smaller by this factor.
_WORTH = 0.99
# A unit that reads numbers of tensors (``.item()``) may call other modules for other micro-batches. This is allowed
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
        spared: units that stay whole, because they read numbers of tensors.
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
            plan, failure = _attempt(cut, graph, costs)
            if plan is not None:
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
                    assert failure is not None
                    raise failure
                return best
            finer = self._subject.capture(self._step, self._subject.refine(graph.units, heavy))
            if found := (finer.number_readers & set(heavy)) - tried:
                tried |= found
                self.spared |= found
                continue
            graph, costs = finer, costs_of(finer)

    def _too_heavy(self, graph: CallGraph, costs: Costs, plan: Plan | None) -> list[str]:
        """Return the units to open. Spared units are opened only if no plan is good without that."""
        fair_s = sum(costs.node) / self._num_stages
        found = self._heavy_units(graph, costs, fair_s * _HEAVY if plan is not None else 0.0)
        found += [unit for unit in sorted(graph.leaking) if unit not in found and self._subject.opens(unit)]
        heavy = [unit for unit in found if unit not in self.spared]
        if not heavy and (plan is None or plan.slowest.share * self._num_stages > _SPARED):
            heavy = [unit for unit in found if unit in self.spared]
            self.spared.clear()
        return heavy

    def _heavy_units(self, graph: CallGraph, costs: Costs, limit: float) -> list[str]:
        weights: dict[str, float] = {}
        for node, cost in zip(graph.nodes, costs.node, strict=True):
            if node.kind == "call":
                weights[node.name] = weights.get(node.name, 0.0) + cost
        return [unit for unit, weight in weights.items() if weight >= limit and self._subject.opens(unit)]


def _attempt(
    cut: Callable[[CallGraph, Costs], Plan], graph: CallGraph, costs: Costs
) -> tuple[Plan | None, PartitionError | None]:
    """Return the best plan for this graph, or the error that says why there is none."""
    try:
        return cut(graph, costs), None
    except PartitionError as error:
        return None, error


def _unevenness(plan: Plan) -> float:
    return sum(stage.share**2 for stage in plan.stages)


def _beside_cuts(plan: Plan) -> set[str]:
    """Return the units next to cuts: the last unit of each stage, and the first of the next."""
    ends = {unit for stage in plan.stages[:-1] for unit in stage.units[-1:]}
    return ends | {unit for stage in plan.stages[1:] for unit in stage.units[:1]}


def _gains(plan: Plan, best: Plan) -> bool:
    """Return whether a plan with finer units is faster or more even by enough to justify its additional calls."""
    now, before = plan.slowest.share, best.slowest.share
    return now < before * _WORTH or (now <= before and _unevenness(plan) < _unevenness(best) * _WORTH)
