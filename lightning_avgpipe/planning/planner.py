"""The planner captures a step function, refines its units as far as balance needs it, and divides it into stages."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import UnmeasurableError, measure
from lightning_avgpipe.capture.random_skips import CapturedRun, capture_with_fewest_skips
from lightning_avgpipe.capture.wire_format import Wire
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.balance import cut_at, cut_balanced, limits, scattered
from lightning_avgpipe.planning.costs import Costing, units_between
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.memory import Conditions, Memory, UpdateScheme, memory_of
from lightning_avgpipe.planning.plan import Forecast, Plan, forecast_of, make_plan
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.planning.refinement import Refinement, closing
from lightning_avgpipe.planning.trained import backward_ends
from lightning_avgpipe.schedule import build, with_replicas

_log = logging.getLogger(__name__)

_ASKS = "reads numbers of values, so that what it calls may differ between batches"
# Shares by which the slowest stage may be slower for less traffic, if this shortens the iteration by factor _QUICKER.
_SLACKS = 0.05, 0.1, 0.2
_QUICKER = 0.98
# A slowest stage that exceeds its fair share by this factor is explained, with at most _SHOWN reasons.
_UNEVEN = 1.25
_SHOWN = 3


class Proposal(NamedTuple):
    """A plan that replaces the balanced one.

    Attributes:
        planner: planner with the plan's number of stages, and of replicas of each stage.
        plan: plan with the processes of its stages and a forecast.
        costs: costs of the nodes and hops.
        memory: sizes from which the memory of its stages was estimated.
    """

    planner: Planner
    plan: Plan
    costs: Costs
    memory: Memory


class PlanSource:
    """A source of plans that replace the balanced one. This base class changes nothing.

    A system derives from it, and adds its class to :data:`SOURCES` or passes an instance to the planner.

    Args:
        bandwidth: the option of :class:`Links`: bytes per second between every two processes, or ``"measured"``.

    Attributes:
        replicates: whether it chooses the number of stages, at most the requested one, and how many processes share
            each stage.
    """

    replicates = False

    def __init__(self, bandwidth: Any = "measured") -> None:
        pass

    def measure(self, cluster: Any, seconds: Callable[[], float] | None) -> None:
        """Measure what plans depend on. Every process calls this before each plan for training.

        Args:
            cluster: the connected processes.
            seconds: measures the seconds of the step on the device of this process; None: the process lacks the whole
                module.
        """

    def opened(self, subject: Divisible, units: Sequence[str]) -> Sequence[str]:
        """Return the units to begin with instead of these."""
        return units

    def costs(self, subject: Divisible, graph: CallGraph, costs: Costs) -> Costs:
        """Return the costs of a graph's nodes to use instead of these."""
        return costs

    def kept(self, graph: CallGraph, costs: Costs) -> int:
        """Return how many leading nodes of a final graph have outputs that are cached; 0: none."""
        return 0

    def propose(self, planner: Planner, plan: Plan, costs: Costs, conditions: Conditions) -> Proposal | None:
        """Return a plan to use instead of the balanced one; None to keep that one."""
        return None


SOURCES: dict[str, type[PlanSource]] = {"balanced": PlanSource}
"""The sources of plans, by the name with which the option ``planner`` chooses them."""


