"""The profiler, which runs trial iterations and makes a profile from the measurements of all processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from lightning_avgpipe.engine.recording import KernelTrace, Recording, tracing_kernels
from lightning_avgpipe.errors import MemoryShortage, TuningError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import Holding, holdings
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Kind
from lightning_avgpipe.strategy.rehearsal import Rehearsal
from lightning_avgpipe.tuning.profile import (
    Curve,
    HopProfile,
    OtherSize,
    Profile,
    Setting,
    StageMemory,
    StageProfile,
    Trial,
    affordable,
    durations,
    trial_sizes,
)
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.lightning import rank_zero_info, rank_zero_warn
from lightning_avgpipe.utils.patching import noop

_LONGEST_S = 120.0  # time after which no further round begins
_FEWEST = 2  # least number of rounds
_PIECES = 8  # parts of a utilisation curve that is made from kernels; more take time and change little


class Profiler:
    """Profiles the pipeline of a rehearsal. Every process makes the same calls.

    Args:
        rehearsal: runs the iterations.
        iterations: largest number of iterations, at least 4.
        schedule: name of the schedule.
        shows: whether rank 0 shows a progress bar.

    Attributes:
        largest_not_fitting: the largest number of micro-batches with which an iteration did not fit the memory; 0 if
            all did.
    """

    def __init__(self, rehearsal: Rehearsal, iterations: int, schedule: str, shows: bool) -> None:
        self._rehearsal = rehearsal
        self._iterations = iterations
        self._schedule = schedule
        self._cluster = rehearsal.pipeline_run.cluster
        self._shows = shows and self._cluster.world.rank == 0
        self._began = time.monotonic()
        self._tick: Callable[[], object] = noop
        self.largest_not_fitting = 0

    def profile(self, counts: Sequence[int]) -> Profile | None:
        """Return a profile of one pipeline, measured mainly with a large number of micro-batches.

        Args:
            counts: numbers of micro-batches to consider, ascending.
        Returns:
            The profile on rank 0; None elsewhere.
        Raises:
            TuningError: no number of micro-batches fits the memory.
        """
        stage_map = self._cluster.stage_map
        large, others = trial_sizes(counts, stage_map.num_stages)
        with tqdm(total=self._iterations, desc="AvgPipeTuner", unit="it", leave=False, disable=not self._shows) as bar:
            self._tick = bar.update
            while True:
                try:
                    stages, runs = self._stages(Setting(large, schedule=self._schedule), others)
                    break
                except MemoryShortage as shortage:
                    large = self._larger(counts, large, shortage)
                    others = tuple(m for m in others if m < large)
        trials = [Trial(setting, self._span_s(timed)) for setting, timed in runs.items()]
        found = self._cluster.group.gather_objects((stages, self._rehearsal.tied_s()))
        hops = self._hops(large)
        if self._cluster.world.rank != 0:
            return None
        by_stage = {k: stage for part, _ in found for k, stage in part.items()}
        return Profile(
            large,
            self._rehearsal.batch_size,
            tuple(by_stage[k] for k in range(stage_map.num_stages)),
            hops,
            not self._rehearsal.pipeline_run.deployment.parallel.have_streams,
            tuple(map(stage_map.owner, range(stage_map.num_stages))),
            stage_map.num_teams,
            max(seconds for _, seconds in found),
            tuple(trials),
        )

    def _span_s(self, runs: Sequence[Recording]) -> float:
        spans = self._cluster.group.gather_objects([run.span_s for run in runs])
        return statistics.median(max(at) for at in zip(*spans, strict=True))

    def _in_turns(self, settings: Sequence[Setting], count: int) -> dict[Setting, list[Recording]]:
        """Run ``count`` rounds, each with one iteration of every setting that fits the memory.

        Settings take turns, since the speed of machines varies over time. There are fewer rounds if time runs out, the
        same number on every process.

        Returns:
            The recordings by setting, without those of the first round, which warms up.
        Raises:
            MemoryShortage: none of the settings fits.
        """
        runs: dict[Setting, list[Recording]] = {setting: [] for setting in settings}
        for done in range(count):
            late = self._cluster.world.broadcast(time.monotonic() - self._began > _LONGEST_S)
            if late and done >= _FEWEST:
                break
            for setting in settings:
                if setting not in runs:
                    continue
                try:
                    runs[setting].append(self._rehearsal.run(setting))
                except MemoryShortage as shortage:
                    most = setting.num_microbatches
                    runs = {other: timed for other, timed in runs.items() if other.num_microbatches > most}
                    if not runs:
                        raise
                    rank_zero_info(f"AvgPipeTuner: {setting} does not fit the memory ({shortage}), and is left out")
                self._tick()
        return {setting: timed[1:] for setting, timed in runs.items()}

    def _larger(self, counts: Sequence[int], tried: int, shortage: MemoryShortage) -> int:
        self.largest_not_fitting = tried
        more = next((m for m in counts if m >= 2 * tried), max(counts))
        if more <= tried:
            raise TuningError(
                f"even {tried} micro-batches with one pipeline do not fit the memory: {shortage}. What would help: "
                f"more micro-batches (at most {self._rehearsal.batch_size}, by microbatch_candidates), more stages, "
                "recompute=True, smaller batches"
            ) from shortage
        rank_zero_info(f"AvgPipeTuner: {tried} micro-batches do not fit the memory ({shortage}); trying {more}")
        return more

    def _stages(
        self, setting: Setting, others: Sequence[int]
    ) -> tuple[dict[int, StageProfile], dict[Setting, list[Recording]]]:
        """Return the profiles of this process's stages, and the recorded iterations of each setting."""
        others = affordable(others, self._iterations)
        self._rehearsal.run(setting)
        self._tick()
        sizes = [setting, *(replace(setting, num_microbatches=m) for m in others)]
        rounds = (self._iterations - 2) // len(sizes)  # after an iteration to warm up and one to measure memory
        runs = self._in_turns(sizes, rounds)
        not_fitting = [size.num_microbatches for size in sizes if size not in runs]
        self.largest_not_fitting = max([self.largest_not_fitting, *not_fitting])
        seconds = {size: self._durations(timed) for size, timed in runs.items()}
        curves = self._curves(setting, runs[setting], seconds.pop(setting))
        memory, step_s = self._memory(setting)
        averaging_s = self._averaging_s()
        weights = self._weights()
        stages = {
            k: StageProfile(
                curves[k, FORWARD],
                curves[k, BACKWARD],
                memory[k],
                tuple(OtherSize(s.num_microbatches, at[k, FORWARD], at[k, BACKWARD]) for s, at in seconds.items()),
                step_s * weights[k],
                averaging_s * weights[k],
            )
            for k in self._cluster.stages
        }
        return stages, runs

    def _durations(self, runs: Sequence[Recording]) -> dict[tuple[int, Kind], float]:
        spans = [(s.stage, s.action.kind, s.end_s - s.begin_s) for run in runs for s in run.spans]
        if port_of(self._cluster.device).runs_ahead:  # the device does not wait for the host between actions
            return durations(spans)
        return durations(spans, [(run.busy_s, _within_s(run)) for run in runs])

    def _curves(
        self, setting: Setting, runs: Sequence[Recording], seconds: dict[tuple[int, Kind], float]
    ) -> dict[tuple[int, Kind], Curve]:
        if port_of(self._cluster.device).runs_ahead:
            return self._kernel_curves(setting, seconds)
        curves: dict[tuple[int, Kind], Curve] = {}
        for (stage, kind), length in seconds.items():
            spans = [s for run in runs for s in run.spans if (s.stage, s.action.kind) == (stage, kind)]
            within = sum(s.end_s - s.begin_s for s in spans)
            processor = sum(run.processor_s[stage, kind] for run in runs)
            used = processor / (within * torch.get_num_threads()) if within else 1.0
            curves[stage, kind] = Curve.constant(length, min(1.0, used))
        return curves

    def _kernel_curves(self, setting: Setting, seconds: dict[tuple[int, Kind], float]) -> dict[tuple[int, Kind], Curve]:
        """Return utilisation curves made from the kernels of one more iteration.

        If the profiler of torch shows no kernels, the device counts as fully used while an action runs.
        """
        with tracing_kernels(self._cluster.device) as trace:
            run = self._rehearsal.run(setting)
        shift = _clock_shift(run, trace)
        if shift is None:
            rank_zero_warn(
                "AvgPipeTuner: torch.profiler shows no kernels of the device, so it counts as full while an action "
                "runs, and the predicted gain of parallel pipelines may be too small"
            )
            return {key: Curve.constant(length, 1.0) for key, length in seconds.items()}
        middle = setting.num_microbatches // 2
        curves: dict[tuple[int, Kind], Curve] = {}
        for span in run.spans:
            if span.action.micro_batch == middle:
                curve = Curve.of_parts(trace.kernels, span.begin_s + shift, span.end_s + shift, _PIECES)
                factor = seconds[span.stage, span.action.kind] / curve.total_s if curve.total_s else 0.0
                curves[span.stage, span.action.kind] = replace(curve, seconds=tuple(factor * s for s in curve.seconds))
        return curves

    def _memory(self, setting: Setting) -> tuple[dict[int, StageMemory], float]:
        """Return the memory of each stage of this process, and the seconds of the optimizers' steps."""
        port, captured = port_of(self._cluster.device), self._rehearsal.planned_microbatches
        plan, trainer, stages = self._plan, self._rehearsal.trainer, self._cluster.stages
        module, num_teams = trainer.lightning_module, self._cluster.stage_map.num_teams
        before = port.allocated_bytes() if port.counts_memory else None
        kept = self._rehearsal.kept(setting)
        self._tick()
        models: dict[int, Holding] = {}  # with a reference, as of several models

        def measure() -> None:
            models.update(holdings(plan, stages, module, trainer.optimizers, captured, 2, num_teams))

        step_s = self._rehearsal.step_s(measure)
        context = port.other_bytes() // len(stages)
        held = sum(k.holding.total - k.holding.unallocated for k in kept.values()) if kept else 0
        # allocated memory that belongs to no stage is used with every setting
        other = max(0, before - held) // len(stages) if before is not None and kept else 0
        found = {}
        for k in stages:
            stage = plan.stages[k]
            received = plan.stages[k - 1].boundary_bytes if k else 0
            if kept is None:
                flights = Setting(captured, schedule=self._schedule).stash(plan.num_stages)[k]
                activations, transient = captured * (stage.memory.stash // flights + received), 0
            else:
                footprint = kept[k].footprint
                activations = sum(max(0, added) for action, added in footprint.changes.items() if action.kind.stash > 0)
                rest = footprint.peak - footprint.high_water - kept[k].holding.total - other
                transient = setting.num_microbatches * max(0, rest)
            found[k] = StageMemory(
                context + other + models[k].shared,
                models[k].model,
                models[k].reference,
                activations,
                transient,
                captured * (received + stage.boundary_bytes),
            )
        return found, step_s

    @property
    def _plan(self) -> Plan:
        plan = self._rehearsal.pipeline_run.deployment.plan
        assert plan is not None
        return plan

    def _averaging_s(self) -> float:
        try:
            return self._rehearsal.averaging_s()
        except MemoryShortage:  # parallel pipelines do not fit either, so the time does not matter
            return 0.0

    def _weights(self) -> dict[int, float]:
        """Return each stage's share of this process's parameters, by which times for all of them are divided."""
        plan = self._plan
        counts = {k: plan.stages[k].num_parameters for k in self._cluster.stages}
        total = sum(counts.values())
        return {k: count / total if total else 1.0 / len(counts) for k, count in counts.items()}

    def _hops(self, num_microbatches: int) -> tuple[HopProfile, ...]:
        plan = self._plan
        size = self._rehearsal.planned_microbatches / num_microbatches
        return tuple(
            HopProfile(size * stage.wire_bytes, size * stage.gradient_bytes, link)
            for stage, link in zip(plan.stages, self._cluster.links(self._cluster.stage_map), strict=False)
        )


def _within_s(run: Recording) -> float:
    return sum(span.end_s - span.begin_s for span in run.spans)


def _clock_shift(run: Recording, trace: KernelTrace) -> float | None:
    """Return the seconds to add to times of a recording to get times of the kernel trace; None if there is no trace."""
    shifts = [
        trace.forwards_s[span.stage, span.action.micro_batch] - span.begin_s
        for span in run.spans
        if span.action.kind is FORWARD and (span.stage, span.action.micro_batch) in trace.forwards_s
    ]
    return statistics.median(shifts) if shifts and trace.kernels else None
