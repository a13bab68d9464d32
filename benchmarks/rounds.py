"""Rounds, in which all that is compared takes turns; and an iteration of which everything is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.engine.recording import Recorder, assemble
from lightning_avgpipe.schedule import Timeline

__all__ = ["in_turns", "record"]

Side = TypeVar("Side")


def in_turns(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """All sides in each round, another one first every time: what disturbs the machine disturbs all sides alike."""
    for i in range(rounds):
        first = i % len(sides)
        yield from (*sides[first:], *sides[:first])


def record(mesh: Mesh, iterate: Callable[[], object]) -> Timeline | None:
    """One iteration; on rank 0 what happened in it. Every rank calls it."""
    recorder = Recorder(mesh.rank, mesh.device)
    mesh.record(recorder)
    mesh.barrier()
    iterate()
    mesh.record(None)
    recordings = mesh.gather_objects(recorder.finish(mesh.clock(), mesh.timeout.total_seconds()))
    return None if mesh.rank else assemble(recordings, [mesh.rank_of(k) for k in range(mesh.num_stages)])
