"""Dataloaders of a pipeline: rank 0 reads, the other processes are told when there is a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.types import _Stateful

from lightning_avgpipe.runtime.mesh import Mesh

__all__ = ["mirror"]


def mirror(dataloader: Any, mesh: Mesh) -> Any:
    """What a process iterates over in place of its dataloader.

    Random order, collation and augmentation happen once, so inputs and labels agree on all stages, and an iterable
    dataset may end where it wants. Batches themselves travel after the batch transfer hooks.
    """
    if mesh.world_size == 1:
        return dataloader
    try:
        length: int | None = len(dataloader)
    except (TypeError, NotImplementedError):  # an iterable dataset without a length
        length = None
    length, resumable = mesh.broadcast((length, isinstance(dataloader, _Stateful)))
    if mesh.rank == 0:
        mirrored = _SizedReader(dataloader, mesh) if length is not None else _Reader(dataloader, mesh)
        if resumable:
            # as attributes of its own: Python 3.12 does not ask __getattr__ whether an object follows a protocol
            vars(mirrored).update(state_dict=dataloader.state_dict, load_state_dict=dataloader.load_state_dict)
        return mirrored
    follower = _SizedFollower(mesh, length) if length is not None else _Follower(mesh)
    if resumable:  # Lightning compares the number of such loaders with that in the checkpoint, on every rank
        vars(follower).update(state_dict=dict, load_state_dict=_ignore)
    return follower


def _ignore(state: Any) -> None:
    """What rank 0's loader resumes from means nothing to those who follow it."""


class _Reader:
    """Rank 0's dataloader; announces each batch, and the end. Everything else is the dataloader's."""

    def __init__(self, dataloader: Any, mesh: Mesh) -> None:
        vars(self)["_dataloader"] = dataloader
        vars(self)["_mesh"] = mesh

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataloader:
            self._mesh.publish(True)
            yield batch
        self._mesh.publish(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_dataloader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataloader, name, value)


class _SizedReader(_Reader):
    def __len__(self) -> int:
        return len(self._dataloader)


class _Follower:
    """What other processes iterate over: a None for each of rank 0's batches."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __iter__(self) -> Iterator[None]:
        while self._mesh.publish():
            yield None


class _SizedFollower(_Follower):
    def __init__(self, mesh: Mesh, length: int) -> None:
        super().__init__(mesh)
        self._length = length

    def __len__(self) -> int:
        return self._length
