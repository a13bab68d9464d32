"""The traffic between groups of processes, for the plan's report: bytes, and how long a step waits for them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.capture.wire_format import compressed_bytes, is_compressed
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.probe import measure_bandwidth
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.plan import format_seconds, nbytes
from lightning_avgpipe.utils.device import port_of


def traffic_lines(plan: Plan, module: nn.Module, cluster: Cluster, averaging: Averaging) -> list[str]:
    """Return lines that say what each stage exchanges with other groups; none for one group. Every process calls it.

    If the plan was measured, the links between the groups' hosts are measured as well, unless groups exchange tensors
    directly between devices.
    """
    group = cluster.averaging_group
    if group is None:
        return []
    found = [exchanged_bytes(module, stage.parameters, averaging, group.count) for stage in plan.stages]
    pauses = averaging.every / averaging.fragments
    part = "all" if averaging.fragments == 1 else f"1/{averaging.fragments} of it"
    sizes = ", ".join(f"{nbytes(found[stage.index])} of stage {stage.index}" for stage in plan.stages)
    line = f"groups exchange {sizes} in {averaging.every} step{'s' * (averaging.every > 1)}"
    line += f" ({part} every {pauses:g})" if averaging.every > 1 else ""
    line += f", as {averaging.wire}" if averaging.wire else ""
    over_hosts = group.on_host or port_of(cluster.device).is_host
    if not plan.measured or plan.forecast is None or not over_hosts:
        return [line]
    slowest = min(speed for row in measure_bandwidth(group.members) for speed in row)
    speeds = cluster.group.exchange_objects(slowest)
    step_s = plan.forecast.iteration_s
    link_s = max(
        found[k] / averaging.fragments / speeds[rank]
        for k in range(plan.num_stages)
        for rank in cluster.stage_map.ranks(k)
    )
    waits_s = max(0.0, link_s - averaging.delay * step_s) / pauses
    idle = 1 - (1 - plan.forecast.bubble) * step_s / (step_s + waits_s) if step_s + waits_s else 0.0
    return [
        line,
        f"each time {format_seconds(link_s)} on the link between groups, behind {averaging.delay} steps: a step waits "
        f"for {format_seconds(waits_s)} on average, {idle:.0%} idle with that",
    ]


def exchanged_bytes(module: nn.Module, names: Collection[str], averaging: Averaging, count: int) -> int:
    """Return how many bytes a process sends, and receives, to average parameters once.

    Args:
        module: module that has the parameters.
        names: names of the parameters; those that are not trained do not count.
        averaging: options of the averaging.
        count: number of groups, G. An exact sum takes 2 (G - 1) / G times the parameters, in at least single precision.
    """
    total = 0
    for parameter in (p for name, p in module.named_parameters() if name in names and p.requires_grad):
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        size = parameter.numel() * dtype.itemsize
        if averaging.wire is None:
            total += size * 2 * (count - 1) // count
        elif is_compressed(parameter.shape, str(dtype), averaging.wire):
            total += compressed_bytes(parameter.shape, averaging.wire) * (count - 1)
        else:
            total += size * (count - 1)
    return total
