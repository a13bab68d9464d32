"""A lower bound for the simulated time of several pipelines, which is much cheaper than the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_avgpipe.tuning.scaling import Loads


def least_s(num_microbatches: int, num_pipelines: int, loads: Loads, devices: Sequence[int]) -> float:
    """Return a lower bound for the seconds of an iteration with any order of actions.

    ::

        stage 0 | F_                      B_
        stage 1 |    F_                B_           a device waits for its first value, does the work of all pipelines,
        stage 2 |       F_ N M (f+b) B_             and its last gradient travels back; likewise for links

    Args:
        num_microbatches: M, number of micro-batches of a batch.
        num_pipelines: N, number of parallel pipelines.
        loads: times of one micro-batch on each stage and hop.
        devices: device of each stage, shape ``(K,)``.
    """
    count, before = num_microbatches * num_pipelines, 0.0  # before: to stage k and back
    work: dict[int, float] = {}
    for k, (f, b, device) in enumerate(zip(loads.forward, loads.backward, devices, strict=True)):
        work[device] = work.get(device, before) + count * (f.work_s + b.work_s)
        before += f.alone_s + b.alone_s
        if k < len(loads.latency_s):
            before += loads.values_s[k] + loads.gradients_s[k] + sum(loads.latency_s[k])
    messages = max((*loads.values_s, *loads.gradients_s), default=0.0)
    return max(*work.values(), before + (count - 1) * messages)
