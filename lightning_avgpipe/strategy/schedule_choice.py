"""Schedule choice: builds the schedule of an iteration from what was requested and from the plan of the stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.planning.plan import stage_costs
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
from lightning_avgpipe.schedule.builders import DEPTH_FIRST, Builder, of_function, without_relays
from lightning_avgpipe.schedule.choice import SAFEST, fastest
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.recipes import RECIPES, devices_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleRequest:
    """The schedule that the options request.

    Attributes:
        given: name of the schedule, or a function that builds it.
        advance: h; ``"auto"``: the advance adapts, and is given with each iteration.
        splits: whether stages may be able to split their backwards; False: they cannot.
    """

    given: str | Builder
    advance: int | Literal["auto"] = 0
    splits: bool = True

    def on(self, several: bool) -> ScheduleRequest:
        """Return the request with its defaults resolved.

        One process has no transfers to overlap, so its default is depth first. Only ``"advance_forward"`` on several
        processes adapts its advance.

        Args:
            several: whether several processes share the stages.
        """
        if not several and (self.given == "auto" or (self.given == "advance_forward" and self.advance == "auto")):
            return replace(self, given=DEPTH_FIRST, advance=0)
        is_resolved = self.advance != "auto" or (several and self.given == "advance_forward")
        return self if is_resolved else replace(self, advance=0)


class ScheduleChoice:
    """Builds the schedules of a run. Every process has a ScheduleChoice, and all build the same schedules.

    Args:
        request: requested schedule.
        cluster: the connected processes, with the stages that each hosts.
        memory_limit: returns the bytes that each stage may use now.
        module: module that is trained.

    Attributes:
        request: requested schedule, with its defaults resolved; its advance may change between iterations.
        memory_limit: returns the bytes that each stage may use now.
        frozen: number of stages, from the first, that run forwards only.
        plan: plan of the stages; None: there is none yet, or schedules do not depend on it.
    """

    def __init__(
        self, request: ScheduleRequest, cluster: Cluster, memory_limit: Callable[[], float], module: nn.Module
    ) -> None:
        self._asked = request.given
        self.request = request.on(cluster.group.world_size > 1)
        self.memory_limit = memory_limit
        self.frozen = 0
        self.plan: Plan | None = None
        self._wanted: Placement | None = None
        self._may_want = cluster.group.world_size > 1 and cluster.stage_map.reader == 0
        self._cluster = cluster
        self._module = module
        self._built: dict[tuple[int, int, bool], Schedule] = {}  # by K, M, and whether a plan was known

    @property
    def adapts(self) -> bool:
        """Whether the advance adapts, so that each iteration is given one."""
        return self.request.advance == "auto"

    @property
    def depends_on_plan(self) -> bool:
        """Whether schedules are chosen by the costs of stages."""
        return self.adapts or self.request.given == "auto"

    def use_plan(self, plan: Plan | None) -> None:
        """Choose schedules by the costs of this plan from now on; None: forget the plan until the next one is made."""
        self.plan = plan
        self._built.clear()

    def take_requested_placement(self) -> Placement | None:
        """Return, once, the placement of stages that ``schedule="auto"`` needs for its choice; None: no change."""
        wanted, self._wanted = self._wanted, None
        return wanted

    def first_advance(self, num_microbatches: int) -> int:
        """Return the advance to begin with on the stages of the current plan, as their costs suggest."""
        costs = self._costs
        return 0 if costs is None else first_advance(uneven_steps(costs), num_microbatches, costs)

    def fix_advance(self, advance: int) -> None:
        """Use a fixed advance from now on; if it is not 0, depth first is replaced by the requested schedule."""
        self.request = replace(self.request, given=self._asked if advance else self.request.given, advance=advance)
        self._built.clear()

    @property
    def _costs(self) -> StageCosts | None:
        """The costs of the stages; None if they were not measured."""
        return stage_costs(self.plan, self.frozen) if self.plan is not None and self.plan.measured else None

    def warm_up(self, shape: IterationShape, advance: int) -> tuple[int, ...]:
        """Return, for an adaptive advance, the number of forwards that each stage runs before its first backward."""
        costs, even = self._costs, (1,) * (self._cluster.stage_map.num_stages - 1)
        return stepped_warm_up(even if costs is None else uneven_steps(costs), shape.num_microbatches, advance)

    def schedule(self, shape: IterationShape, advance: int, plan: Plan | None = None) -> Schedule:
        """Return the schedule of an iteration.

        Args:
            shape: shape of the iteration.
            advance: advance of the iteration; ignored unless advances adapt.
            plan: plan of the stages, which decides whether a schedule that relays values past stages is replaced by
                1F1B; None: it is not.
        """
        if self.request.advance == "auto":
            schedule = from_warm_up(self.warm_up(shape, advance), shape.num_microbatches, str(self.request.given))
            return forward_only(self._shared(schedule), self.frozen)
        size = shape.num_stages, shape.num_microbatches
        if (*size, False) not in self._built:
            self._built[*size, False] = self._shared(self._build(*size, self.request.advance))
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
        given, hosts = self.request.given, self._cluster.stage_map.group_size
        if not isinstance(given, str):
            return of_function(given, num_stages, num_microbatches)
        if given == "auto":
            return self._choose(num_stages, num_microbatches)
        return build(given, num_stages, num_microbatches, advance, devices_of(given, num_stages, hosts))

    def _choose(self, num_stages: int, num_microbatches: int) -> Schedule:
        """Return the fastest schedule by simulation; before there is a plan, the one that needs the least memory.

        All ranks know the plan, so they choose the same.
        """
        plan = self.plan
        if plan is None or plan.forecast is None:
            return build(SAFEST, num_stages, num_microbatches)
        planned = peak_stash(build(SAFEST, num_stages, plan.forecast.num_microbatches))
        most, needs = self.memory_limit(), [stage.memory for stage in plan.stages]
        # micro-batches are larger than planned if the batch is split into fewer
        larger = plan.forecast.num_microbatches / num_microbatches

        def fits(schedule: Schedule) -> bool:
            return all(
                need.persistent + (need.stash + need.boundary) * larger * now / before <= most
                for need, now, before in zip(needs, peak_stash(schedule), planned, strict=True)
            )

        owners, costs = [*map(self._cluster.stage_map.owner, range(len(plan.stages)))], stage_costs(plan, self.frozen)
        chosen = fastest(costs, num_microbatches, owners, fits, self.request.splits, self._may_want)
        placement = RECIPES[chosen.name].placement
        if self._may_want and RECIPES[chosen.name].needs == "v" and self._cluster.stage_map.placement != placement:
            self._wanted, self._may_want = placement, False  # requested once; until then the best other schedule runs
            if self._cluster.rank == 0:
                _log.info("schedule %s: stages are placed there and back from the next plan on", chosen.name)
            chosen = fastest(costs, num_microbatches, owners, fits, self.request.splits)
        if self._cluster.rank == 0:
            _log.info("schedule %s from now on, for %d micro-batches", chosen.name, num_microbatches)
        return chosen

    def _passing(self, schedule: Schedule, plan: Plan) -> Schedule:
        """Return a schedule that relays values past stages, or 1F1B if the former does not fit or is simulated slower.

        All ranks know the plan, so they return the same. A user's own schedule is not simulated.
        """
        needs, given, why = [stage.memory.total for stage in plan.stages], self.request.given, ""
        simulate = RECIPES[given].gain if isinstance(given, str) else getattr(given, "gain", None)
        gain = None
        if simulate is not None and plan.measured:
            sizes = {name: parameter.nbytes for name, parameter in self._module.named_parameters()}
            weights = [sum(sizes[name] for name in stage.parameters) for stage in plan.stages]
            copy_s = [link.per_byte * size for link, size in zip(plan.links, weights, strict=False)]
            owners, costs = [*map(self._cluster.stage_map.owner, range(len(plan.stages)))], stage_costs(plan)
            here = costs.on(owners) if len(set(owners)) > 1 else costs
            gain = simulate(here, schedule.num_microbatches, owners, copy_s)
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