@dataclass(frozen=True)
class Planner:
    """A planner that divides the steps of one module into stages.

    Attributes:
        subject: module whose steps are divided.
        num_stages: K, number of stages.
        split_points: names of the units at which stages 1..K-1 begin; None: balanced stages.
        costing: how the costs of the units are found.
        memory_limit: bytes that each stage may use.
        recompute: what is repeated before, or in, a backward.
        replicas: number of replicas of each stage, which share its micro-batches; empty: one of each.
        updates: how stages are updated.
        wire: format in which values travel between stages.
        source: source of other plans.
    """

    subject: Divisible
    num_stages: int
    split_points: Sequence[str] | None = None
    costing: Costing = field(default_factory=Costing)
    memory_limit: float = math.inf
    recompute: Recompute = Recompute()  # noqa: RUF009
    replicas: Sequence[int] = ()
    updates: UpdateScheme = UpdateScheme()  # noqa: RUF009
    wire: Wire = None
    source: PlanSource = field(default_factory=PlanSource)

    @property
    def measures(self) -> bool:
        """Whether costs are measured; not for a single stage, nor if parameters are on the meta device."""
        absent = any(p.is_meta for p in self.subject.module.parameters())
        return self.costing.kind == "measured" and self.num_stages > 1 and not absent

    def seconds(self, step: Step) -> float:
        """Return the measured seconds of a step on the device of this process; 0 if they are not measured."""
        if not self.measures:
            return 0.0
        subject, shows = self.subject, self.costing.shows
        try:
            costs = measure(subject.capture(step), step.run, step.args, subject.module, subject.place, shows=shows)
        except UnmeasurableError:  # the plan will count operations instead, and log this
            return 0.0
        return sum(costs.forward) + sum(costs.backward)

    def capture_like(self, step: Step, plan: Plan) -> CallGraph:
        """Capture another step, opening its units until each has all its parameters on one stage of the plan."""
        units = plan.graph.units
        while True:
            graph = self.subject.capture(step, units)
            wide = [unit for unit in scattered(graph, plan.stages_of) if self.subject.opens(unit)]
            if not wide:
                return graph
            units = self.subject.refine(graph.units, wide)

    def provisional(self, step: Step, conditions: Conditions) -> Plan:
        """Make a plan for a step that runs before the step that decides the plan, such as validation before training.

        If it cannot be divided, the last stage runs it alone.
        """
        planner = replace(self, costing=Costing(), source=PlanSource())
        try:
            return planner.plan(step, conditions)
        except PartitionError as error:
            _log.debug("%s runs on the last stage until training begins: %s", step.name, error)
            graph = self.subject.capture(step)
            return self.plan_at(graph, (0,) * (self.num_stages - 1), planner._counted(graph))

    def plan(self, step: Step, conditions: Conditions, units: Sequence[str] = ()) -> Plan:
        """Divide a step into stages.

        First units are refined with counted operations, which is fast. Then they are measured, and refined further if
        the measured times need it.

        Args:
            step: step to be divided.
            conditions: schedule, links and processes.
            units: units to start from, for instance those of an earlier plan.
        Raises:
            PartitionError: there are not enough legal cuts, however fine the units, or memory is too small.
        """
        try:  # a source that chooses the number of stages gets fewer stages if so many are not possible
            return self._plan(step, conditions, units)
        except PartitionError as error:
            if not self.source.replicates or self.num_stages <= 2:
                raise
            _log.debug("%s: %s", step.name, error)
            try:
                return replace(self, num_stages=self.num_stages - 1).plan(step, conditions, units)
            except PartitionError:
                raise error from None

    def _plan(self, step: Step, conditions: Conditions, units: Sequence[str]) -> Plan:
        memory, subject = self.memory(conditions), self.subject
        units = self._initial(units)
        graph = subject.capture(step, units)
        way = CapturedRun(graph, step.run)
        if self.num_stages > 1:
            follow = lambda run: subject.capture(step._replace(run=run), units)  # noqa: E731
            way = capture_with_fewest_skips(graph, step.run, subject.module, subject.place, follow)
        graph, step = way.graph, step._replace(run=way.run)
        refinement = Refinement(subject, step, self.num_stages)
        # share the samples of earlier plans, but give each plan its own time budget
        costing = replace(self.costing, samples=replace(self.costing.samples, spent_s=0.0))
        measured = partial(self._measured, costing, step, conditions.links)
        if self.split_points is not None:
            cuts = cut_at(graph, self.split_points, self.num_stages)
            costs = (measured if self.measures else self._counted)(graph)
            plan = self.plan_at(graph, cuts, costs, memory)
        else:
            counted = replace(memory, limit=math.inf, weights={}) if self.measures else memory
            plan, costs = refinement.best(graph, self._counted, partial(self.balanced, memory=counted))
            if self.measures:
                plan, costs = refinement.best(plan.graph, measured, partial(self.balanced, memory=memory))
            plan = self._for_schedule(plan, costs, memory, conditions)
        way.check(plan.graph.units)
        unit_costs = units_between(plan.graph, costs, subject.nbytes)[0] if self.measures else None
        proposed = self.source.propose(self, plan, costs, conditions)
        if proposed is not None:
            planner, other, costs, memory = proposed
            plan = planner._closed(step, other, costs, memory)
            plan = replace(plan, devices=other.devices, forecast=other.forecast)
        else:
            note = self._note(plan, costs, refinement.spared)
            plan = self._closed(step, plan, costs, memory)
            plan = replace(plan, forecast=self._forecast(plan, conditions), note=note)
        return replace(plan, units=unit_costs, kept=self.source.kept(plan.graph, costs))

    def _initial(self, units: Sequence[str]) -> tuple[str, ...]:
        """Return the units to start from, opened where options or the source of plans need it."""
        units = self.subject.split(units or self.subject.units(), self.recompute.modules)
        return self.subject.split(self.source.opened(self.subject, units), self.split_points or ())

    def _for_schedule(self, plan: Plan, costs: Costs, memory: Memory, conditions: Conditions) -> Plan:
        """Return a less even plan with less traffic if the simulated schedule is faster with it, otherwise the plan."""
        if not any(link.per_byte for link in costs.links):
            return plan
        least = self._forecast(plan, conditions)
        tried = {plan.cuts}
        for slack in _SLACKS:
            cuts = cut_balanced(plan.graph, costs, self.num_stages, memory, None, self.replicas, slack)
            if cuts in tried:
                continue
            tried.add(cuts)
            other = self.plan_at(plan.graph, cuts, costs, memory)
            expected = self._forecast(other, conditions)
            if expected.iteration_s < least.iteration_s * _QUICKER:
                plan, least = other, expected
        return plan

    def _forecast(self, plan: Plan, conditions: Conditions) -> Forecast:
        models = conditions.num_pipelines, self.updates.rolling
        return forecast_of(plan, conditions.schedule, self.updates.policy, conditions.owners, *models)

    def _note(self, plan: Plan, costs: Costs, spared: Collection[str]) -> str:
        """Return why the slowest stage takes so long, and what would help; empty if the stages are even."""
        slowest, counts = plan.slowest, self.replicas or (1,) * self.num_stages
        work = sum(stage.share * count for stage, count in zip(plan.stages, counts, strict=True))
        if sum(counts) * slowest.share <= _UNEVEN * work:
            return ""
        bounds = [0, *plan.cuts, len(plan.graph.nodes)]
        start, end = bounds[slowest.index : slowest.index + 2]
        whole = self.subject.whole(plan.graph.units) | dict.fromkeys(spared, _ASKS)
        found = limits(plan.graph, costs, whole, start, end)[:_SHOWN]
        because = "".join(f"\n  - {limit}" for limit in found)
        because = because and f". What cannot be divided in it:{because}"
        helps = "" if self.replicas else _with_second_device(plan)
        return (
            f"stage {slowest.index} takes {slowest.share:.0%} of the time: {self.num_stages} stages are at most "
            f"{work / slowest.share:.2f} times as fast as one{because}{helps}"
        )

    def memory(self, conditions: Conditions) -> Memory:
        """Return the sizes and limits of memory that stages depend on."""
        memory = memory_of(
            self.subject.module, conditions, self.updates, self.memory_limit, self.recompute.stages, self.replicas
        )
        # without measured costs the time of a byte is a guess, and no reason to avoid copies of parameters
        return memory if self.measures else replace(memory, weights={})

    def for_replicated_stages(self, replicas: tuple[int, ...], conditions: Conditions) -> tuple[Planner, Memory]:
        """Return a planner for stages that several processes share, and the memory of these stages.

        Args:
            replicas: number of processes of each stage, shape ``(K,)``.
            conditions: conditions of plans with one process for each stage.
        """
        schedule = conditions.schedule
        shared = with_replicas(build(schedule.name, len(replicas), schedule.num_microbatches), replicas)
        planner = replace(self, num_stages=len(replicas), replicas=replicas)
        return planner, planner.memory(replace(conditions, schedule=shared))

    def _counted(self, graph: CallGraph) -> Costs:
        counted, first = Costs.from_flops(graph), backward_ends(graph)
        counted = replace(counted, backward=(0.0,) * first + counted.backward[first:], wire=self.wire)
        return self.source.costs(self.subject, graph, self.recompute.costs(graph, counted))

    def _closed(self, step: Step, plan: Plan, costs: Costs, memory: Memory) -> Plan:
        """Return the plan with opened units closed again, unless a cut or the end of cached outputs lies in them."""
        stays = (*plan.cuts, costs.kept) if costs.kept else plan.cuts
        closed = closing(self.subject, plan.graph, stays, self.recompute.modules)
        if closed is None:
            return plan
        graph = self.subject.capture(step, closed.units)
        if not closed.is_met_by(graph, stays):  # for example, a closed unit uses what a part of it has set
            _log.debug("%s needs its units open: %s", step.name, ", ".join(plan.graph.units))
            return plan
        return self.plan_at(graph, closed.cuts(plan.cuts), closed.costs(costs), memory)

    def balanced(self, graph: CallGraph, costs: Costs, memory: Memory) -> Plan:
        """Return the most balanced plan for this graph.

        Raises:
            PartitionError: no plan has enough legal cuts, or fits into memory.
        """
        whole = self.subject.whole(graph.units)
        return self.plan_at(
            graph, cut_balanced(graph, costs, self.num_stages, memory, whole, self.replicas), costs, memory
        )

    def _measured(self, costing: Costing, step: Step, links: tuple[Link, ...], graph: CallGraph) -> Costs:
        # the cache holds costs without recomputation
        costs = costing.measured(self.subject, step, graph)
        costs = self.recompute.costs(graph, replace(costs, links=links, wire=self.wire))
        return self.source.costs(self.subject, graph, costs)

    def plan_at(self, graph: CallGraph, cuts: Sequence[int], costs: Costs, memory: Memory | None = None) -> Plan:
        """Return the plan of the stages between cuts."""
        sizes = {name: parameter.numel() for name, parameter in self.subject.module.named_parameters()}
        return make_plan(graph, cuts, costs, sizes, memory, self.replicas)


def _with_second_device(plan: Plan) -> str:
    """Return advice to give the slowest stage a second device, taken from the others; empty if that does not help."""
    slowest, others = plan.slowest, plan.num_stages - 2
    if others < 1:
        return ""
    fastest = 1 / max(slowest.share / 2, (1 - slowest.share) / others)
    if fastest * slowest.share < _UNEVEN:
        return ""
    counts = [1] * (others + 1)
    counts[min(slowest.index, others)] = 2
    return (
        f"\nIf two devices share it (replicas={counts}), as many devices are at most {fastest:.2f} times as fast, but "
        "for the sum of its gradients"
    )
