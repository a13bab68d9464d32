"""Rounds, in which all that is compared takes turns; and an iteration of which everything is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.probe import offset_in
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.recording import Recorder, assemble
from lightning_avgpipe.schedule import Timeline

__all__ = ["in_turns", "record", "timeline_of"]

Side = TypeVar("Side")


def in_turns(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """All sides in each round, another one first every time: what disturbs the machine disturbs all sides alike."""
    for i in range(rounds):
        first = i % len(sides)
        yield from (*sides[first:], *sides[:first])


def record(cluster: Cluster, observers: Observers, iterate: Callable[[], object]) -> Timeline | None:
    """One iteration that these see; on rank 0 what happened in it. Every rank calls it."""
    recorder = Recorder(cluster.rank, cluster.device)
    cluster.group.barrier()
    with observers.having(recorder):
        iterate()
    return timeline_of(cluster, recorder)


def timeline_of(cluster: Cluster, recorder: Recorder) -> Timeline | None:
    """What all ranks recorded, on rank 0. Every rank calls it."""
    recordings = cluster.group.gather_objects(recorder.finish(offset_in(cluster.group), cluster.waits.timeout_s))
    stages = range(cluster.stage_map.num_stages)
    return None if cluster.rank else assemble(recordings, [cluster.stage_map.ranks(k) for k in stages])
