"""Scaling of a profile: times of actions and messages, and memory, at a setting other than the profiled one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_avgpipe.schedule import BACKWARD, FORWARD, Kind, StageCosts
from lightning_avgpipe.schedule.costs import Pieces
from lightning_avgpipe.tuning.profile import Curve, Profile, Setting, StageProfile


@dataclass(frozen=True)
class Loads(StageCosts):
    """The times of all actions and messages at a number of micro-batches, on devices that may serve lanes side by side.

    Attributes:
        curves: utilisation of the device by an action of each stage while no other lane runs, shape ``(K,)``.
    """

    curves: Mapping[Kind, Sequence[Curve]] = field(default_factory=dict)

    def pieces(self, kind: Kind, stage: int, replica: int = 0) -> Pieces:
        """Return the parts of an action: seconds and utilisation."""
        curve = self.curves[kind][stage]
        return tuple(zip(curve.seconds, curve.utilisation, strict=True))

    def work_s(self, stage: int) -> float:
        """Return the seconds of a fully used device that a forward and a backward of a stage take."""
        return self.curves[FORWARD][stage].work_s + self.curves[BACKWARD][stage].work_s

    @property
    def longest_send_s(self) -> float:
        """The seconds for which the slowest message of a micro-batch occupies its link."""
        return max((*self.send_forward_s, *self.send_backward_s), default=0.0)


def loads_at(profile: Profile, num_microbatches: int) -> Loads:
    """Scale a profile, which was measured with m micro-batches of a batch, to M = ``num_microbatches`` of them.

    A micro-batch m/M times as large has m/M times the utilisation, and takes longer only where this exceeds 1. Its
    messages have m/M times the bytes.
    """
    size = profile.num_microbatches / num_microbatches
    forward = [_scaled(profile, num_microbatches, stage, "forward") for stage in profile.stages]
    backward = [_scaled(profile, num_microbatches, stage, "backward") for stage in profile.stages]
    return Loads(
        [curve.total_s for curve in forward],
        [curve.total_s for curve in backward],
        [size * hop.forward_bytes * hop.link.per_byte for hop in profile.hops],
        [size * hop.backward_bytes * hop.link.per_byte for hop in profile.hops],
        [hop.link.latency for hop in profile.hops],
        curves={FORWARD: forward, BACKWARD: backward},
    )


def _scaled(profile: Profile, num_microbatches: int, stage: StageProfile, direction: str) -> Curve:
    curve: Curve = getattr(stage, direction)
    scaled = curve.stretched(profile.num_microbatches / num_microbatches)
    factor = _correction(profile, stage, direction, num_microbatches)
    if profile.in_turns:  # nothing else runs meanwhile
        return Curve.constant(factor * scaled.total_s, 1.0)
    return Curve(tuple(factor * s for s in scaled.seconds), scaled.utilisation)


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

    ``F_k = context + reference + N model + N S_k A / P + N (Q + I) / P``, with S_k stashed micro-batches, of which a
    batch has P, and the activations A, transients Q and message buffers I of a full batch. With one parallel model
    there is no reference.
    All N pipelines may be at their peak at once. Rolling iterations need N + 1 further copies of the reference: the
    start values of each model, and the reference before the iteration.
    """
    n, parts = setting.num_pipelines, setting.parts
    needed = []
    references = (1 + (n + 1) * setting.rolling) if profile.averages(n) else 0
    for stage, stashed in zip(profile.stages, setting.stash(profile.num_stages), strict=True):
        memory = stage.memory
        needed.append(
            Needed(
                fixed=memory.context + references * memory.reference,
                models=n * memory.model,
                stash=math.ceil(n * stashed * memory.activations / parts),
                working=math.ceil(n * (memory.transient + memory.boundary) / parts),
            )
        )
    return tuple(needed)
