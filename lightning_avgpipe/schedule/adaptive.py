"""Adaptive advance: climb from a first advance while every step pays, and stay.

::

    Settling --2 iterations--> Measuring --8 iterations, the first or a gain: one step up--> Settling
                                  |  ^
          no gain: one step back, |  | the time has changed by more than 10%
          or nowhere to go        v  |
                                 Frozen

The controller sees times and says which advance the next iteration runs with; it measures nothing, and the same times
give the same decisions on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.builders import warm_up

DROPPED, WINDOW = 2, 8  # iterations after a change that do not count, and those that do
LONGEST = 8 * WINDOW  # where noise would hide a gain, more iterations count
LEAST_GAIN = 0.01  # of the time before
DRIFT = 0.10  # of the time that was settled on
# Standard errors that a difference must exceed; with 8 times, chance alone does so about once in twenty.
_SIGNIFICANT = 2.0
_SIGMA_OF_MAD = 1.4826  # for normal noise
_ERROR_OF_MEDIAN = math.sqrt(math.pi / 2)  # the median's standard error over that of the mean


@dataclass(frozen=True)
class IterationShape:
    """What times and memory of an iteration depend on beside its advance, which is chosen for each shape anew.

    Attributes:
        num_microbatches: M.
        num_pipelines: N.
        num_stages: K.
        length_bucket: of the sequences in the batch; 0 where lengths do not vary.
    """

    num_microbatches: int
    num_pipelines: int
    num_stages: int
    length_bucket: int = 0


@dataclass(frozen=True)
class Measured:
    """The time of an iteration with an advance: median and its standard error, in seconds."""

    advance: int
    median_s: float
    error_s: float

    @classmethod
    def of(cls, advance: int, times_s: Sequence[float]) -> Measured:
        """From the times of several iterations; outliers hardly count."""
        median = statistics.median(times_s)
        sigma = _SIGMA_OF_MAD * statistics.median(abs(seconds - median) for seconds in times_s)
        return cls(advance, median, _ERROR_OF_MEDIAN * sigma / math.sqrt(len(times_s)))

    @property
    def precise(self) -> bool:
        """Whether the least gain would show against another time of the same precision."""
        return _SIGNIFICANT * math.sqrt(2) * self.error_s <= LEAST_GAIN * self.median_s

    def differs(self, other: Measured, least: float) -> bool:
        """Whether the times differ by more than a share of this one, and by more than noise."""
        noise = _SIGNIFICANT * math.hypot(self.error_s, other.error_s)
        return abs(self.median_s - other.median_s) > max(least * self.median_s, noise)


@dataclass(frozen=True)
class Settling:
    """The first iterations with an advance, which do not count; ``before`` is what it has to beat, if anything."""

    advance: int
    left: int = DROPPED
    before: Measured | None = None


@dataclass(frozen=True)
class Measuring:
    """Collecting the times that count."""

    advance: int
    times_s: tuple[float, ...] = ()
    before: Measured | None = None


@dataclass(frozen=True)
class Frozen:
    """The advance is chosen; the last times are watched for drift.

    Attributes:
        best: what was chosen.
        reason: why it went no further.
        left: iterations that do not count because the advance was just changed back.
        times_s: since the last look.
    """

    best: Measured
    reason: str
    left: int = 0
    times_s: tuple[float, ...] = ()

    @property
    def advance(self) -> int:
        """h."""
        return self.best.advance


State = Settling | Measuring | Frozen


@dataclass(frozen=True)
class Decision:
    """From the next iteration on ``advance`` is used, and why; it may be the same as before."""

    advance: int
    reason: str


class AdaptiveAdvance:
    """Chooses the advance h of advance forward propagation while training runs.

    It steps by a whole h, which adds a forward on *every* hop: a single extra forward on the first stage alone changes
    hardly anything, so that a search by such steps stops too early. It only climbs: a first advance that is larger
    than needed stays. As times may rise and fall again with h (where a transfer is longer than an action, or stages
    are uneven), what it finds is the end of the climb, which is not always the best of all.

    Args:
        start: first advance, as the profile suggests; lowered until it fits the memory.
        predicted_peak: ``(shape, h) -> bytes`` of each stage, at its peak.
        memory_limit: bytes that no stage may exceed; None for no limit.
        warm_up: ``(shape, h) -> warm-up`` of each stage; default: that of equal stages.

    Raises:
        ScheduleError: ``start`` is no advance.
    Source: Algorithm 1 of AvgPipe, Chen et al., PPoPP 2023, made robust against noise.
    """

    def __init__(
        self,
        start: int,
        predicted_peak: Callable[[IterationShape, int], Sequence[float]],
        memory_limit: float | None = None,
        warm_up: Callable[[IterationShape, int], Sequence[int]] | None = None,
    ) -> None:
        if start < 0:
            raise ScheduleError(f"start={start}: an advance is an integer of at least 0; 0 is 1F1B")
        self._start = start
        self._predicted_peak = predicted_peak
        self._limit = math.inf if memory_limit is None else memory_limit
        self._warm_up = warm_up or _even_warm_up
        self._states: dict[IterationShape, State] = {}
        self._loaded: dict[IterationShape, State] = {}  # of shapes that have not been used since

    def state(self, shape: IterationShape) -> State:
        """Where the choice for a shape stands.

        Raises:
            ScheduleError: not even advance 0 fits the memory.
        """
        if shape not in self._states:
            loaded = self._loaded.pop(shape, None)
            if loaded is None or self._over_limit(shape, loaded.advance) is not None:
                loaded = Settling(self._first(shape))
            self._states[shape] = loaded
        return self._states[shape]

    def advance(self, shape: IterationShape) -> int:
        """The advance for the next iteration of a shape."""
        return self.state(shape).advance

    def observe(self, shape: IterationShape, seconds: float) -> Decision | None:
        """Take in one iteration.

        Args:
            shape: of the iteration.
            seconds: time of the slowest stage, with the advance that ``advance(shape)`` gave.
        Returns:
            What was decided, if anything was.
        Raises:
            ScheduleError: a time that is none, or not even advance 0 fits the memory.
        """
        if not 0 < seconds < math.inf:
            raise ScheduleError(f"seconds={seconds}: the time of an iteration must be positive and finite")
        state = self.state(shape)
        self._states[shape], decision = self._next(shape, state, seconds)
        return decision

    def _next(self, shape: IterationShape, state: State, seconds: float) -> tuple[State, Decision | None]:
        match state:
            case Settling(advance, left, before) if left > 1:
                return Settling(advance, left - 1, before), None
            case Settling(advance, _, before):
                return Measuring(advance, (), before), None
            case Frozen(best, reason, left, _) if left > 0:
                return Frozen(best, reason, left - 1), None
            case Frozen():
                return _watched(state, seconds)
            case Measuring(advance, times_s, before):
                times_s = (*times_s, seconds)
                if len(times_s) % WINDOW == 0:
                    now = Measured.of(advance, times_s)
                    if now.precise or len(times_s) >= LONGEST:
                        return self._judged(shape, now, before)
                return Measuring(advance, times_s, before), None
        raise AssertionError(state)

    def _judged(self, shape: IterationShape, now: Measured, before: Measured | None) -> tuple[State, Decision]:
        if before is not None and not (now.median_s < before.median_s and before.differs(now, LEAST_GAIN)):
            reason = f"{_described(now)} is no gain over {_described(before)}: back, and stay"
            return Frozen(before, reason, left=DROPPED), Decision(before.advance, reason)
        obstacle = self._obstacle(shape, now.advance + 1)
        if obstacle is not None:
            reason = f"{_described(now)}; {obstacle}"
            return Frozen(now, reason), Decision(now.advance, reason)
        reason = f"{_described(now)}; trying one more"
        return Settling(now.advance + 1, before=now), Decision(now.advance + 1, reason)

    def _obstacle(self, shape: IterationShape, advance: int) -> str | None:
        """Why an advance is not to be tried, if so."""
        if self._effect(shape, advance) == self._effect(shape, advance - 1):
            return f"advance {advance} would change nothing with {shape.num_microbatches} micro-batches"
        return self._over_limit(shape, advance)

    def _effect(self, shape: IterationShape, advance: int) -> list[int]:
        """Settings with the same effect have the same rows: a warm-up of M is one of M-1."""
        return [min(w, shape.num_microbatches - 1) for w in self._warm_up(shape, advance)]

    def _over_limit(self, shape: IterationShape, advance: int) -> str | None:
        for stage, peak in enumerate(self._predicted_peak(shape, advance)):
            if not peak <= self._limit:
                return f"advance {advance} would need {peak:.4g} bytes on stage {stage}, the limit is {self._limit:.4g}"
        return None

    def _first(self, shape: IterationShape) -> int:
        """The starting advance, or the largest one below it that fits."""
        for advance in range(self._start, -1, -1):
            obstacle = self._over_limit(shape, advance)
            if obstacle is None:
                return advance
        raise ScheduleError(
            f"{obstacle}, even with no advance at all; use more micro-batches, fewer pipelines or a higher limit"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        states = [
            {"setting": asdict(shape), "kind": type(state).__name__, "state": asdict(state)}
            for shape, state in (self._loaded | self._states).items()
        ]
        return {"states": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, but anew where the advance does not fit the memory when it is used."""
        self._states = {}
        self._loaded = {
            IterationShape(**entry["setting"]): _loaded(entry["kind"], entry["state"]) for entry in state_dict["states"]
        }


def _watched(state: Frozen, seconds: float) -> tuple[State, Decision | None]:
    times_s = (*state.times_s, seconds)
    if len(times_s) < WINDOW:
        return Frozen(state.best, state.reason, 0, times_s), None
    now = Measured.of(state.advance, times_s)
    if not state.best.differs(now, DRIFT):
        return Frozen(state.best, state.reason), None
    reason = f"{_described(now)} instead of {state.best.median_s:.4g} s: measuring anew"
    return Measuring(state.advance), Decision(state.advance, reason)


def _even_warm_up(shape: IterationShape, advance: int) -> Sequence[int]:
    return warm_up("advance_forward", shape.num_stages, shape.num_microbatches, advance)


def _described(measured: Measured) -> str:
    return f"{measured.median_s:.4g} s with advance {measured.advance}"


def _loaded(kind: str, fields: Mapping[str, Any]) -> State:
    fields = dict(fields)
    for name in ("before", "best"):
        if fields.get(name) is not None:
            fields[name] = Measured(**fields[name])
    if "times_s" in fields:
        fields["times_s"] = tuple(fields["times_s"])
    return {"Settling": Settling, "Measuring": Measuring, "Frozen": Frozen}[kind](**fields)
