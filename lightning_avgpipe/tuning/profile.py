"""The profile: measurements of a model, its stages and its devices in a few iterations at one setting.

A micro-batch of stage 1, on the time axis of its device::

    utilisation 1 |      ____
                  |  ___|    |__      a curve: pieces of constant utilisation, one curve per forward and backward
                0 +-------------+
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.planning import Link
from lightning_avgpipe.schedule import Kind, builders

TUNED = ("advance_forward", "1f1b", "afab")  # schedules whose time and memory are predicted
_FORMAT = 2
# A profile is taken with at most _ENOUGH micro-batches, or _PER_STAGE for each stage if that is more: with more, the
# fixed cost of an action would dominate.
_ENOUGH = 16
_PER_STAGE = 8
_ROUNDS = 2  # least number of rounds over all sizes

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Setting:
    """A setting: the number of micro-batches M, the number of pipelines N, and the schedule.

    Attributes:
        num_microbatches: M, per iteration and pipeline.
        num_pipelines: N, number of parallel pipelines.
        advance: h of ``"advance_forward"``.
        schedule: ``"advance_forward"``, ``"1f1b"`` or ``"afab"``.
        rolling: whether each pipeline begins its next batch without waiting for the others.
        split: whether the pipelines divide each batch among them.
    """

    num_microbatches: int
    num_pipelines: int = 1
    advance: int = 0
    schedule: str = "advance_forward"
    rolling: bool = False
    split: bool = False

    @property
    def parts(self) -> int:
        """The number of micro-batches of a batch."""
        return self.num_microbatches * (self.num_pipelines if self.split else 1)

    @property
    def batches(self) -> int:
        """The number of batches of an iteration."""
        return 1 if self.split else self.num_pipelines

    def warm_up(self, num_stages: int) -> tuple[int, ...]:
        """Return the forwards of each stage before its first pair, shape ``(num_stages,)``.

        A warm-up of M is returned as M - 1, which gives the same rows.
        """
        ahead = builders.warm_up(self.schedule, num_stages, self.num_microbatches, self.advance)
        return tuple(min(w, self.num_microbatches - 1) for w in ahead)

    def stash(self, num_stages: int) -> tuple[int, ...]:
        """Return the largest number of stashed micro-batches of one pipeline on each stage, shape ``(num_stages,)``."""
        return tuple(w + 1 for w in self.warm_up(num_stages))

    @property
    def order(self) -> str:
        """The order of actions in words: the advance or the schedule, and whether iterations roll."""
        name = f"advance {self.advance}" if self.schedule == "advance_forward" else self.schedule
        return name + ", rolling" * self.rolling + ", split batches" * self.split

    def __str__(self) -> str:
        pipelines = f"{self.num_pipelines} pipeline{'s' * (self.num_pipelines > 1)}"
        return f"{pipelines}, {self.num_microbatches} micro-batch{'es' * (self.num_microbatches > 1)}, {self.order}"


@dataclass(frozen=True)
class Curve:
    """The utilisation of a device over time by an action on one micro-batch, piecewise constant.

    Attributes:
        seconds: length of each piece in seconds.
        utilisation: utilisation of the device in each piece, 0..1; same shape.
    """

    seconds: tuple[float, ...]
    utilisation: tuple[float, ...]

    @classmethod
    def constant(cls, seconds: float, utilisation: float) -> Curve:
        """Make a curve of one piece."""
        return cls((seconds,), (utilisation,))

    @classmethod
    def of_parts(cls, parts: Iterable[tuple[float, float, float]], begin_s: float, end_s: float, pieces: int) -> Curve:
        """Make a curve of equally long pieces from what uses the device.

        Args:
            parts: begin, end and share of the device of each part of the work; parts may overlap.
            begin_s: begin of the curve, on the same clock.
            end_s: end of the curve.
            pieces: number of pieces.
        """
        length = (end_s - begin_s) / pieces
        work = [0.0] * pieces
        for begin, end, share in parts:
            for i in range(pieces):
                low = begin_s + i * length
                work[i] += share * max(0.0, min(end, low + length) - max(begin, low))
        return cls((length,) * pieces, tuple(min(1.0, w / length) if length > 0 else 0.0 for w in work))

    @cached_property
    def total_s(self) -> float:
        """The duration in seconds."""
        return sum(self.seconds)

    def stretched(self, demand: float) -> Curve:
        """Return the curve of ``demand`` times the work: a higher utilisation, and a longer time where it exceeds 1."""
        wanted = [demand * used for used in self.utilisation]
        lengths = tuple(s * max(1.0, w) for s, w in zip(self.seconds, wanted, strict=True))
        return Curve(lengths, tuple(min(1.0, w) for w in wanted))

    @cached_property
    def work_s(self) -> float:
        """The seconds of a fully used device that the work takes: the integral of the utilisation."""
        return sum(s * u for s, u in zip(self.seconds, self.utilisation, strict=True))


@dataclass(frozen=True)
class OtherSize:
    """The durations of a forward and a backward with another number of micro-batches, measured with one pipeline."""

    num_microbatches: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class StageMemory:
    """The bytes on one stage at the profiled setting.

    Attributes:
        context: bytes of the device's runtime, independent of the model.
        model: bytes of parameters, gradients and optimizer states of one pipeline.
        reference: bytes of the reference model and its accumulator.
        activations: bytes of the stash of a full batch; a micro-batch needs 1/M of it.
        transient: bytes that a full batch needs in addition while an action runs.
        boundary: bytes of buffers for the messages of a full batch.
    """

    context: int
    model: int
    reference: int
    activations: int
    transient: int = 0
    boundary: int = 0


@dataclass(frozen=True)
class StageProfile:
    """The measurements of one stage at the profiled setting.

    Attributes:
        forward: curve of the forward of one micro-batch; its duration is that of the action.
        backward: curve of the backward of one micro-batch.
        memory: bytes of the stage.
        others: durations at other micro-batch sizes, which correct the predictions from the curves.
        step_s: seconds of the optimizer's step, per pipeline.
        averaging_s: seconds of the averaging, per pipeline.
    """

    forward: Curve
    backward: Curve
    memory: StageMemory
    others: tuple[OtherSize, ...] = ()
    step_s: float = 0.0
    averaging_s: float = 0.0


@dataclass(frozen=True)
class HopProfile:
    """The measurements of one hop: bytes of the messages of one micro-batch, and the link, equal in both directions."""

    forward_bytes: float
    backward_bytes: float
    link: Link = field(default_factory=Link)


@dataclass(frozen=True)
class Trial:
    """The measured time of whole iterations at a setting, which includes waits that come from varying action times.

    Attributes:
        setting: setting with one pipeline.
        span_s: seconds from the first action to the last one, without optimizer steps and averaging.
    """

    setting: Setting
    span_s: float


@dataclass(frozen=True)
class Profile:
    """The measurements of one pipeline with m = ``num_microbatches``.

    This number should be large, so that devices are not fully used: demand beyond full use cannot be measured.

    Attributes:
        num_microbatches: m, number of micro-batches of a batch at the profiled setting.
        batch_size: number of samples of a batch.
        stages: measurements of each stage, shape ``(K,)``.
        hops: measurements of each hop, shape ``(K-1,)``.
        in_turns: whether a device runs one action at a time, as in the executor, instead of all lanes side by side.
        devices: number of the device of each stage, shape ``(K,)``.
        groups: number of process groups whose models are averaged, including this one.
        tied_s: seconds in which stages that use the same parameters sum their gradients, per pipeline.
        trials: measured iterations of one pipeline, at some numbers of micro-batches; empty: none were measured.
    """

    num_microbatches: int
    batch_size: int
    stages: tuple[StageProfile, ...]
    hops: tuple[HopProfile, ...]
    in_turns: bool
    devices: tuple[int, ...]
    groups: int = 1
    tied_s: float = 0.0
    trials: tuple[Trial, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        return len(self.stages)

    def averages(self, num_pipelines: int) -> bool:
        """Return whether this many pipelines are averaged, and therefore have a reference model."""
        return num_pipelines * self.groups > 1


def trial_sizes(counts: Sequence[int], num_stages: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of micro-batches to profile with, and up to three others to measure the effect of sizes.

    The first number is large, so that devices are not full. The others are the smallest number, one between the two,
    and one between that and the large number, where the best setting mostly is.

    Args:
        counts: numbers of micro-batches to choose from.
        num_stages: K, number of stages.
    """
    counts = sorted(set(counts))
    cap = max(_ENOUGH, _PER_STAGE * num_stages)
    large = max((m for m in counts if m <= cap), default=counts[0])
    below = [m for m in counts if m < large]
    if not below:
        return large, ()
    least = below[0]
    middle = _between(below, least, large)
    return large, tuple(sorted({least, middle, _between(below, middle, large)}, reverse=True))


