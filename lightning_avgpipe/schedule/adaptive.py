"""Adaptive advance: raise the advance step by step while each step makes iterations faster, then keep it.

::

    ignore 2 iterations --> measure 8 iterations --the first or a gain: one step up--> ignore 2 iterations
                                  |  ^
          no gain: one step back, |  | the time has changed by more than 10%
          or nowhere to go        v  |
                              keep and watch

The controller takes times and returns the advance of the next iteration. It measures nothing itself, so the same times
give the same decisions on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_avgpipe.errors import ScheduleError

DROPPED, WINDOW = 2, 8  # iterations after a change that are ignored, and iterations that are measured then
LONGEST = 8 * WINDOW  # largest number of measured iterations, if noise would hide a gain
LEAST_GAIN = 0.01  # as a share of the time with the advance before
DRIFT = 0.10  # as a share of the time with the chosen advance, when it was chosen
# Standard errors that a difference must exceed; with 8 times, chance alone exceeds them about once in twenty.
_SIGNIFICANT = 2.0
_SIGMA_OF_MAD = 1.4826  # standard deviation over median absolute deviation, for normal noise
_ERROR_OF_MEDIAN = math.sqrt(math.pi / 2)  # the median's standard error over that of the mean


@dataclass(frozen=True)
class IterationShape:
    """The sizes that time and memory of an iteration depend on, besides its advance.

    An advance is chosen for each shape separately.

    Attributes:
        num_microbatches: M, number of micro-batches of an iteration.
        num_pipelines: N, number of parallel pipelines.
        num_stages: K, number of stages.
        length_bucket: bucket of the length of the sequences in the batch; 0 if lengths do not vary.
    """

    num_microbatches: int
    num_pipelines: int
    num_stages: int
    length_bucket: int = 0


@dataclass(frozen=True)
class Measured:
    """The median time of an iteration with an advance, and the standard error of this median, in seconds."""

    advance: int
    median_s: float
    error_s: float

    @classmethod
    def of(cls, advance: int, times_s: Sequence[float]) -> Measured:
        """Make an estimate from the times of several iterations; outliers hardly change it."""
        median = statistics.median(times_s)
        sigma = _SIGMA_OF_MAD * statistics.median(abs(seconds - median) for seconds in times_s)
        return cls(advance, median, _ERROR_OF_MEDIAN * sigma / math.sqrt(len(times_s)))

    @property
    def precise(self) -> bool:
        """Whether a gain of ``LEAST_GAIN`` would be significant against another time of the same precision."""
        return _SIGNIFICANT * math.sqrt(2) * self.error_s <= LEAST_GAIN * self.median_s

    def differs(self, other: Measured, least: float) -> bool:
        """Return whether both times differ by more than the share ``least`` of this one, and by more than noise."""
        noise = _SIGNIFICANT * math.hypot(self.error_s, other.error_s)
        return abs(self.median_s - other.median_s) > max(least * self.median_s, noise)


@dataclass(frozen=True)
class State:
    """The state of the choice for one shape: searching, or watching the time with a chosen advance.

    Attributes:
        advance: h, advance of the next iteration.
        ignored: number of iterations whose times are still ignored, because the advance was just changed.
        times_s: times with this advance so far, or since the last check for drift, in seconds.
        before: time with the advance before, which this advance has to beat; None for the first advance.
        best: chosen advance and its time; None while the search goes on.
        reason: why the advance was not raised further.
    """

    advance: int
    ignored: int = DROPPED
    times_s: tuple[float, ...] = ()
    before: Measured | None = None
    best: Measured | None = None
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """The advance of the next iteration, which may be the same as before.

    Attributes:
        advance: h.
        reason: why it was chosen.
        measured_s: median time of the iterations by which it was chosen, in seconds.
    """

    advance: int
    reason: str
    measured_s: float


class AdaptiveAdvance:
    """A controller that chooses the advance h of advance forward propagation while training runs.

    It raises h by whole steps: one more forward in flight on *every* hop. A single extra forward on the first stage
    alone changes hardly anything, so a search by such steps would stop too early. It never tries an advance below the
    first one. As times may rise and fall again with h (if a transfer is longer than an action, or stages are uneven),
    it finds a local optimum, which may not be the global one.

    Args:
        start: first advance, as the profile suggests. It is lowered until it fits the memory.
        predicted_peak: ``(shape, h) -> bytes`` of each stage, at its peak.
        memory_limit: bytes that no stage may exceed.
        warm_up: ``(shape, h) -> warm-up`` of each stage.

    Source: Algorithm 1 of AvgPipe, Chen et al., PPoPP 2023, made robust against noise.
    """

    def __init__(
        self,
        start: int,
        predicted_peak: Callable[[IterationShape, int], Sequence[float]],
        memory_limit: float,
        warm_up: Callable[[IterationShape, int], Sequence[int]],
    ) -> None:
        self._start = start
        self._predicted_peak = predicted_peak
        self._limit = memory_limit
        self._warm_up = warm_up
        self._states: dict[IterationShape, State] = {}
        self._loaded: dict[IterationShape, State] = {}  # states of shapes that have not been used since loading

    def state(self, shape: IterationShape) -> State:
        """Return the state of the choice for a shape.

        Raises:
            ScheduleError: not even advance 0 fits the memory.
        """
        if shape not in self._states:
            loaded = self._loaded.pop(shape, None)
            if loaded is None or self._over_limit(shape, loaded.advance) is not None:
                loaded = State(self._first(shape))
            self._states[shape] = loaded
        return self._states[shape]

    def advance(self, shape: IterationShape) -> int:
        """Return the advance for the next iteration of a shape."""
        return self.state(shape).advance

    def observe(self, shape: IterationShape, seconds: float) -> Decision | None:
        """Record the time of one iteration, and decide which advance comes next.

        Args:
            shape: shape of the iteration.
            seconds: time of the slowest stage, with the advance that ``advance(shape)`` gave.
        Returns:
            The decision; None if there is none yet.
        Raises:
            ScheduleError: not even advance 0 fits the memory.
        """
        state = self.state(shape)
        self._states[shape], decision = self._next(shape, state, seconds)
        return decision

    def _next(self, shape: IterationShape, state: State, seconds: float) -> tuple[State, Decision | None]:
        if state.ignored:
            return replace(state, ignored=state.ignored - 1), None
        state = replace(state, times_s=(*state.times_s, seconds))
        if state.best is not None:
            return _watched(state, state.best)
        if len(state.times_s) % WINDOW == 0:
            now = Measured.of(state.advance, state.times_s)
            if now.precise or len(state.times_s) >= LONGEST:
                return self._judged(shape, now, state.before)
        return state, None

    def _judged(self, shape: IterationShape, now: Measured, before: Measured | None) -> tuple[State, Decision]:
        if before is not None and not (now.median_s < before.median_s and before.differs(now, LEAST_GAIN)):
            reason = f"{_described(now)} is no gain over {_described(before)}: back, and stay"
            return State(before.advance, best=before, reason=reason), Decision(before.advance, reason, now.median_s)
        obstacle = self._obstacle(shape, now.advance + 1)
        if obstacle is not None:
            reason = f"{_described(now)}; {obstacle}"
            return State(now.advance, ignored=0, best=now, reason=reason), Decision(now.advance, reason, now.median_s)
        reason = f"{_described(now)}; trying one more"
        return State(now.advance + 1, before=now), Decision(now.advance + 1, reason, now.median_s)

    def _obstacle(self, shape: IterationShape, advance: int) -> str | None:
        """Return why an advance cannot be tried; None if it can."""
        if self._effect(shape, advance) == self._effect(shape, advance - 1):
            return f"advance {advance} would change nothing with {shape.num_microbatches} micro-batches"
        return self._over_limit(shape, advance)

    def _effect(self, shape: IterationShape, advance: int) -> list[int]:
        """Return the warm-up that decides the rows of a schedule: a warm-up of M gives the same rows as one of M-1."""
        return [min(w, shape.num_microbatches - 1) for w in self._warm_up(shape, advance)]

    def _over_limit(self, shape: IterationShape, advance: int) -> str | None:
        for stage, peak in enumerate(self._predicted_peak(shape, advance)):
            if not peak <= self._limit:
                return f"advance {advance} would need {peak:.4g} bytes on stage {stage}, the limit is {self._limit:.4g}"
        return None

    def _first(self, shape: IterationShape) -> int:
        """Return the starting advance, or the largest one below it that fits the memory."""
        for advance in range(self._start, -1, -1):
            obstacle = self._over_limit(shape, advance)
            if obstacle is None:
                return advance
        raise ScheduleError(
            f"{obstacle}, even with no advance at all; use more micro-batches, fewer pipelines or a higher limit"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all shapes as plain numbers, strings, lists and dicts."""
        states = [
            {"setting": asdict(shape), "state": asdict(state)} for shape, state in (self._loaded | self._states).items()
        ]
        return {"states": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of all shapes. A shape whose advance no longer fits the memory starts anew when used."""
        self._states = {}
        self._loaded = {IterationShape(**entry["setting"]): _loaded(entry["state"]) for entry in state_dict["states"]}


def _watched(state: State, best: Measured) -> tuple[State, Decision | None]:
    if len(state.times_s) < WINDOW:
        return state, None
    now = Measured.of(state.advance, state.times_s)
    if not best.differs(now, DRIFT):
        return replace(state, times_s=()), None
    reason = f"{_described(now)} instead of {best.median_s:.4g} s: measuring anew"
    return State(state.advance, ignored=0), Decision(state.advance, reason, now.median_s)


def _described(measured: Measured) -> str:
    return f"{measured.median_s:.4g} s with advance {measured.advance}"


def _loaded(fields: Mapping[str, Any]) -> State:
    measured = {name: Measured(**fields[name]) for name in ("before", "best") if fields[name] is not None}
    return State(**{**fields, **measured, "times_s": tuple(fields["times_s"])})
