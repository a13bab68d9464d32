"""Predictors: from a profile, how long an iteration takes at any setting and what it needs in memory.

Three with one interface: ``Paper`` is what AvgPipe's paper prints, kept for comparison; ``Corrected`` is a closed form
without its slips; ``Simulator`` plays the iteration through. Memory is predicted alike by all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_avgpipe.tuning.bound import least_s
from lightning_avgpipe.tuning.memory import memory_at
from lightning_avgpipe.tuning.profile import Profile
from lightning_avgpipe.tuning.scaling import Load, Loads, loads_at
from lightning_avgpipe.tuning.setting import Setting
from lightning_avgpipe.tuning.steady import rolling_iteration_s, steady_iteration_s


@dataclass(frozen=True)
class Prediction:
    """What is expected of a setting.

    Attributes:
        iteration_s: seconds of an iteration: a batch of each pipeline, optimizer steps, averaging.
        per_batch_s: the same per batch, which is to be short.
        memory: bytes of each stage at its peak, shape ``(K,)``.
        at_least: whether the times are only a lower bound of what the predictor would say.
    """

    iteration_s: float
    per_batch_s: float
    memory: tuple[int, ...]
    at_least: bool = False


class Predictor(Protocol):
    """Anything that predicts."""

    @property
    def name(self) -> str:
        """For people and files."""
        ...

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        ...

    def bounds(self, profile: Profile, settings: Sequence[Setting]) -> list[Prediction]:
        """Quickly, for each setting: what ``predict`` returns, or with ``at_least`` times that it does not undercut."""
        return [self.predict(profile, setting) for setting in settings]


@dataclass(frozen=True)
class Paper(Predictor):
    """Equations 2, 4, 6 and 7 of the paper as they are printed.

    What is wrong with them: the computation of equation 2 is that of one batch, the communication of equation 4 that of
    an iteration with its N batches, and both are added; the schedule plays no part, forwards and backwards are one; so
    are both directions of a link; the time of a link includes the latency of every message, though latencies overlap;
    the end of an iteration is left out. As a batch is what equation 2 counts, the sum is taken for the time per batch.

    Args:
        growing: whether communication per batch grows with N, as printed; it does not, so that False is one slip less.
    Source: Chen et al., AvgPipe, PPoPP 2023, section 5.
    """

    growing: bool = True

    @property
    def name(self) -> str:
        """For people and files."""
        return "paper" if self.growing else "paper, communication per batch"

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile; the slowest stage counts."""
        m, n = setting.num_microbatches, setting.num_pipelines
        compute = [_printed_compute_s(profile, k, m, n) for k in range(profile.num_stages)]
        growth = n / profile.num_pipelines if self.growing else 1.0
        messages = [growth * _printed_communication_s(profile, k) for k in range(profile.num_stages)]
        up = _summed([(g + c) / m for g, c in zip(compute, messages, strict=True)])
        down = _summed([(g + c) / m for g, c in zip(reversed(compute), reversed(messages), strict=True)])[::-1]
        exposed = [c / m + (m - 1) / m * max(c - g, 0.0) for g, c in zip(compute, messages, strict=True)]
        per_batch_s = max(map(sum, zip(compute, exposed, up, down, strict=True)))
        return _prediction(profile, setting, n * per_batch_s)


def _printed_compute_s(profile: Profile, stage: int, m: int, n: int) -> float:
    """Equation 2: per batch, with both directions one curve."""
    demand = profile.num_microbatches * n / (m * profile.num_pipelines)
    found = profile.stages[stage]
    total = found.forward.total_s + found.backward.total_s
    beyond = found.forward.stretched_s(demand) + found.backward.stretched_s(demand) - total
    return profile.num_microbatches / demand * (total + beyond)