def affordable(others: Sequence[int], iterations: int) -> tuple[int, ...]:
    """Return those of the other sizes that can be measured within a number of iterations.

    Args:
        others: numbers of micro-batches, descending. The first ones, which are nearest to that of the profile, are left
            out first.
        iterations: number of iterations, at least 4.
    """
    most = (iterations - 2) // _ROUNDS - 1
    return tuple(others[max(0, len(others) - most) :])


def _between(counts: Sequence[int], low: int, high: int) -> int:
    """Return the count that is nearest to the geometric mean of ``low`` and ``high``."""
    return min(counts, key=lambda m: abs(m * m - low * high))


def durations(
    spans: Iterable[tuple[int, Kind, float]], span_s: Sequence[tuple[float, float]] = ()
) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of an action of each stage and kind.

    Args:
        spans: stage, kind and seconds of each action of one process.
        span_s: for each iteration the seconds in which the process was busy, and the seconds within actions. The time
            between actions is distributed over them; empty: it is not counted.
    """
    found: dict[tuple[int, Kind], list[float]] = {}
    for stage, kind, seconds in spans:
        found.setdefault((stage, kind), []).append(seconds)
    factor = max(1.0, statistics.median(busy / within for busy, within in span_s)) if span_s else 1.0
    return {key: factor * statistics.median(seconds) for key, seconds in found.items()}


def to_json(value: Any) -> str:
    """Return a dataclass of finite numbers, strings, tuples and such dataclasses as JSON; floats stay exact."""
    return json.dumps({"format": _FORMAT, type(value).__name__: dataclasses.asdict(value)}, allow_nan=False)


def from_json(kind: type[T], text: str) -> T:
    """Make the dataclass that ``to_json`` wrote.

    Raises:
        TuningError: the text is of another class or version, or incomplete.
    """
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"it has format {found['format']!r}, this version reads {_FORMAT}")
        return typing.cast(T, _read(kind, found[kind.__name__], kind.__name__))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TuningError(
            f"this is not a {kind.__name__} that can be read: {type(error).__name__}: {error}; make it anew"
        ) from error


def _read(kind: Any, data: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {field.name for field in dataclasses.fields(kind)}
        needed = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        if not needed <= data.keys() <= fields:  # fields with a default may have been added after the text was written
            raise ValueError(f"{where} has the entries {sorted(data)}, not {sorted(fields)}")
        return kind(**{name: _read(hints[name], found, f"{where}.{name}") for name, found in data.items()})  # type: ignore[operator]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return tuple(_read(arguments[0], entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if isinstance(kind, types.UnionType):  # the only unions are those with None
        return None if data is None else _read(arguments[0], data, where)
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise TypeError(f"{where} is {data!r}, not of type {kind.__name__}")
    return kind(data)
