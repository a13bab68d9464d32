"""Schedules of two stages on each process, placed there and back: the process of the first stage has the last one too.

::

    D = 3 processes     0: stages 0, 5     1: stages 1, 4     2: stages 2, 3

The first backward comes where the last forward went, so that every process stashes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.greedy import greedy
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Kind

__all__ = ["dualpipev", "zbv"]


def zbv(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """ZB-V: with equal forwards and halves no process is idle between its first action and its last.

    Input gradients go first, then forwards while fewer than K micro-batches are stashed on both stages of a process,
    which is what 1F1B stashes on its first; the last place is left to the stage on the way back. Weight gradients fill
    the rest. The order is found by playing it with equal times.

    Source: Pipeline Parallelism with Controllable Memory, Qi et al., arXiv:2405.15362, and Zero Bubble Pipeline
        Parallelism, Qi et al., ICLR 2024, section 6.
    """
    devices = (*range(num_devices), *reversed(range(num_devices)))

    def prefers(stage: int, action: Action, stashed: int) -> Sequence[float] | None:
        back = stage >= num_devices
        if action.kind is INPUT_GRADIENT:
            return 0, not back, action.micro_batch
        if action.kind is FORWARD:
            return (1, not back, action.micro_batch) if stashed < num_stages - (not back) else None
        return 2 if stashed < num_stages else 0.5, action.micro_batch

    kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    return greedy("zbv", num_microbatches, devices, kinds, prefers, dict.fromkeys(KINDS, 1))


def dualpipev(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """DualPipeV: a forward of one stage of a process beside a backward of the other, in pairs.

    Where nothing overlaps within a pair, as here, it is idle a little; at the ends of an iteration backwards come in
    halves. With fewer than K micro-batches there are no pairs: then it is ZB-V.

    Source: DeepSeek-V3, arXiv:2412.19437 (DualPipe), cut in half as Sea AI Lab proposed.
    """
    if num_microbatches < num_stages:
        rows = zbv(num_stages, num_microbatches, num_devices)
        return Schedule("dualpipev", num_stages, num_microbatches, rows.rows, turns=rows.turns)
    return Schedule.of_orders(
        "dualpipev", num_microbatches, [_pairs(d, num_microbatches, num_devices) for d in range(num_devices)]
    )


def _pairs(device: int, num_microbatches: int, num_devices: int) -> list[tuple[int, Action]]:
    """The order of a process: its stages are ``there`` and ``back``."""
    there, back, after = device, 2 * num_devices - 1 - device, num_devices - 1 - device
    order: list[tuple[int, Action]] = []
    done: Counter[tuple[int, Kind]] = Counter()

    def add(times: int, *places: tuple[int, Kind]) -> None:
        for _ in range(times):
            for stage, kind in places:
                of = (stage, INPUT_GRADIENT if kind is BACKWARD else kind)  # either way the gradient has come
                order.append((stage, Action(kind, done[of])))
                done[of] += 1
                if kind is BACKWARD:
                    done[stage, WEIGHT_GRADIENT] += 1

    add(2 * after, (there, FORWARD))
    add(device + 1, (there, FORWARD), (back, FORWARD))
    add(after, (back, INPUT_GRADIENT), (back, WEIGHT_GRADIENT), (back, FORWARD))
    middle = num_microbatches - 2 * num_devices + device + 1
    add(middle, (there, FORWARD), (back, BACKWARD), (back, FORWARD), (there, BACKWARD))
    add(after, (back, BACKWARD), (back, FORWARD), (there, BACKWARD))
    pairs = device + 1
    add(pairs - pairs // 2, (back, BACKWARD), (there, BACKWARD))
    add(pairs // 2, (back, INPUT_GRADIENT), (there, INPUT_GRADIENT))
    left = {s: num_microbatches - done[s, INPUT_GRADIENT] for s in (there, back)}
    while any(left.values()) or any(done[s, WEIGHT_GRADIENT] < num_microbatches for s in (there, back)):
        for stage in (back, there):
            if done[stage, WEIGHT_GRADIENT] < done[stage, INPUT_GRADIENT]:
                add(1, (stage, WEIGHT_GRADIENT))
                break
        if left[there]:
            add(1, (there, INPUT_GRADIENT))
            left[there] -= 1
        elif left[back]:
            add(1, (back, INPUT_GRADIENT))
            left[back] -= 1
    return order
