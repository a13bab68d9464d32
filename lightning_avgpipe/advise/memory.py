"""A table of the memory of stages, as planned for several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.utils.names import table

SCHEDULE = "1f1b"
"""The schedule for which memory is predicted. Advance forward propagation needs as much, plus what an advance adds."""


def memory_table(plans: Sequence[Plan], num_microbatches: int, samples: int, models: int) -> str:
    """Return a table with the memory of each stage.

    Args:
        plans: plans for several numbers of stages, one on each device.
        num_microbatches: M, number of micro-batches of a batch.
        samples: number of samples of a micro-batch.
        models: N, number of parallel models.
    """
    rows = [("devices", "stage", "units", "weights, gradients, states", "activations", "together")]
    for plan in plans:
        for stage in plan.stages:
            need = stage.memory
            rows.append((
                str(plan.num_stages) if not stage.index else "", str(stage.index), stage.span, nbytes(need.persistent),
                nbytes(need.stash + need.boundary), nbytes(need.total),
            ))  # fmt: skip
    several = f" of each of {models} models" if models > 1 else ""
    size = f"{samples} sample" + "s" * (samples > 1)
    return "\n".join((
        f"memory of each device, for {num_microbatches} micro-batches of {size}{several} (1F1B):",
        *table(rows),
        "A device also needs what one operation or one recomputed layer takes for a moment, and what its driver takes.",
    ))  # fmt: skip
