"""Schedule choice: builds the schedule of an iteration, as was asked for and as far as the plan allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.forecast import stage_costs
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.schedule import (
    Schedule,
    build,
    first_advance,
    forward_only,
    from_warm_up,
    peak_stash,
    stepped_warm_up,
    uneven_steps,
    with_replicas,
)
from lightning_avgpipe.schedule.adaptive import IterationShape
from lightning_avgpipe.schedule.broadcast import Broadcast, without_relays
from lightning_avgpipe.schedule.choice import SAFEST, fastest
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.own import Builder, of_function
from lightning_avgpipe.schedule.recipes import RECIPES, devices_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """In which order actions were asked to come.

    Attributes:
        given: name of the schedule, or a function that builds it.
        advance: h; ``"auto"``: it adapts, and is given with each iteration.
        splits: whether stages can split their backwards, as far as that is known.
    """

    given: str | Builder
    advance: int | Literal["auto"] = 0
    splits: bool = True

    def on(self, several: bool) -> Order:
        """What of it is possible: alone a process has nothing to overlap, and its advance is 0."""
        adapts = self.advance != "auto" or (several and self.given == "advance_forward")
        return self if adapts else replace(self, advance=0)


class ScheduleChoice:
    """Builds schedules. Every process has one, and gets the same.

    Args:
        order: as it was asked for.
        cluster: who hosts what.
        memory_limit: bytes that no stage may exceed, as of when it is called.
        module: that is trained.

    Attributes:
        order: the same; its advance may change between iterations.
        memory_limit: the same.
        frozen: how many stages, from the first, run forwards only.
        plan: of the stages that it chooses for; None: none yet, or it does not matter.
    """

    def __init__(self, order: Order, cluster: Cluster, memory_limit: Callable[[], float], module: nn.Module) -> None:
        self.order = order.on(cluster.group.world_size > 1)
        self.memory_limit = memory_limit
        self.frozen = 0
        self.plan: Plan | None = None
        self._wanted: Placement | None = None
        self._may_want = cluster.group.world_size > 1 and cluster.stage_map.reader == 0
        self._cluster = cluster
        self._module = module
        self._built: dict[tuple[int, int, bool], Schedule] = {}  # by K, M, and whether it is known what may pass stages

    @property
    def adapts(self) -> bool:
        """Whether iterations have advances of their own."""
        return self.order.advance == "auto"

    @property
    def depends_on_plan(self) -> bool:
        """Whether it chooses by the costs of stages."""
        return self.adapts or self.order.given == "auto"

    def follow(self, plan: Plan | None) -> None:
        """Choose for the stages of a plan from now on; None: there will be another one."""
        self.plan = plan
        self._built.clear()

    def take_wanted(self) -> Placement | None:
        """Another placement of the stages, for the schedule that ``"auto"`` would take; once. None: as they are."""
        wanted, self._wanted = self._wanted, None
        return wanted

    def first_advance(self, num_microbatches: int) -> int:
        """The advance to begin with, on the stages of the plan that is followed."""
        costs = self._costs
        return 0 if costs is None else first_advance(uneven_steps(costs), num_microbatches, costs)

    def fix(self, advance: int) -> None:
        """From now on every iteration has this advance."""
        self.order = replace(self.order, advance=advance)
        self._built.clear()

    @property
    def _costs(self) -> StageCosts | None:
        """Of the stages, where they were measured."""
        return stage_costs(self.plan, self.frozen) if self.plan is not None and self.plan.measured else None

    def warm_up(self, shape: IterationShape, advance: int) -> tuple[int, ...]:
        """Forwards before the first backward, by stage, with an advance that adapts."""
        costs, even = self._costs, (1,) * (self._cluster.stage_map.num_stages - 1)
        return stepped_warm_up(even if costs is None else uneven_steps(costs), shape.num_microbatches, advance)

    def schedule(self, shape: IterationShape, advance: int, plan: Plan | None = None) -> Schedule:
        """For an iteration.

        Args:
            shape: of the iteration.
            advance: that it has, if that adapts.
            plan: of the stages, which broadcast forward depends on; None: as was asked for.
        """
        if self.order.advance == "auto":
            schedule = from_warm_up(self.warm_up(shape, advance), shape.num_microbatches, str(self.order.given))
            return forward_only(self._shared(schedule), self.frozen)
        size = shape.num_stages, shape.num_microbatches
        if (*size, False) not in self._built:
            self._built[*size, False] = self._shared(self._build(*size, self.order.advance))
        schedule = self._built[*size, False]
        if schedule.relays:
            if plan is None:
                return schedule
            if (*size, True) not in self._built:
                self._built[*size, True] = self._passing(schedule, plan)
            schedule = self._built[*size, True]
        return forward_only(schedule, self.frozen)

    def _shared(self, schedule: Schedule) -> Schedule:
        return with_replicas(schedule, self._cluster.stage_map.stage_replicas)

    def _build(self, num_stages: int, num_microbatches: int, advance: int) -> Schedule:
        given, hosts = self._given, self._cluster.stage_map.group_size
        if not isinstance(given, str):
            return of_function(given, num_stages, num_microbatches)
        if given == "auto":
            return self._choose(num_stages, num_microbatches)
        return build(given, num_stages, num_microbatches, advance, devices_of(given, num_stages, hosts))

    @property
    def _given(self) -> str | Builder:
        return Broadcast() if self.order.given == "broadcast" else self.order.given

    def _choose(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The same on every rank: all know the plan. The first iteration, before there is one, needs least memory."""
        plan = self.plan
        if plan is None or plan.forecast is None:
            return build(SAFEST, num_stages, num_microbatches)
        planned = peak_stash(build(SAFEST, num_stages, plan.forecast.num_microbatches))
        most, needs = self.memory_limit(), [stage.memory for stage in plan.stages]
        # micro-batches of a batch in fewer parts are larger
        larger = plan.forecast.num_microbatches / num_microbatches

        def fits(schedule: Schedule) -> bool:
            return all(
                need.held + (need.stash + need.boundary) * larger * now / before <= most
                for need, now, before in zip(needs, peak_stash(schedule), planned, strict=True)
            )

        owners, costs = [*map(self._cluster.stage_map.owner, range(len(plan.stages)))], stage_costs(plan, self.frozen)
        chosen = fastest(costs, num_microbatches, owners, fits, self.order.splits, self._may_want)
        placement = RECIPES[chosen.name].placement
        if self._may_want and RECIPES[chosen.name].needs == "v" and self._cluster.stage_map.placement != placement:
            self._wanted, self._may_want = placement, False  # once; until then
            if self._cluster.rank == 0:
                _log.info("schedule %s: stages are placed there and back from the next plan on", chosen.name)
            chosen = fastest(costs, num_microbatches, owners, fits, self.order.splits)
        if self._cluster.rank == 0:
            _log.info("schedule %s from now on, for %d micro-batches", chosen.name, num_microbatches)
        return chosen

    def _passing(self, schedule: Schedule, plan: Plan) -> Schedule:
        """1F1B where a schedule in which values pass stages cannot be had, or loses by simulation.

        The same on every rank: all know the plan. One's own function is not judged.
        """
        needs, given, why = [stage.memory.total for stage in plan.stages], self._given, ""
        gain = None
        if isinstance(given, Broadcast) and plan.measured:
            sizes = {name: parameter.nbytes for name, parameter in self._module.named_parameters()}
            weights = [sum(sizes[name] for name in stage.parameters) for stage in plan.stages]
            copy_s = [link.per_byte * size for link, size in zip(plan.links, weights, strict=False)]
            owners, costs = [*map(self._cluster.stage_map.owner, range(len(plan.stages)))], stage_costs(plan)
            here = costs.on(owners) if len(set(owners)) > 1 else costs
            gain = given.gain(here, schedule.num_microbatches, owners, copy_s)
        if self.frozen:
            why = f"the first {self.frozen} stages have nothing to train"
        elif max(needs) > self.memory_limit():
            k = needs.index(max(needs))
            why = f"with it stage {k} needs {nbytes(needs[k])}, more than memory_limit ({nbytes(self.memory_limit())})"
        elif gain is not None and gain < 1:
            why = f"by simulation of the measured costs it is {gain:.2f} times as fast"
        if self._cluster.rank == 0:
            name, count = schedule.name, schedule.num_microbatches
            if why:
                _log.info("schedule 1f1b instead of %s, for %d micro-batches: %s", name, count, why)
            else:
                gains = "" if gain is None else f": by simulation {gain:.2f} times as fast as 1f1b"
                _log.info("schedule %s, for %d micro-batches%s", name, count, gains)
        return without_relays(schedule) if why else schedule
