"""The choice whether parallel pipelines roll: as was asked for, or wherever nothing stands against it."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.strategy.options import Options


def can_roll(
    running: pl.Trainer, given: Options, cluster: Cluster, num_stages: int, num_groups: int, tuned: bool
) -> bool:
    """Whether pipelines of this run can roll, as far as that is known before its first batch. Every process calls it.

    Args:
        running: the trainer.
        given: options of the strategy.
        cluster: of the processes.
        num_stages: K.
        num_groups: of processes.
        tuned: whether a tuner chooses N.
    Raises:
        ConfigurationError: batches are to overlap in one way or another, and cannot.
    """
    if given.rolling != "auto":
        checks.overlapping(running, given, num_stages, num_groups, tuned)
        return given.rolling
    checks.overlapping(running, replace(given, rolling=False), num_stages, num_groups, tuned)
    found = ""
    try:
        # there is one pipeline now, maybe, but there may be several later
        wanted = replace(given, rolling=True, num_pipelines=max(2, given.num_pipelines))
        checks.overlapping(running, wanted, num_stages, num_groups, tuned)
    except ConfigurationError as error:
        found = str(error)
    return not gives_way(found, cluster)


def gives_way(found: str, cluster: Cluster) -> bool:
    """Tell why pipelines do not roll with ``rolling="auto"``, if they do not. Every process calls it.

    Args:
        found: what stands against it in this process; nothing: "".
        cluster: of the processes, which do the same.
    """
    why = next(filter(None, cluster.world.exchange_objects(found)), "")
    if why:
        tell(why)
    return bool(why)


def tell(why: str) -> None:
    """Say it on rank 0."""
    rank_zero_info(f"rolling='auto': pipelines do not roll: {why}")
