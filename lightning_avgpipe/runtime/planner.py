"""The planner: captures a step function, refines its units as far as balance needs it, and divides it into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.recorder import capture
from lightning_avgpipe.capture.units import divisible, initial_units, refine, split_units
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.partition import Costs, Plan, cut_at, cut_balanced, make_plan

__all__ = ["Planner"]

# Refining ends when the slowest stage is within this share of a perfect balance ...
_BALANCED = 1.1
# ... and opens only units that weigh more than this part of a stage's fair share.
_HEAVY = 0.25
_WORTH = 0.98


@dataclass(frozen=True)
class Planner:
    """Makes plans for one module.

    Attributes:
        module: whose steps are divided.
        num_stages: K.
        split_points: names of the units at which stages 1..K-1 begin; None balances.
        device: where captures compute.
        observers: modules that only look at values (metrics).
    """

    module: nn.Module
    num_stages: int
    split_points: Sequence[str] | None = None
    device: torch.device | None = None
    observers: Collection[nn.Module] = ()

    def capture(self, step: str, run: Callable[..., Any], args: Sequence[Any], units: Sequence[str]) -> CallGraph:
        """The call graph of a step, at the granularity of these units."""
        return capture(step, run, args, self.module, units, self.device)

    def plan(self, step: str, run: Callable[..., Any], args: Sequence[Any], units: Sequence[str] = ()) -> Plan:
        """Divide a step into stages.

        Args:
            step: name of the step function.
            run: executes it.
            args: arguments of one micro-batch.
            units: units to start from, for instance those of an earlier plan.
        Raises:
            PartitionError: there are not enough legal cuts, however fine the units.
        """
        units = tuple(units) or initial_units(self.module, self.observers)
        if self.split_points is not None:
            return self._plan_at_split_points(step, run, args, units)
        best: Plan | None = None
        while True:
            graph = self.capture(step, run, args, units)
            costs = Costs.from_flops(graph)
            fair = sum(costs.node) / self.num_stages
            plan, failure = None, None
            try:
                plan = make_plan(graph, cut_balanced(graph, costs, self.num_stages), costs, self._sizes())
            except PartitionError as error:
                failure = error
            if plan is not None:
                if best is None or _gains(plan, best):
                    best = plan
                if _slowest(plan) * self.num_stages <= _BALANCED:
                    return best
            heavy = self._heavy_units(graph, costs, fair * _HEAVY if plan is not None else 0.0)
            if not heavy:
                if best is None:
                    assert failure is not None
                    raise failure
                return best
            units = refine(self.module, units, heavy, self.observers)

    def _plan_at_split_points(
        self, step: str, run: Callable[..., Any], args: Sequence[Any], units: Sequence[str]
    ) -> Plan:
        assert self.split_points is not None
        units = split_units(self.module, units, self.split_points, self.observers)
        graph = self.capture(step, run, args, units)
        costs = Costs.from_flops(graph)
        return make_plan(graph, cut_at(graph, self.split_points, self.num_stages), costs, self._sizes())

    def _heavy_units(self, graph: CallGraph, costs: Costs, limit: float) -> list[str]:
        weights: dict[str, float] = {}
        for node, cost in zip(graph.nodes, costs.node, strict=True):
            if node.kind == "call":
                weights[node.name] = weights.get(node.name, 0.0) + cost
        return [unit for unit, weight in weights.items() if weight >= limit and divisible(self.module, unit)]

    def _sizes(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self.module.named_parameters()}


def _slowest(plan: Plan) -> float:
    return max(stage.share for stage in plan.stages)


def _unevenness(plan: Plan) -> float:
    return sum(stage.share**2 for stage in plan.stages)


def _gains(plan: Plan, best: Plan) -> bool:
    """Finer units cost a little at every call, so they must be worth it: a faster pace, or a more even rest."""
    if _slowest(plan) < _slowest(best) * _WORTH:
        return True
    return _slowest(plan) <= _slowest(best) and _unevenness(plan) < _unevenness(best) * _WORTH
