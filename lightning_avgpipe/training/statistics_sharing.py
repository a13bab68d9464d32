"""Statistics sharing: batch normalisation over all replicas of a stage, for ``Trainer(sync_batchnorm=True)``."""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.topology import StageMap, all_parties
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.engine.shared_statistics import SharedStatistics
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import Schedule, in_turn

_WHAT = "batch normalisation"


class StatisticsSharing:
    """A provider of observers that share statistics of batch normalisation among replicas.

    Args:
        cluster: cluster with open channels, one stage on each process.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connected: StageMap | None = None
        self._observers: list[Observer] = []
        self._checked: set[tuple[str, int]] = set()

    def observers(self, schedule: Schedule) -> list[Observer]:
        """Return the observers of an iteration of training. Every process calls it.

        Raises:
            ConfigurationError: replicas have different numbers of micro-batches, or would wait for each other forever.
        """
        stage_map = self._cluster.stage_map
        if self._connected != stage_map:
            replicas = [replace(p, what=_WHAT) for p in all_parties(stage_map) if p.what == "replicas"]
            members = self._cluster.connect(replicas, f"for {_WHAT}")
            self._observers = [] if members is None else [SharedStatistics(members, stage_map.shares_devices)]
            self._connected = stage_map
            self._checked.clear()
        self._check(schedule, stage_map)
        return self._observers

    def _check(self, schedule: Schedule, stage_map: StageMap) -> None:
        number = schedule.num_microbatches
        key = schedule.name, number
        if stage_map.stage_replicas and key not in self._checked:
            counts = stage_map.stage_replicas
            if any(number % count for count in counts):
                raise ConfigurationError(
                    f"sync_batchnorm=True normalises over the micro-batches that replicas={list(counts)} have at the "
                    f"same time, and {number} micro-batches do not divide by these; use another num_microbatches, and "
                    "drop_last=True where the last batch of an epoch has fewer"
                )
            if not meets(schedule, counts):
                raise ConfigurationError(
                    f"sync_batchnorm=True with replicas={list(counts)}: in the schedule {schedule.name!r} replicas "
                    "would wait for each other for ever, as stages do not divide micro-batches alike; use "
                    "schedule='afab', or as many replicas of each stage"
                )
            self._checked.add(key)
        if stage_map.replicas > 1:
            assert self._cluster.replicas is not None
            numbers = self._cluster.replicas.members.exchange_objects(number)
            if len(set(numbers)) > 1:
                raise ConfigurationError(
                    f"sync_batchnorm=True normalises over the micro-batches that replicas have at the same time, and "
                    f"the batches of the replicas were split into {', '.join(map(str, numbers))} micro-batches; let "
                    "their data loaders give batches of equal size (drop_last=True)"
                )


def meets(schedule: Schedule, counts: tuple[int, ...]) -> bool:
    """Return whether all actions can run if those of the replicas of a stage begin and end together.

    Args:
        schedule: schedule with rows of all stages, and a number of micro-batches that is a multiple of each count.
        counts: number of replicas of each stage, which take micro-batches in turns.
    """
    rows = [list(in_turn(row, 0, count)) for row, count in zip(schedule.rows, counts, strict=True)]
    done: set[tuple[str, int, int]] = set()  # forward or gradient, stage, micro-batch
    last, moved = len(rows) - 1, True
    while moved:
        moved = False
        for k, row in enumerate(rows):
            while row:
                kind = row[0].kind
                together = range(row[0].micro_batch, row[0].micro_batch + counts[k])
                before = {"forward": k - 1, "backward": k + 1}.get(kind.consumes or "", -1)
                if 0 <= before <= last and not all((kind.consumes, before, i) in done for i in together):
                    break
                done |= {(kind.produces or "", k, i) for i in together}
                row.pop(0)
                moved = True
    return not any(rows)