def _printed_communication_s(profile: Profile, stage: int) -> float:
    """What a stage sends in an iteration of the profile."""
    seconds = 0.0
    if stage < profile.num_stages - 1:
        hop = profile.hops[stage]
        seconds += hop.forward_bytes * hop.forward.per_byte + hop.forward.latency
    if stage > 0:
        hop = profile.hops[stage - 1]
        seconds += hop.backward_bytes * hop.backward.per_byte + hop.backward.latency
    return profile.num_microbatches * profile.num_pipelines * seconds


def _summed(seconds: Sequence[float]) -> list[float]:
    """What lies before each entry."""
    return list(itertools.accumulate(seconds, initial=0.0))[:-1]


@dataclass(frozen=True)
class Corrected(Predictor):
    """A closed form: the first micro-batch's way through the pipeline, and what the tightest resource adds to it.

    The way there and back is the sum of its actions and messages. On devices that serve lanes side by side the first
    micro-batches of all N pipelines go together; every link draws them apart by the time of a message, so that they
    disturb each other less on the stage behind it. Then, with AFAB, in each direction the slowest stage adds its other
    micro-batches, or the slowest link its other messages. With a warm-up w, forwards and backwards are one phase, and
    besides stages and links every round trip between two stages j < k may be the tightest: ``w_j - w_k + 1``
    micro-batches make it at once. With sufficient advance none matters. Rolling iterations take as long as one pipeline
    alone, or as the tightest device or link needs for all N; the simulator has up to a sixth more where a device is
    just about full.
    """

    name: str = "corrected"

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        if setting.rolling:
            return _prediction(profile, setting, _rolling_s(profile, setting, self))
        loads, m, n = loads_at(profile, setting), setting.num_microbatches, setting.num_pipelines
        there = _first_s(profile, loads.forward, (0.0, *loads.values_s), n)
        back = _first_s(profile, loads.backward, (*loads.gradients_s, 0.0), n)
        base = sum(there) + sum(back)
        base += sum(loads.values_s) + sum(loads.gradients_s) + sum(map(sum, loads.latency_s))
        forward, backward = (loads.forward, there), (loads.backward, back)
        if setting.schedule == "afab":
            extra = sum(
                max(_work_beyond_s(profile, setting, [phase]), (n * m - 1) * max(messages, default=0.0))
                for phase, messages in ((forward, loads.values_s), (backward, loads.gradients_s))
            )
        else:
            extra = max(
                _work_beyond_s(profile, setting, [forward, backward]),
                (n * m - 1) * max((*loads.values_s, *loads.gradients_s), default=0.0),
                _trips_beyond_s(loads, m, setting.warm_up(profile.num_stages)),
            )
        return _prediction(profile, setting, base + extra + loads.update_s)


def _first_s(profile: Profile, loads: Sequence[Load], gaps: Sequence[float], num_pipelines: int) -> list[float]:
    """Seconds of the first micro-batch on each stage, with those of the other pipelines ``gaps`` behind each other."""
    if profile.device.in_turns:
        return [load.alone_s for load in loads]
    return [max(load.alone_s, load.shared_s - (num_pipelines - 1) * gap) for load, gap in zip(loads, gaps, strict=True)]


def _work_beyond_s(
    profile: Profile, setting: Setting, phase: Sequence[tuple[Sequence[Load], Sequence[float]]]
) -> float:
    """What the slowest stage or device does in a phase, besides the first micro-batch.

    Args:
        phase: loads of each stage, with the seconds of the first micro-batch, in one or both directions.
    """
    m, n = setting.num_microbatches, setting.num_pipelines
    per_device: dict[int, float] = {}
    longest = 0.0
    for k, device in enumerate(profile.devices):
        first = sum(firsts[k] for _, firsts in phase)
        longest = max(longest, m * sum(loads[k].shared_s for loads, _ in phase) - first)
        work = n * m * sum(loads[k].work_s for loads, _ in phase)
        per_device[device] = per_device.get(device, 0.0) + work - first
    return max(longest, *per_device.values())


