"""The planner: captures a step function, refines its units as far as balance needs it, and divides it into stages."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.coarsening import closing
from lightning_avgpipe.capture.cost_cache import CostCache, fingerprint
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import measure, reading_s
from lightning_avgpipe.capture.samples import Samples
from lightning_avgpipe.capture.units import divisible, initial_units, refine, split_units, why_whole
from lightning_avgpipe.capture.ways import Way, fullest
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Costs, Forecast, Link, Memory, Plan, cut_at, cut_balanced, make_plan, scattered
from lightning_avgpipe.planning.forecast import forecast_of, idle_share
from lightning_avgpipe.planning.freezing import backward_ends, frozen_prefix
from lightning_avgpipe.planning.halving import Halving, expected, expected_of_groups, fewest, processes_of
from lightning_avgpipe.planning.limits import limits
from lightning_avgpipe.planning.model_memory import memory_of, with_shards, with_versions
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.planning.spp import SppPlan
from lightning_avgpipe.planning.turns import plan_in_turns, units_between
from lightning_avgpipe.schedule import (
    Schedule,
    build,
    with_replicas,
)
from lightning_avgpipe.schedule.rules import trains
from lightning_avgpipe.schedule.versions import POLICIES, WeightPolicy

_log = logging.getLogger(__name__)

# Refining ends when the slowest stage is within this share of a perfect balance ...
_BALANCED = 1.03
# ... and opens only units that weigh more than this part of a stage's fair share,
_HEAVY = 0.25
# then, so many times, those next to a cut that could move it by more than this part.
_NEAR_CUTS = 3
_MOVES = 0.03
# Finer units must make the slowest stage or the unevenness smaller by this factor.
_WORTH = 0.99
# A unit that learns numbers of values may do other things with other micro-batches. As one unit it may; opened, it is
# refused when it does. So it stays one unless the slowest stage exceeds its fair share by this factor.
_SPARED = 1.8
_ASKS = "reads numbers of values, so that what it calls may differ between batches"
# How much slower the slowest stage may be for less traffic, and how much less time the schedule must then take.
_SLACKS = 0.05, 0.1, 0.2
_QUICKER = 0.98
# A slowest stage beyond its fair share by this factor is explained, with so many reasons.
_UNEVEN = 1.25
_SHOWN = 3


@dataclass(frozen=True)
class Conditions:
    """Under which a plan is to do well.

    Attributes:
        schedule: of the step; None if it is not known: then nothing is forecast.
        links: one for each hop; none: hops are free.
        state_copies: optimizer state of each trained parameter, in copies of it.
        num_pipelines: N.
        num_groups: of processes, each with N pipelines.
        bandwidth: bytes per second between every two processes, shape ``(V, V)``, on which stages are placed; None:
            every process has its stages.
        slowness: how many times as long each process takes as the fastest, shape ``(V,)``; empty: all are alike.
        halving: leave to make fewer stages than the K processes that there are, and share them; None: no leave.
        kept: names of the nodes, from the first, whose outputs are kept by now: a stage may begin behind them.
    """

    schedule: Schedule | None = None
    links: tuple[Link, ...] = ()
    state_copies: int = 2
    num_pipelines: int = 1
    num_groups: int = 1
    bandwidth: Matrix | None = None
    slowness: tuple[float, ...] = ()
    halving: Halving | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Step:
    """A step function with the arguments of one micro-batch."""

    name: str
    run: Callable[..., Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Planner:
    """Makes plans for one module.

    Attributes:
        module: whose steps are divided.
        num_stages: K.
        split_points: names of the units at which stages 1..K-1 begin; None balances.
        device: where captures compute.
        observers: modules that only look at values (metrics).
        costs: ``"measured"`` on the device, or counted operations (``"flops"``).
        cache: of measured costs; None measures every time.
        memory_limit: bytes that each stage may use.
        recompute: what is repeated before, or in, a backward.
        replicas: of each stage, which share its micro-batches; empty: one of each.
        policy: which weights actions use.
        rolling: whether several pipelines go on without waiting for each other.
        sharing: whole replicas that share the optimizer states of each stage with its own; 0: each keeps all.
        keeps: whether the outputs of frozen layers are kept, where that is faster than to compute them.
        samples: what was measured on this device for earlier plans, which is not measured again.
    """

    module: nn.Module
    num_stages: int
    split_points: Sequence[str] | None = None
    device: torch.device | None = None
    observers: Collection[nn.Module] = ()
    costs: Literal["measured", "flops"] = "flops"
    cache: CostCache | None = None
    memory_limit: float = math.inf
    recompute: Recompute = Recompute()  # noqa: RUF009
    replicas: Sequence[int] = ()
    policy: WeightPolicy = POLICIES["flush"]
    rolling: bool = False
    sharing: int = 0
    keeps: bool = False
    samples: Samples = field(default_factory=Samples, compare=False)

    @property
    def measures(self) -> bool:
        """Whether costs are measured: on one stage nothing depends on them, and absent parameters cannot compute."""
        return self.costs == "measured" and self.num_stages > 1 and not any(p.is_meta for p in self.module.parameters())

    def seconds(self, step: str, run: Callable[..., Any], args: Sequence[Any]) -> float:
        """What a step takes on the device of this process, unit by unit; 0 where nothing is measured.

        Args:
            step: name of the step function.
            run: executes it.
            args: arguments of one micro-batch.
        """
        if not self.measures:
            return 0.0
        graph = self.capture(step, run, args, initial_units(self.module, self.observers))
        costs = measure(graph, run, args, self.module, self.device or torch.device("cpu"), Samples())
        return sum(costs.forward) + sum(costs.backward)

    def capture(self, step: str, run: Callable[..., Any], args: Sequence[Any], units: Sequence[str]) -> CallGraph:
        """The call graph of a step, at the granularity of these units."""
        return capture(step, run, args, self.module, units, self.device, self.observers)

    def capture_like(self, step: str, run: Callable[..., Any], args: Sequence[Any], plan: Plan) -> CallGraph:
        """The call graph of another step, whose units are opened until each has its parameters on one stage."""
        units = plan.graph.units
        while True:
            graph = self.capture(step, run, args, units)
            wide = [unit for unit in scattered(graph, plan.stages_of) if divisible(self.module, unit, self.observers)]
            if not wide:
                return graph
            units = refine(self.module, graph.units, wide, self.observers)

    def provisional(self, step: str, run: Callable[..., Any], args: Sequence[Any], conditions: Conditions) -> Plan:
        """A plan for a step that comes before the one that decides: any, if there is no good one."""
        planner = replace(self, costs="flops")
        try:
            return planner.plan(step, run, args, conditions=conditions)
        except PartitionError as error:
            _log.debug("%s runs on the last stage until training begins: %s", step, error)
            graph = self.capture(step, run, args, initial_units(self.module, self.observers))
            return self._made(graph, (0,) * (self.num_stages - 1), planner._counted(graph))

    def plan(
        self,
        step: str,
        run: Callable[..., Any],
        args: Sequence[Any],
        units: Sequence[str] = (),
        conditions: Conditions | None = None,
    ) -> Plan:
        """Divide a step into stages.

        Operations are counted while units are refined, which is fast; then the units are measured, and refined further
        where the measured times ask for it.

        Args:
            step: name of the step function.
            run: executes it.
            args: arguments of one micro-batch.
            units: units to start from, for instance those of an earlier plan.
            conditions: schedule and links.
        Raises:
            PartitionError: there are not enough legal cuts, however fine the units, or memory is too small.
        """
        conditions = conditions or Conditions()
        if conditions.bandwidth is not None and self.num_stages > 2:
            try:  # units as fine as a stage on each device asks for
                return self._plan(step, run, args, units, conditions)
            except PartitionError as error:
                _log.debug("%s: %s", step, error)
                fewer = replace(self, num_stages=self.num_stages - 1)
                try:
                    return fewer.plan(step, run, args, units, conditions)
                except PartitionError:
                    raise error from None
        return self._plan(step, run, args, units, conditions)

    def _plan(
        self, step: str, run: Callable[..., Any], args: Sequence[Any], units: Sequence[str], conditions: Conditions
    ) -> Plan:
        memory, spared = self._memory(conditions), set[str]()
        units = tuple(units) or initial_units(self.module, self.observers)
        units = split_units(self.module, units, self.recompute.modules, self.observers)
        units = self._half_frozen(units) if self.keeps else units
        if self.split_points is not None:
            units = split_units(self.module, units, self.split_points, self.observers)
        graph = self.capture(step, run, args, units)
        way = Way(graph, run)
        if self.num_stages > 1:
            follow = partial(self.capture, step, args=args, units=units)
            way = fullest(graph, run, self.module, self.device or torch.device("cpu"), follow)
        graph, what = way.graph, _Step(step, way.run, args)
        known = replace(self.samples, spent_s=0.0)  # shares what is found; each plan may take its time
        measured = partial(self._measured, what, conditions.links, known)
        if self.split_points is not None:
            cuts = cut_at(graph, self.split_points, self.num_stages)
            costs = (measured if self.measures else self._counted)(graph)
            plan = self._made(graph, cuts, costs, memory)
        else:
            counted = replace(memory, limit=math.inf, weights={}) if self.measures else memory
            plan, costs = self._refined(what, graph, self._counted, counted, spared)
            if self.measures:
                plan, costs = self._refined(what, plan.graph, measured, memory, spared)
            plan = self._for_schedule(plan, costs, memory, conditions)
        way.check(plan.graph.units)
        if conditions.bandwidth is not None and conditions.schedule is not None:
            return self._placed(what, plan.graph, costs, conditions.bandwidth, conditions)
        apart = units_between(plan.graph, costs, self._weights())[0] if self.measures else None
        fewer, shares = self._fewest(plan, costs, conditions), conditions.halving
        if fewer is not None and shares is not None and not shares.as_groups:
            planner, plan, memory, forecast = fewer
            plan = planner._closed(what, plan, costs, memory, conditions.kept)
            plan = replace(plan, devices=processes_of(planner.replicas), forecast=forecast)
        else:
            note = self._note(plan, costs, spared)
            plan = self._closed(what, plan, costs, memory, conditions.kept)
            plan = replace(plan, forecast=forecast_of(plan, conditions.schedule, self.policy), note=note)
            plan = plan if fewer is None else replace(plan, advised=fewer[0].num_stages)
        plan = replace(plan, units=apart)
        return replace(plan, frozen=frozen_prefix(plan.graph, plan.graph.trained)[0]) if costs.kept else plan

    def _weights(self) -> dict[str, int]:
        """Bytes of each parameter."""
        return {name: p.numel() * p.element_size() for name, p in self.module.named_parameters()}

    def _for_schedule(self, plan: Plan, costs: Costs, memory: Memory, conditions: Conditions) -> Plan:
        """The plan, or a less even one with less traffic, where the schedule waits for transfers long enough."""
        if not any(link.per_byte for link in costs.links) or conditions.bandwidth is not None:
            return plan
        least = forecast_of(plan, conditions.schedule, self.policy)
        tried = {plan.cuts}
        for slack in _SLACKS if least is not None else ():
            cuts = cut_balanced(plan.graph, costs, self.num_stages, memory, None, self.replicas, slack)
            if cuts in tried:
                continue
            tried.add(cuts)
            other = self._made(plan.graph, cuts, costs, memory)
            expected = forecast_of(other, conditions.schedule, self.policy)
            if least is not None and expected is not None and expected.iteration_s < least.iteration_s * _QUICKER:
                plan, least = other, expected
        return plan

    def _placed(self, step: _Step, graph: CallGraph, costs: Costs, bandwidth: Matrix, conditions: Conditions) -> Plan:
        """SPP's stages, with the processes of each."""
        begin, schedule = time.perf_counter(), conditions.schedule
        assert schedule is not None
        num_microbatches = schedule.num_microbatches
        slow = conditions.slowness
        units, positions = units_between(graph, costs, self._weights())
        if slow and slow[0] > 1:  # costs are those of rank 0
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
        """Fewer stages, which processes share, if there is leave and it takes no longer; None: as planned."""
        halving, schedule = conditions.halving, conditions.schedule
        if halving is None or schedule is None or self.split_points is not None:
            return None
        trained = {n: p.numel() * p.element_size() for n, p in self.module.named_parameters() if p.requires_grad}
        slowest = max(plan.links, key=lambda link: (link.per_byte, link.latency), default=Link())
        tried: dict[tuple[int, ...], tuple[Planner, Plan, Memory]] = {}

        def divide(counts: tuple[int, ...]) -> Plan:
            shared = () if halving.as_groups else counts
            fewer = replace(self, num_stages=len(counts), replicas=shared, memory_limit=halving.memory_limit)
            order = with_replicas(build(schedule.name, len(counts), schedule.num_microbatches), shared)
            memory = fewer._memory(replace(conditions, schedule=order))
            made, failure = fewer._attempt(plan.graph, replace(costs, links=(slowest,)), memory)
            if made is None:
                raise failure or PartitionError("no plan")
            halving.accept(made, counts)
            tried[counts] = fewer, made, memory
            return made

        told: dict[str, Any] = {"schedule": schedule, "link": slowest, "trained": trained}
        if halving.as_groups:
            told["groups"] = conditions.num_groups
        found = fewest(plan, divide, partial(expected_of_groups if halving.as_groups else expected, **told))
        return None if found is None else (*tried[found[0]], found[1])

    def _note(self, plan: Plan, costs: Costs, spared: Collection[str]) -> str:
        """Why the slowest stage takes so long, if it does."""
        slowest = plan.slowest
        if slowest.share * self.num_stages <= _UNEVEN:
            return ""
        bounds = [0, *plan.cuts, len(plan.graph.nodes)]
        start, end = bounds[slowest.index : slowest.index + 2]
        whole = self._whole(plan.graph) | dict.fromkeys(spared, _ASKS)
        found = limits(plan.graph, costs, whole, start, end)[:_SHOWN]
        because = "".join(f"\n  - {limit}" for limit in found)
        because = because and f". What cannot be divided in it:{because}"
        return (
            f"stage {slowest.index} takes {slowest.share:.0%} of the time: {self.num_stages} stages are at most "
            f"{1 / slowest.share:.2f} times as fast as one{because}"
        )

    def _whole(self, graph: CallGraph) -> dict[str, str]:
        """Unit -> why it cannot be opened."""
        reasons = ((unit, why_whole(self.module, unit, self.observers)) for unit in graph.units)
        return {unit: reason for unit, reason in reasons if reason is not None}

    def _memory(self, conditions: Conditions) -> Memory:
        memory = memory_of(
            self.module,
            conditions.schedule,
            conditions.state_copies,
            self.memory_limit,
            self.recompute.stages,
            conditions.num_pipelines,
            conditions.num_groups,
            self.replicas,
            self.rolling,
        )
        if conditions.schedule is not None and trains(conditions.schedule.rows[-1]):
            memory = with_versions(memory, self.module, self.policy, conditions.schedule)
            if self.sharing:
                sharing = [self.sharing * count for count in self.replicas or (1,) * self.num_stages]
                memory = with_shards(memory, self.module, conditions.state_copies, sharing)
        # where nothing is measured the price of a byte is a guess, and no reason to avoid a copy
        return memory if self.measures else replace(memory, weights={})

    def _counted(self, graph: CallGraph) -> Costs:
        counted, first = Costs.from_flops(graph), backward_ends(graph)
        counted = replace(counted, backward=(0.0,) * first + counted.backward[first:])
        return self._with_kept(graph, self.recompute.costs(graph, counted))

    def _closed(self, step: _Step, plan: Plan, costs: Costs, memory: Memory, kept: Sequence[str] = ()) -> Plan:
        """The same stages, with those units closed again that no cut divides, nor the end of what is or was kept."""
        stays = (*plan.cuts, costs.kept) if costs.kept else plan.cuts
        if 0 < len(kept) <= costs.kept and tuple(kept) == tuple(node.name for node in plan.graph.nodes[: len(kept)]):
            stays = (*stays, len(kept))
        closed = closing(self.module, plan.graph, stays, self.recompute.modules, self.observers)
        if closed is None:
            return plan
        graph = self.capture(step.name, step.run, step.args, closed.units)
        if not closed.is_met_by(graph, stays):  # the step tells its parts apart, say by an attribute they set
            _log.debug("%s needs its units open: %s", step.name, ", ".join(plan.graph.units))
            return plan
        return self._made(graph, closed.cuts(plan.cuts), closed.costs(costs), memory)

    def _refined(
        self,
        step: _Step,
        graph: CallGraph,
        costs_of: Callable[[CallGraph], Costs],
        memory: Memory,
        spared: set[str],
    ) -> tuple[Plan, Costs]:
        """The best plan for this graph, or for a finer one where that is better; ``spared`` gets what stays whole."""
        best: tuple[Plan, Costs] | None = None
        closer = _NEAR_CUTS
        tried: set[str] = set()  # all that were spared at some time
        costs = costs_of(graph)
        while True:
            plan, failure = self._attempt(graph, costs, memory)
            if plan is not None:
                if best is None or _gains(plan, best[0]):
                    best = plan, costs
                if plan.slowest.share * self.num_stages <= _BALANCED:
                    return best
            heavy = self._too_heavy(graph, costs, plan, spared)
            if not heavy and plan is not None and closer > 0:
                closer -= 1
                near = _beside_cuts(plan) - spared
                least_s = _MOVES * sum(costs.node) / self.num_stages
                heavy = [name for name in self._heavy_units(graph, costs, least_s) if name in near]
            if not heavy:
                if best is None:
                    assert failure is not None
                    raise failure
                return best
            units = refine(self.module, graph.units, heavy, self.observers)
            finer = self.capture(step.name, step.run, step.args, units)
            if found := (finer.asking & set(heavy)) - tried:
                tried |= found
                spared |= found
                continue
            graph, costs = finer, costs_of(finer)

    def _attempt(self, graph: CallGraph, costs: Costs, memory: Memory) -> tuple[Plan | None, PartitionError | None]:
        """The best plan for this graph, or why there is none."""
        try:
            cuts = cut_balanced(graph, costs, self.num_stages, memory, self._whole(graph), self.replicas)
            return self._made(graph, cuts, costs, memory), None
        except PartitionError as error:
            return None, error

    def _too_heavy(self, graph: CallGraph, costs: Costs, plan: Plan | None, spared: set[str]) -> list[str]:
        """Units that are to be opened; one that stays whole only where no plan is good without it."""
        fair_s = sum(costs.node) / self.num_stages
        found = self._heavy_units(graph, costs, fair_s * _HEAVY if plan is not None else 0.0)
        found += [u for u in sorted(graph.leaving) if u not in found and divisible(self.module, u, self.observers)]
        heavy = [unit for unit in found if unit not in spared]
        if not heavy and (plan is None or plan.slowest.share * self.num_stages > _SPARED):
            heavy = [unit for unit in found if unit in spared]
            spared.clear()
        return heavy

    def _measured(self, step: _Step, links: tuple[Link, ...], samples: Samples, graph: CallGraph) -> Costs:
        """Measured costs, from the cache if they are there."""
        device = self.device or torch.device("cpu")
        key, about = fingerprint(graph, self.module, device)
        costs = self.cache.load(key, len(graph.nodes)) if self.cache is not None else None
        if costs is None:
            begin = time.perf_counter()
            costs = measure(graph, step.run, step.args, self.module, device, samples)
            _log.info("measured %d nodes of %s in %.1f s", len(graph.nodes), step.name, time.perf_counter() - begin)
            if self.cache is not None:
                self.cache.save(key, costs, about)
        # what the cache holds is of the units alone, whatever is repeated
        return self._with_kept(graph, self.recompute.costs(graph, replace(costs, links=links)))

    def _half_frozen(self, units: tuple[str, ...]) -> tuple[str, ...]:
        """Finer units, of which each is frozen or trained, as far as they can be opened."""
        while True:
            flags = {unit: {p.requires_grad for p in self.module.get_submodule(unit).parameters()} for unit in units}
            mixed = [u for u in units if len(flags[u]) > 1 and divisible(self.module, u, self.observers)]
            if not mixed:
                return units
            units = refine(self.module, units, mixed, self.observers)

    def _with_kept(self, graph: CallGraph, costs: Costs) -> Costs:
        """What is read instead takes no time."""
        frozen = frozen_prefix(graph, graph.trained)[0] if self.keeps else 0
        if costs.measured and sum(costs.forward[:frozen]) < reading_s(graph, frozen, self.device):
            return costs
        return replace(costs, forward=(0.0,) * frozen + tuple(costs.forward[frozen:]), kept=frozen)

    def _heavy_units(self, graph: CallGraph, costs: Costs, limit: float) -> list[str]:
        weights: dict[str, float] = {}
        for node, cost in zip(graph.nodes, costs.node, strict=True):
            if node.kind == "call":
                weights[node.name] = weights.get(node.name, 0.0) + cost
        return [
            unit for unit, weight in weights.items() if weight >= limit and divisible(self.module, unit, self.observers)
        ]

    def _made(self, graph: CallGraph, cuts: Sequence[int], costs: Costs, memory: Memory | None = None) -> Plan:
        sizes = {name: parameter.numel() for name, parameter in self.module.named_parameters()}
        return make_plan(graph, cuts, costs, sizes, memory, self.replicas)


def _unevenness(plan: Plan) -> float:
    return sum(stage.share**2 for stage in plan.stages)


def _beside_cuts(plan: Plan) -> set[str]:
    """The last unit of each stage, and the first of the next."""
    ends = {unit for stage in plan.stages[:-1] for unit in stage.units[-1:]}
    return ends | {unit for stage in plan.stages[1:] for unit in stage.units[:1]}


def _gains(plan: Plan, best: Plan) -> bool:
    """Finer units cost a little at every call, so they must be worth it: a faster pace, or a more even rest."""
    now, before = plan.slowest.share, best.slowest.share
    return now < before * _WORTH or (now <= before and _unevenness(plan) < _unevenness(best) * _WORTH)
