"""Stores: the parts of the store that all processes share, so that what one run writes is not read by another."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from lightning_avgpipe.utils.torch_compat import default_store


class Stores:
    """Gives parts of a store; None stands for that of torch.distributed.

    Args:
        number: of the network in this process, the same in all.
        runs: numbers of the runs of this process, the same in all.
    """

    def __init__(self, number: int, runs: Iterator[int]) -> None:
        self._number = number
        self._runs = runs
        self._run = 0
        self._meetings: dist.Store | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first network of this process, in its first run."""
        return self._number == self._run == 0

    def next_run(self, store: dist.Store | None) -> dist.Store:
        """What the next run has of a store."""
        self._run = next(self._runs)
        return self.run(store)

    def run(self, store: dist.Store | None) -> dist.Store:
        """The same for the run that goes on."""
        return part_of(store, f"runs/{self._run}")

    def lasting(self, store: dist.Store | None) -> dist.Store:
        """What all runs with this network have of it."""
        return part_of(store, f"networks/{self._number}")

    def visiting(self, store: dist.Store | None) -> dist.Store:
        """What processes have of it that come later, and do not know how many networks and runs there were."""
        return part_of(store, "visits")

    def meet_in(self, store: dist.Store) -> None:
        """From now on parties meet there, since torch's groups of all processes are not the same."""
        self._meetings = store

    def meeting(self, name: str, opening: dist.Store) -> dist.Store:
        """Where a party meets: in what this opening of the network has, unless it is said where."""
        return part_of(self._meetings or opening, f"meetings/{name}")


def part_of(store: dist.Store | None, name: str) -> dist.Store:
    """Those entries of a store whose keys begin so; None: of the one of torch.distributed."""
    store = store or default_store()
    # a connection of its own, where torch can make one: who connects may wait in the store for long
    store = store.clone() if hasattr(store, "clone") else store
    return dist.PrefixStore(f"avgpipe/{name}", store)
