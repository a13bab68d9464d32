"""Advance control: rank 0 chooses the advance of each shape of iteration from the times and memory of all ranks."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.accounting import Footprint
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.schedule import Action, Schedule, in_turn, peak_stash
from lightning_avgpipe.schedule.adaptive import WINDOW, AdaptiveAdvance, Decision, IterationShape
from lightning_avgpipe.strategy.schedule_choice import ScheduleChoice
from lightning_avgpipe.utils.lightning import rank_zero_warn

_log = logging.getLogger(__name__)

# (shape, advance) for each new decision, and (stage, peak bytes) for each new measurement; None if nothing is new.
Decisions = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]] | None
# (number, seconds) for each iteration; (number, stage, footprint values) for each measurement of memory.
Report = tuple[Sequence[tuple[int, float]], Sequence[Any]]


@dataclass
class Ran:
    """An iteration that ran.

    Attributes:
        shape: shape of the iteration.
        advance: advance that it ran with.
        counts: whether its time may be compared with others; see :class:`ScheduleControl`.
        times: rank -> seconds, of the ranks that have reported.
    """

    shape: IterationShape
    advance: int
    counts: bool
    times: dict[int, float] = field(default_factory=dict)


class AdvanceControl:
    """Chooses advances on rank 0, from what all ranks have measured with one plan.

    Args:
        cluster: the connected processes.
        choice: builds the schedules whose memory is predicted.
    """

    def __init__(self, cluster: Cluster, choice: ScheduleChoice) -> None:
        self._cluster = cluster
        self._choice = choice
        self._controller: AdaptiveAdvance | None = None
        self._ran: dict[int, Ran] = {}  # by number, until all have reported
        self._footprints: dict[IterationShape, dict[int, Footprint]] = defaultdict(dict)
        self._decided: dict[IterationShape, int] = {}
        self._too_large: set[IterationShape] = set()
        self._peaks: dict[int, int] = {}
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._unlogged: Decision | None = None

    def begin(self, start: int, loaded: dict[str, Any] | None) -> None:
        """Start the controller, once there is a plan.

        Args:
            start: advance to begin with.
            loaded: state of a saved run; it applies after the first iteration, when it is known what fits the memory.
        """
        self._controller = AdaptiveAdvance(start, self.predicted, self._choice.memory_limit(), self._choice.warm_up)
        if loaded is not None:
            self._controller.load_state_dict(loaded)

    def note(self, number: int, ran: Ran) -> None:
        """Note that an iteration ran; ranks report its times later, maybe not with their next report."""
        self._ran[number] = ran

    def estimate(self, plan: Plan, shape: IterationShape, schedule: Schedule) -> None:
        """Take the plan's estimates for a shape, where memory is not measured; they were made for this schedule."""
        if shape in self._footprints:
            return
        for k, (stage, flights) in enumerate(zip(plan.stages, peak_stash(schedule), strict=True)):
            stash = (stage.memory.stash + stage.memory.boundary) // flights if flights else 0
            self._footprints[shape][k] = Footprint.estimated(stage.memory.held, stash, self._row(schedule, k))

    def take(self, rank: int, report: Report) -> None:
        """Take in the measurements that a rank has reported."""
        times, footprints = report
        for number, seconds in times:
            if number in self._ran:  # else the iteration ran with an earlier plan
                self._ran[number].times[rank] = seconds
        for number, stage, *values in footprints:
            if number not in self._ran:
                continue
            replica, _ = self._cluster.stage_map.share(stage, rank)
            if replica == 0:  # other replicas have as many micro-batches, or one less
                self._footprints[self._ran[number].shape][stage] = Footprint(*values)
            self._peaks[stage] = max(values[0], self._peaks.get(stage, 0)) if replica else values[0]

    def decide(self, chosen: Mapping[IterationShape, int], peaks: Mapping[int, int]) -> Decisions:
        """Return what is new for all ranks, from the iterations that every rank has reported.

        Args:
            chosen: shape -> advance, as all ranks know it.
            peaks: stage -> peak bytes, as all ranks know it.
        """
        while self._ran and len(next(iter(self._ran.values())).times) == self._cluster.group.world_size:
            self._observe(self._ran.pop(next(iter(self._ran))))
        if self._controller is not None:
            for shape, footprints in self._footprints.items():
                if shape not in self._decided and len(footprints) == shape.num_stages:
                    self._decided[shape] = self._first(self._controller, shape)
        new = {s: h for s, h in self._decided.items() if chosen.get(s, 0) != h}
        higher = {k: peak for k, peak in self._peaks.items() if peaks.get(k) != peak}
        if not new and not higher:
            return None
        return tuple((*astuple(s), h) for s, h in new.items()), tuple(higher.items())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last decision, once; empty if there is no new decision."""
        decision, self._unlogged = self._unlogged, None
        if decision is None:
            return {}
        return {
            "avgpipe/advance": float(decision.advance),
            "avgpipe/iteration_s": statistics.median(self._recent),
        }

    def predicted(self, shape: IterationShape, advance: int) -> list[float]:
        """Return the peak of each stage in bytes, if iterations of a measured shape had this advance."""
        schedule, footprints = self._choice.schedule(shape, advance), self._footprints[shape]
        return [footprints[k].predicted(self._row(schedule, k)) for k in range(shape.num_stages)]

    def _row(self, schedule: Schedule, stage: int) -> Sequence[Action]:
        """Return the actions of a stage, or of its first replica."""
        return in_turn(schedule[stage], 0, len(self._cluster.stage_map.ranks(stage)))

    def _first(self, controller: AdaptiveAdvance, shape: IterationShape) -> int:
        """Return the advance that a shape begins with, or after a resume goes on with."""
        limit = self._choice.memory_limit()
        for stage, peak in enumerate(self.predicted(shape, 0)):
            if peak > limit:
                self._too_large.add(shape)
                rank_zero_warn(
                    f"stage {stage} keeps {nbytes(peak)} at its peak, more than memory_limit ({nbytes(limit)}), "
                    "although the schedule is the one that needs least; use more micro-batches, or a higher limit"
                )
                return 0
        return controller.advance(shape)

    def _observe(self, ran: Ran) -> None:
        shape, controller = ran.shape, self._controller
        if controller is None or not ran.counts or shape in self._too_large:
            return
        if ran.advance != self._decided.get(shape):
            return  # the iteration ran before all ranks knew of the last decision
        seconds = max(ran.times.values())
        self._recent.append(seconds)
        decision = controller.observe(shape, seconds)
        if decision is not None:
            self._decided[shape] = decision.advance
            self._unlogged = decision
            _log.info("advance %d from now on: %s", decision.advance, decision.reason)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the controller; None before :meth:`begin`."""
        return None if self._controller is None else self._controller.state_dict()
