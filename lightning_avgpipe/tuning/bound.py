"""A lower bound of what the simulation of several pipelines finds, at a fraction of its cost."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_avgpipe.tuning.scaling import Loads


def least_s(num_microbatches: int, num_pipelines: int, loads: Loads, devices: Sequence[int]) -> float:
    """No order of actions takes less: one micro-batch's way through the pipeline, and work that nothing else replaces.

    ::

        stage 0 | F_                      B_
        stage 1 |    F_                B_           a device waits for its first value, does the work of all pipelines,
        stage 2 |       F_ N M (f+b) B_             and its last gradient travels home; links likewise

    Args:
        num_microbatches: M.
        num_pipelines: N.
        loads: of one micro-batch on each stage and hop.
        devices: of each stage, shape ``(K,)``.
    """
    count, before = num_microbatches * num_pipelines, 0.0  # the way to stage k and back
    work: dict[int, float] = {}
    for k, (f, b, device) in enumerate(zip(loads.forward, loads.backward, devices, strict=True)):
        work[device] = work.get(device, before) + count * (f.work_s + b.work_s)
        before += f.alone_s + b.alone_s
        if k < len(loads.latency_s):
            before += loads.values_s[k] + loads.gradients_s[k] + sum(loads.latency_s[k])
    messages = max((*loads.values_s, *loads.gradients_s), default=0.0)
    return max(*work.values(), before + (count - 1) * messages)
