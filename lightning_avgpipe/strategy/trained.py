"""What is trained must be the same on all processes, whoever froze the rest."""

from __future__ import annotations

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.errors import StepChangedError

_SHOWN = 3  # names in a message


def agree_on_trained(freezing: Freezing, processes: Collectives) -> None:
    """Check that all processes train the same parameters. Every process calls it.

    Raises:
        StepChangedError: they do not; names some of those on which they differ.
    """
    trained = processes.exchange_objects(freezing.trained)
    differing = sorted(frozenset.union(*trained) - frozenset.intersection(*trained))
    if not differing:
        return
    ranks = [rank for rank, names in enumerate(trained) if differing[0] in names]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise StepChangedError(
        f"{', '.join(map(repr, differing[:_SHOWN]))}{more}: requires_grad differs between processes, the first is "
        f"trained on rank {', '.join(map(str, ranks))} of {len(trained)} only. Freeze and unfreeze on every process: "
        "in a hook of a callback, not only if is_global_zero, and by what is the same everywhere"
    )
