"""Scaling of a profile: the times of actions and messages, and the memory, at another setting than the profiled one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_avgpipe.schedule import BACKWARD, FORWARD, Kind
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.schedule.kinds import Direction
from lightning_avgpipe.tuning.profile import Curve, Profile, Setting, StageProfile

_PIECES = 8  # largest number of pieces of a curve; more take time and change little


@dataclass(frozen=True)
class Load:
    """The times of the forward or backward of one micro-batch on one stage.

    Attributes:
        curve: utilisation while no other lane runs.
        work_s: seconds of the device that the action takes from other lanes.
    """

    curve: Curve
    work_s: float

    @property
    def alone_s(self) -> float:
        """The seconds while no other lane runs."""
        return self.curve.total_s


@dataclass(frozen=True)
class Loads:
    """The times of all actions and messages at a number of micro-batches, which are the costs of a simulation.

    Attributes:
        forward: load of a forward on each stage, shape ``(K,)``.
        backward: load of a backward on each stage, shape ``(K,)``.
        values_s: seconds for which activations of a micro-batch occupy the link of each hop, shape ``(K-1,)``.
        gradients_s: seconds for which gradients of a micro-batch occupy the link of each hop, shape ``(K-1,)``.
        latency_s: latencies of each hop in seconds, for activations and gradients, shape ``(K-1, 2)``.
    """

    forward: tuple[Load, ...]
    backward: tuple[Load, ...]
    values_s: tuple[float, ...]
    gradients_s: tuple[float, ...]
    latency_s: tuple[tuple[float, float], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        return len(self.forward)

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the parts of an action: seconds and utilisation. A long curve becomes few parts of the same work."""
        curve = {FORWARD: self.forward, BACKWARD: self.backward}[kind][stage].curve
        if len(curve.seconds) <= _PIECES or curve.total_s == 0:
            return tuple(zip(curve.seconds, curve.utilisation, strict=True))
        ends = list(itertools.accumulate(curve.seconds, initial=0.0))
        parts = zip(ends, ends[1:], curve.utilisation, strict=False)
        shorter = Curve.of_parts(parts, 0.0, curve.total_s, _PIECES)
        return tuple(zip(shorter.seconds, shorter.utilisation, strict=True))

    def message_s(self, direction: Direction, hop: int, sender: int = 0, receiver: int = 0) -> tuple[float, float]:
        """Return the seconds for which a message occupies its link, and the seconds from then until it arrives."""
        if direction == "forward":
            return self.values_s[hop], self.latency_s[hop][0]
        return self.gradients_s[hop], self.latency_s[hop][1]


def loads_at(profile: Profile, num_microbatches: int) -> Loads:
    """Scale a profile to a number of micro-batches m.

    A micro-batch m/M times as large has m/M times the utilisation, and takes longer only where this exceeds 1. Its
    messages have m/M times the bytes.
    """
    size = profile.num_microbatches / num_microbatches
    return Loads(
        tuple(_load(profile, num_microbatches, stage, "forward") for stage in profile.stages),
        tuple(_load(profile, num_microbatches, stage, "backward") for stage in profile.stages),
        tuple(size * hop.forward_bytes * hop.forward.per_byte for hop in profile.hops),
        tuple(size * hop.backward_bytes * hop.backward.per_byte for hop in profile.hops),
        tuple((hop.forward.latency, hop.backward.latency) for hop in profile.hops),
    )


def _load(profile: Profile, num_microbatches: int, stage: StageProfile, direction: str) -> Load:
    curve: Curve = getattr(stage, direction)
    factor = _correction(profile, stage, direction, num_microbatches)
    scaled = curve.stretched(profile.num_microbatches / num_microbatches)
    scaled = Curve(tuple(factor * s for s in scaled.seconds), scaled.utilisation)
    return Load(scaled, scaled.total_s if profile.device.in_turns else scaled.work_s)


def _correction(profile: Profile, stage: StageProfile, direction: str, num_microbatches: int) -> float:
    """Return measured over predicted seconds, linear in the logarithm of M between measured sizes."""
    if not stage.others:
        return 1.0
    curve: Curve = getattr(stage, direction)
    known = {float(profile.num_microbatches): 1.0}
    for other in stage.others:
        predicted = curve.stretched(profile.num_microbatches / other.num_microbatches).total_s
        measured = other.forward_s if direction == "forward" else other.backward_s
        if predicted > 0 and other.num_microbatches != profile.num_microbatches:
            known[float(other.num_microbatches)] = measured / predicted
    return interpolated(sorted((math.log(m), ratio) for m, ratio in known.items()), math.log(num_microbatches))


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between points with ascending x; outside of them the result is constant."""
    return float(np.interp(x, [at for at, _ in points], [y for _, y in points]))


def update_s(profile: Profile, num_pipelines: int) -> float:
    """Return the seconds at the end of an iteration of N pipelines.

    These are the sums of gradients of tied parameters, and the optimizer steps and averaging of the slowest device.
    """
    averages = profile.averages(num_pipelines)
    per_device: dict[int, float] = {}
    for device, stage in zip(profile.devices, profile.stages, strict=True):
        seconds = num_pipelines * (stage.step_s + (stage.averaging_s if averages else 0.0))
        per_device[device] = per_device.get(device, 0.0) + seconds
    return max(per_device.values()) + num_pipelines * profile.tied_s


@dataclass(frozen=True)
class Needed:
    """The bytes that one stage needs at its peak.

    Attributes:
        fixed: bytes of the context of the device, the reference model and its accumulator.
        models: bytes of parameters, gradients and optimizer states of all pipelines.
        stash: bytes that all micro-batches in flight keep for their backwards.
        working: bytes of transient tensors and message buffers of one micro-batch of each pipeline.
    """

    fixed: int
    models: int
    stash: int
    working: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.fixed + self.models + self.stash + self.working


def memory_at(profile: Profile, setting: Setting) -> tuple[Needed, ...]:
    """Return the memory that each stage needs, shape ``(K,)``.

    ``F_k = context + reference + N model + N S_k A / M + N (Q + I) / M``, with S_k stashed micro-batches, and the
    activations A, transients Q and message buffers I of a full batch. With one parallel model there is no reference.
    All N pipelines may be at their peak at once. Rolling iterations need N + 1 further copies of the reference: the
    start values of each model, and the reference before the iteration.
    """
    n, m = setting.num_pipelines, setting.num_microbatches
    needed = []
    references = (1 + (n + 1) * setting.rolling) if profile.averages(n) else 0
    for stage, stashed in zip(profile.stages, setting.stash(profile.num_stages), strict=True):
        memory = stage.memory
        needed.append(
            Needed(
                fixed=memory.context + references * memory.reference,
                models=n * memory.model,
                stash=math.ceil(n * stashed * memory.activations / m),
                working=math.ceil(n * (memory.transient + memory.boundary) / m),
            )
        )
    return tuple(needed)
