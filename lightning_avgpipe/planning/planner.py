"""The planner, which captures a step function, refines its units as balance needs, and divides it into stages."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import measure, reading_s
from lightning_avgpipe.capture.ways import Way, fullest
from lightning_avgpipe.capture.wire_format import Wire
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Costs, Forecast, Link, Memory, Plan, cut_at, cut_balanced, make_plan, scattered
from lightning_avgpipe.planning.coarsening import closing
from lightning_avgpipe.planning.costing import Costing
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.forecast import forecast_of, idle_share
from lightning_avgpipe.planning.freezing import backward_ends, frozen_prefix
from lightning_avgpipe.planning.halving import Halving, expected, fewest, processes_of
from lightning_avgpipe.planning.limits import limits
from lightning_avgpipe.planning.model_memory import Updates, memory_of, with_shards, with_versions
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.planning.refinement import Refinement
from lightning_avgpipe.planning.spp import SppPlan
from lightning_avgpipe.planning.turns import plan_in_turns, units_between
from lightning_avgpipe.schedule import Schedule, build, with_replicas
from lightning_avgpipe.schedule.rules import trains

_log = logging.getLogger(__name__)

_ASKS = "reads numbers of values, so that what it calls may differ between batches"
# By what share the slowest stage may be slower for less traffic; then the schedule must be faster by _QUICKER.
_SLACKS = 0.05, 0.1, 0.2
_QUICKER = 0.98
# A slowest stage that exceeds its fair share by this factor is explained, with at most _SHOWN reasons.
_UNEVEN = 1.25
_SHOWN = 3


@dataclass(frozen=True)
class Conditions:
    """The conditions for which a plan is made: schedule, links, parallel models and processes.

    Attributes:
        schedule: schedule of the step; None if it is not known, and there is no forecast.
        links: one link for each hop; empty: messages take no time.
        state_copies: size of the optimizer state of each trained parameter, in multiples of the parameter.
        num_pipelines: N, number of parallel models.
        num_groups: number of process groups, each with N pipelines.
        bandwidth: bytes per second between every two processes on which SPP may place stages, shape ``(V, V)``; None:
            the stages of each process are given.
        owners: rank of the process of each stage, shape ``(K,)``; empty: one process per stage, or as ``turns`` says.
        slowness: time of each process in units of the fastest, shape ``(V,)``; empty: all are equally fast.
        halving: conditions for fewer stages than processes, which then share stages; None: not allowed.
    """

    schedule: Schedule | None = None
    links: tuple[Link, ...] = ()
    state_copies: int = 2
    num_pipelines: int = 1
    num_groups: int = 1
    bandwidth: Matrix | None = None
    owners: tuple[int, ...] = ()
    slowness: tuple[float, ...] = ()
    halving: Halving | None = None


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
        keeps: whether the outputs of frozen layers are kept, where reading them is faster than computing them.
        wire: format in which values travel between stages.
    """

    subject: Divisible
    num_stages: int
    split_points: Sequence[str] | None = None
    costing: Costing = field(default_factory=Costing)
    memory_limit: float = math.inf
    recompute: Recompute = Recompute()  # noqa: RUF009
    replicas: Sequence[int] = ()
    updates: Updates = Updates()  # noqa: RUF009
    keeps: bool = False
    wire: Wire = None

    @property
    def measures(self) -> bool:
        """Whether costs are measured. They are not for one stage, which needs none, or with parameters on meta."""
        absent = any(p.is_meta for p in self.subject.module.parameters())
        return self.costing.kind == "measured" and self.num_stages > 1 and not absent

    def seconds(self, step: Step) -> float:
        """Return the measured seconds of a step on the device of this process; 0 where costs are not measured."""
        if not self.measures:
            return 0.0
        costs = measure(self.subject.capture(step), step.run, step.args, self.subject.module, self.subject.place)
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
        """Make a plan for a step that runs before the deciding step; the last stage runs it if it cannot be divided."""
        planner = replace(self, costing=Costing())
        try:
            return planner.plan(step, conditions=conditions)
        except PartitionError as error:
            _log.debug("%s runs on the last stage until training begins: %s", step.name, error)
            graph = self.subject.capture(step)
            return self._made(graph, (0,) * (self.num_stages - 1), planner._counted(graph))

    def plan(self, step: Step, units: Sequence[str] = (), conditions: Conditions | None = None) -> Plan:
        """Divide a step into stages.

        Operations are counted while units are refined, which is fast; then the units are measured, and refined further
        where the measured times ask for it.

        Args:
            step: to be divided.
            units: units to start from, for instance those of an earlier plan.
            conditions: schedule, links and processes; None: the defaults.
        Raises:
            PartitionError: there are not enough legal cuts, however fine the units, or memory is too small.
        """
        conditions = conditions or Conditions()
        if conditions.bandwidth is not None and self.num_stages > 2:
            try:  # refine units as far as one stage on each device needs it
                return self._plan(step, units, conditions)
            except PartitionError as error:
                _log.debug("%s: %s", step.name, error)
                fewer = replace(self, num_stages=self.num_stages - 1)
                try:
                    return fewer.plan(step, units, conditions)
                except PartitionError:
                    raise error from None
        return self._plan(step, units, conditions)

    def _plan(self, step: Step, units: Sequence[str], conditions: Conditions) -> Plan:
        memory, subject = self._memory(conditions), self.subject
        units = self._initial(units)
        graph = subject.capture(step, units)
        way = Way(graph, step.run)
        if self.num_stages > 1:
            follow = lambda run: subject.capture(step._replace(run=run), units)  # noqa: E731
            way = fullest(graph, step.run, subject.module, subject.place, follow)
        graph, step = way.graph, step._replace(run=way.run)
        refinement = Refinement(subject, step, self.num_stages)
        # share the samples of earlier plans, but give each plan its own time budget
        costing = replace(self.costing, samples=replace(self.costing.samples, spent_s=0.0))
        measured = partial(self._measured, costing, step, conditions.links)
        if self.split_points is not None:
            cuts = cut_at(graph, self.split_points, self.num_stages)
            costs = (measured if self.measures else self._counted)(graph)
            plan = self._made(graph, cuts, costs, memory)
        else:
            counted = replace(memory, limit=math.inf, weights={}) if self.measures else memory
            plan, costs = refinement.best(graph, self._counted, partial(self._balanced, memory=counted))
            if self.measures:
                plan, costs = refinement.best(plan.graph, measured, partial(self._balanced, memory=memory))
            plan = self._for_schedule(plan, costs, memory, conditions)
        way.check(plan.graph.units)
        if conditions.bandwidth is not None and conditions.schedule is not None:
            return self._placed(step, plan.graph, costs, conditions.bandwidth, conditions)
        apart = units_between(plan.graph, costs, subject.nbytes)[0] if self.measures else None
        fewer = self._fewest(plan, costs, conditions)
        if fewer is not None:
            planner, plan, memory, forecast = fewer
            plan = planner._closed(step, plan, costs, memory)
            plan = replace(plan, devices=processes_of(planner.replicas), forecast=forecast)
        else:
            note = self._note(plan, costs, refinement.spared)
            plan = self._closed(step, plan, costs, memory)
            models = conditions.num_pipelines, self.updates.rolling
            expected = forecast_of(plan, conditions.schedule, self.updates.policy, conditions.owners, *models)
            plan = replace(plan, forecast=expected, note=note)
        return replace(plan, units=apart, frozen=self._kept(plan.graph, costs))

    def _initial(self, units: Sequence[str]) -> tuple[str, ...]:
        """Return the units to start from, which are opened where this is known to be needed."""
        units = self.subject.split(units or self.subject.units(), self.recompute.modules)
        while self.keeps and (mixed := self.subject.half_frozen(units)):
            units = self.subject.refine(units, mixed)
        return self.subject.split(units, self.split_points or ())

    def _for_schedule(self, plan: Plan, costs: Costs, memory: Memory, conditions: Conditions) -> Plan:
        """Return a less even plan with less traffic if the simulated schedule is faster with it, otherwise the plan."""
        if not any(link.per_byte for link in costs.links) or conditions.bandwidth is not None:
            return plan
        least = forecast_of(plan, conditions.schedule, self.updates.policy)
        tried = {plan.cuts}
        for slack in _SLACKS if least is not None else ():
            cuts = cut_balanced(plan.graph, costs, self.num_stages, memory, None, self.replicas, slack)
            if cuts in tried:
                continue
            tried.add(cuts)
            other = self._made(plan.graph, cuts, costs, memory)
            expected = forecast_of(other, conditions.schedule, self.updates.policy)
            if least is not None and expected is not None and expected.iteration_s < least.iteration_s * _QUICKER:
                plan, least = other, expected
        return plan

    def _placed(self, step: Step, graph: CallGraph, costs: Costs, bandwidth: Matrix, conditions: Conditions) -> Plan:
        """Make the plan with SPP's stages and the processes of each."""
        begin, schedule = time.perf_counter(), conditions.schedule
        assert schedule is not None
        num_microbatches = schedule.num_microbatches
        slow = conditions.slowness
        units, positions = units_between(graph, costs, self.subject.nbytes)
        if slow and slow[0] > 1:  # costs were measured on rank 0
            faster = ((seconds / slow[0] for seconds in of) for of in (units.forward_s, units.backward_s))
            units = replace(units, **dict(zip(("forward_s", "backward_s"), map(tuple, faster), strict=True)))

        def divided(found: SppPlan) -> tuple[Planner, Plan, Memory, Costs]:
            devices = tuple(ranks for _, _, ranks in found.stages)
            slowest = [min(bandwidth[u][v] for u in here for v in after) for here, after in itertools.pairwise(devices)]
            counts = tuple(map(len, devices))
            order = with_replicas(build(schedule.name, found.num_stages, num_microbatches), counts)
            chosen = replace(self, num_stages=found.num_stages, replicas=counts)
            memory = chosen._memory(replace(conditions, schedule=order))
            cuts = tuple(positions[last] for _, last, _ in found.stages[:-1])
            linked = replace(costs, links=tuple(Link(1 / speed) for speed in slowest), kept=0)
            return chosen, chosen._made(graph, cuts, linked, memory), memory, linked

        def fits(found: SppPlan) -> bool:
            limit = self.memory_limit
            return limit == math.inf or all(stage.memory.total <= limit for stage in divided(found)[1].stages)

        found = plan_in_turns(units, bandwidth, num_microbatches, slow, fits)
        took_s = time.perf_counter() - begin
        _log.info("planned %d units on %d devices in %.1f s", units.num_units, len(bandwidth), took_s)
        chosen, made, memory, linked = divided(found)
        plan = chosen._closed(step, made, linked, memory)
        forecast = Forecast("spp", num_microbatches, found.makespan_s, idle_share(units, found, num_microbatches, slow))
        return replace(plan, forecast=forecast, devices=tuple(ranks for _, _, ranks in found.stages))

    def _fewest(
        self, plan: Plan, costs: Costs, conditions: Conditions
    ) -> tuple[Planner, Plan, Memory, Forecast] | None:
        """Return a plan with fewer stages that processes share, if that is allowed and not slower; None otherwise."""
        halving, schedule = conditions.halving, conditions.schedule
        if halving is None or schedule is None or self.split_points is not None:
            return None
        nbytes = self.subject.nbytes
        trained = {name: nbytes[name] for name, p in self.subject.module.named_parameters() if p.requires_grad}
        slowest = max(plan.links, key=lambda link: (link.per_byte, link.latency), default=Link())
        tried: dict[tuple[int, ...], tuple[Planner, Plan, Memory]] = {}

        def divide(counts: tuple[int, ...]) -> Plan:
            fewer = replace(self, num_stages=len(counts), replicas=counts, memory_limit=halving.memory_limit)
            order = with_replicas(build(schedule.name, len(counts), schedule.num_microbatches), counts)
            memory = fewer._memory(replace(conditions, schedule=order))
            made = fewer._balanced(plan.graph, replace(costs, links=(slowest,)), memory)
            halving.accept(made, counts)
            tried[counts] = fewer, made, memory
            return made

        found = fewest(plan, divide, partial(expected, schedule=schedule, link=slowest, trained=trained))
        return None if found is None else (*tried[found[0]], found[1])

    def _note(self, plan: Plan, costs: Costs, spared: Collection[str]) -> str:
        """Return why the slowest stage takes so long; empty if the stages are even."""
        slowest = plan.slowest
        if slowest.share * self.num_stages <= _UNEVEN:
            return ""
        bounds = [0, *plan.cuts, len(plan.graph.nodes)]
        start, end = bounds[slowest.index : slowest.index + 2]
        whole = self.subject.whole(plan.graph.units) | dict.fromkeys(spared, _ASKS)
        found = limits(plan.graph, costs, whole, start, end)[:_SHOWN]
        because = "".join(f"\n  - {limit}" for limit in found)
        because = because and f". What cannot be divided in it:{because}"
        return (
            f"stage {slowest.index} takes {slowest.share:.0%} of the time: {self.num_stages} stages are at most "
            f"{1 / slowest.share:.2f} times as fast as one{because}"
        )

    def _memory(self, conditions: Conditions) -> Memory:
        memory = memory_of(
            self.subject.module,
            conditions.schedule,
            conditions.state_copies,
            self.memory_limit,
            self.recompute.stages,
            conditions.num_pipelines,
            conditions.num_groups,
            self.replicas,
            self.updates.rolling,
        )
        if conditions.schedule is not None and trains(conditions.schedule.rows[-1]):
            memory = with_versions(memory, self.subject.module, self.updates.policy, conditions.schedule)
            if self.updates.sharing:
                sharing = [self.updates.sharing * count for count in self.replicas or (1,) * self.num_stages]
                memory = with_shards(memory, self.subject.module, conditions.state_copies, sharing)
        # without measured costs the time of a byte is a guess, and no reason to avoid copies of parameters
        return memory if self.measures else replace(memory, weights={})

    def _counted(self, graph: CallGraph) -> Costs:
        counted, first = Costs.from_flops(graph), backward_ends(graph)
        counted = replace(counted, backward=(0.0,) * first + counted.backward[first:], wire=self.wire)
        return self._with_kept(graph, self.recompute.costs(graph, counted))

    def _closed(self, step: Step, plan: Plan, costs: Costs, memory: Memory) -> Plan:
        """Return the plan with those units closed again that neither a cut nor the end of kept outputs divides."""
        stays = (*plan.cuts, costs.kept) if costs.kept else plan.cuts
        closed = closing(self.subject, plan.graph, stays, self.recompute.modules)
        if closed is None:
            return plan
        graph = self.subject.capture(step, closed.units)
        if not closed.is_met_by(graph, stays):  # for instance, it uses what a part has set
            _log.debug("%s needs its units open: %s", step.name, ", ".join(plan.graph.units))
            return plan
        return self._made(graph, closed.cuts(plan.cuts), closed.costs(costs), memory)

    def _balanced(self, graph: CallGraph, costs: Costs, memory: Memory) -> Plan:
        """Return the most balanced plan for this graph.

        Raises:
            PartitionError: no plan has enough legal cuts, or fits into memory.
        """
        whole = self.subject.whole(graph.units)
        return self._made(
            graph, cut_balanced(graph, costs, self.num_stages, memory, whole, self.replicas), costs, memory
        )

    def _measured(self, costing: Costing, step: Step, links: tuple[Link, ...], graph: CallGraph) -> Costs:
        # the cache holds costs without recomputation
        costs = costing.measured(self.subject, step, graph)
        return self._with_kept(graph, self.recompute.costs(graph, replace(costs, links=links, wire=self.wire)))

    def _with_kept(self, graph: CallGraph, costs: Costs) -> Costs:
        """Return costs in which nodes with kept outputs take no time, if reading the outputs is faster."""
        frozen = frozen_prefix(graph, graph.trained)[0] if self.keeps else 0
        if costs.measured and sum(costs.forward[:frozen]) < reading_s(graph, frozen, self.subject.device):
            return costs
        return replace(costs, forward=(0.0,) * frozen + tuple(costs.forward[frozen:]), kept=frozen)

    def _kept(self, graph: CallGraph, costs: Costs) -> int:
        """Return how many nodes, from the first, are frozen and kept; log why there are not more."""
        frozen, why = frozen_prefix(graph, graph.trained) if self.keeps else (0, "")
        if frozen and not costs.kept:
            frozen, why = 0, "computing them takes less time than reading them"
        if why and frozen:
            _log.info("outputs of frozen layers are kept up to %s: %s", graph.nodes[frozen - 1], why)
        elif why:
            _log.warning("outputs of frozen layers are not kept: %s", why)
        return frozen

    def _made(self, graph: CallGraph, cuts: Sequence[int], costs: Costs, memory: Memory | None = None) -> Plan:
        sizes = {name: parameter.numel() for name, parameter in self.subject.module.named_parameters()}
        return make_plan(graph, cuts, costs, sizes, memory, self.replicas)
