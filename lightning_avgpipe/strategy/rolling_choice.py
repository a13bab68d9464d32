"""The choice whether parallel pipelines roll: as asked for, or with "auto" wherever nothing stands against it."""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.utils.lightning import pl, rank_zero_info


def can_roll(
    running: pl.Trainer, given: Options, cluster: Cluster, num_stages: int, num_groups: int, tuned: bool
) -> bool:
    """Return whether pipelines of this run can roll, as far as that is known before the first batch.

    Every process calls it.

    Args:
        running: the trainer.
        given: options of the strategy.
        cluster: the connected processes.
        num_stages: K.
        num_groups: number of groups of processes.
        tuned: whether a tuner chooses N.
    Raises:
        ConfigurationError: batches are to overlap by some option, and cannot.
    """
    replicas, rolling = cluster.stage_map.replicas, given.averaging.rolling
    if rolling != "auto":
        checks.overlapping(running, given, num_stages, num_groups, replicas, tuned)
        return rolling
    checks.overlapping(running, given.rolling_as(False), num_stages, num_groups, replicas, tuned)
    found = ""
    try:
        # even if there is one pipeline now, there may be several later
        wanted = replace(given.rolling_as(True), num_pipelines=max(2, given.num_pipelines))
        checks.overlapping(running, wanted, num_stages, num_groups, replicas, tuned)
    except ConfigurationError as error:
        found = str(error)
    return not gives_way(found, cluster)


def gives_way(found: str, cluster: Cluster) -> bool:
    """Return whether pipelines do not roll with ``Averaging(rolling="auto")``, and log why. Every process calls it.

    Args:
        found: reason against rolling in this process; empty: there is none.
        cluster: the connected processes.
    """
    why = next(filter(None, cluster.world.exchange_objects(found)), "")
    if why:
        tell(why)
    return bool(why)


def tell(why: str) -> None:
    """Log on rank 0 why pipelines do not roll."""
    rank_zero_info(f"Averaging(rolling='auto'): pipelines do not roll: {why}")