def _trips_beyond_s(loads: Loads, num_microbatches: int, warm_up: Sequence[int]) -> float:
    """What the slowest round trip between two stages takes besides its first."""
    longest = 0.0
    for j, k in itertools.combinations(range(len(warm_up)), 2):
        trip = sum(load.alone_s for load in (*loads.forward[j : k + 1], *loads.backward[j : k + 1]))
        trip += sum(loads.values_s[j:k]) + sum(loads.gradients_s[j:k]) + sum(map(sum, loads.latency_s[j:k]))
        # before the first trip and after the last one, stage k does its warm-up and as many backwards
        aside = warm_up[k] * (loads.forward[k].alone_s + loads.backward[k].alone_s)
        trips = (num_microbatches - 1 - warm_up[k]) // (warm_up[j] - warm_up[k] + 1)
        longest = max(longest, aside + trips * trip)
    return longest


@dataclass(frozen=True)
class Simulator:
    """Plays every action and message of an iteration through, see ``steady``. Slower, and the most faithful."""

    name: str = "simulator"

    def predict(self, profile: Profile, setting: Setting) -> Prediction:
        """Predict a setting from a profile."""
        loads = loads_at(profile, setting)
        if setting.rolling:
            roll_s = rolling_iteration_s(setting, profile.num_stages, loads, profile.devices, profile.device.in_turns)
            return _prediction(profile, setting, max(roll_s + profile.tied_s, _rolling_s(profile, setting, self)))
        seconds = steady_iteration_s(setting, profile.num_stages, loads, profile.devices, profile.device.in_turns)
        return _prediction(profile, setting, seconds + loads.update_s)

    def bounds(self, profile: Profile, settings: Sequence[Setting]) -> list[Prediction]:
        """Work and links bound from below, and so does one pipeline that has a device for each stage."""
        alone: dict[tuple[int, tuple[int, ...]], float] = {}  # by M and warm-up
        stages = range(profile.num_stages)
        found = []
        for setting in settings:
            loads, key = loads_at(profile, setting), (setting.num_microbatches, setting.warm_up(len(stages)))
            if setting.rolling:
                found.append(_prediction(profile, setting, _rolling_s(profile, setting, self), at_least=True))
                continue
            if key not in alone:
                one = dataclasses.replace(setting, num_pipelines=1)
                alone[key] = steady_iteration_s(one, len(stages), loads, stages, profile.device.in_turns)
            seconds = max(alone[key], least_s(setting.num_microbatches, setting.num_pipelines, loads, profile.devices))
            exact = setting.num_pipelines == 1 and len(set(profile.devices)) == len(stages)
            found.append(_prediction(profile, setting, seconds + loads.update_s, at_least=not exact))
        return found


def _rolling_s(profile: Profile, setting: Setting, predictor: Predictor) -> float:
    """Where no pipeline waits for another: what one takes, or what a device or a link does for all of them.

    A process does nothing else while it sums gradients of tied parameters.
    """
    one = dataclasses.replace(setting, num_pipelines=1, rolling=False)
    loads, m, n = loads_at(profile, setting), setting.num_microbatches, setting.num_pipelines
    per_device: dict[int, float] = {}
    for device, stage, forward, backward in zip(
        profile.devices, profile.stages, loads.forward, loads.backward, strict=True
    ):
        work_s = m * (forward.work_s + backward.work_s) + stage.step_s + stage.averaging_s
        per_device[device] = per_device.get(device, 0.0) + n * work_s
    alone_s = predictor.predict(profile, one).iteration_s + max(stage.averaging_s for stage in profile.stages)
    busy_s = max(per_device.values()) + n * profile.tied_s
    return max(alone_s, busy_s, n * m * max((*loads.values_s, *loads.gradients_s), default=0.0))


def _prediction(profile: Profile, setting: Setting, seconds: float, at_least: bool = False) -> Prediction:
    memory = tuple(needed.total for needed in memory_at(profile, setting))
    return Prediction(seconds, seconds / setting.num_pipelines, memory, at_least)


PREDICTORS: dict[str, Predictor] = {
    predictor.name: predictor for predictor in (Paper(), Paper(growing=False), Corrected(), Simulator())
}
