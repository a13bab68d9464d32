"""Schedule choice: builds the schedule of an iteration from what was requested and from the plan of the stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.planning import Plan
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

    Attributes:
        request: requested schedule, with its defaults resolved; its advance may change between iterations.
        memory_limit: returns the bytes that each stage may use now.
        frozen: number of stages, from the first, that run forwards only.
        plan: plan of the stages; None: there is none yet, or schedules do not depend on it.
    """

    def __init__(self, request: ScheduleRequest, cluster: Cluster, memory_limit: Callable[[], float]) -> None:
        self._asked = request.given
        self.request = request.on(cluster.group.world_size > 1)
        self.memory_limit = memory_limit
        self.frozen = 0
        self.plan: Plan | None = None
        self._wanted: Placement | None = None
        self._may_want = cluster.group.world_size > 1 and cluster.stage_map.reader == 0
        self._cluster = cluster
        self._built: dict[tuple[int, int], Schedule] = {}  # by K and M

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

    def schedule(self, shape: IterationShape, advance: int, runs: bool = False) -> Schedule:
        """Return the schedule of an iteration.

        Args:
            shape: shape of the iteration.
            advance: advance of the iteration; ignored unless advances adapt.
            runs: whether the schedule is to run, and not only to plan stages by. While stages have nothing to train,
                1F1B runs instead of a schedule that relays values past stages.
        """
        if self.request.advance == "auto":
            schedule = from_warm_up(self.warm_up(shape, advance), shape.num_microbatches, str(self.request.given))
            return forward_only(self._shared(schedule), self.frozen)
        size = shape.num_stages, shape.num_microbatches
        if size not in self._built:
            self._built[size] = self._shared(self._build(*size, self.request.advance))
        schedule = self._built[size]
        if schedule.relays and not (runs and self.frozen):
            return schedule
        return forward_only(without_relays(schedule), self.frozen)

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
