"""Networks of devices and the bandwidths of their links, as planners use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import networkx as nx
import numpy as np

from lightning_avgpipe.errors import PartitionError

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Network:
    """A network of V devices with the bandwidth between every two of them.

    Attributes:
        bandwidth: bytes per second from device u to device v, shape ``(V, V)``; the diagonal is ignored.
        ranks: ranks of the devices, if they all-reduce in a ring of ascending ranks; empty: an all-reduce uses the
            links between every two of them.
    Raises:
        PartitionError: there is no device, the matrix is not square, or a bandwidth is not positive.
    """

    bandwidth: tuple[tuple[float, ...], ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.bandwidth)
        if size == 0 or any(len(row) != size for row in self.bandwidth):
            raise PartitionError(
                f"bandwidth has rows of {[len(row) for row in self.bandwidth]} entries; it needs V rows of V each, "
                "with at least one device"
            )
        for u, row in enumerate(self.bandwidth):
            for v, speed in enumerate(row):
                if u != v and not speed > 0:
                    raise PartitionError(f"bandwidth[{u}][{v}]={speed}: every two devices need more than 0 bytes/s")

    @classmethod
    def of(cls, bandwidth: Matrix, rings: bool = False) -> Network:
        """Make a network from a matrix; ``rings`` says whether devices all-reduce in rings."""
        return cls(tuple(tuple(map(float, row)) for row in bandwidth), tuple(range(len(bandwidth))) if rings else ())

    def __len__(self) -> int:
        return len(self.bandwidth)

    def ordered(self, order: Sequence[int]) -> Network:
        """Return the network with its devices in another order: device i is ``order[i]`` of this network."""
        ranks = tuple(self.ranks[u] for u in order) if self.ranks else ()
        return Network(tuple(tuple(self.bandwidth[u][v] for v in order) for u in order), ranks)

    @cached_property
    def within(self) -> np.ndarray:
        """The least bandwidth of the links over which devices ``a .. b-1`` all-reduce, in either direction.

        Its shape is ``(V+1, V+1)``; it is infinite for one device.
        """
        size = len(self)
        least = np.full((size + 1, size + 1), math.inf)
        if self.ranks:
            for b in range(2, size + 1):
                for a in range(b - 1):
                    ring = sorted(range(a, b), key=self.ranks.__getitem__)
                    links = zip(ring, [*ring[1:], ring[0]], strict=True)
                    least[a, b] = min(min(self.bandwidth[u][v], self.bandwidth[v][u]) for u, v in links)
            return least
        for b in range(2, size + 1):
            for a in range(b - 2, -1, -1):
                ends = min(self._array[a, b - 1], self._array[b - 1, a])
                least[a, b] = min(least[a + 1, b], least[a, b - 1], ends)
        return least

    @cached_property
    def forward(self) -> np.ndarray:
        """The least bandwidth from devices ``a .. b-1`` to devices ``b .. c-1``, shape ``(V+1, V+1, V+1)``."""
        return _between(self._array)

    @cached_property
    def backward(self) -> np.ndarray:
        """The least bandwidth from devices ``b .. c-1`` to devices ``a .. b-1``, shape ``(V+1, V+1, V+1)``."""
        return _between(self._array.T)

    @cached_property
    def _array(self) -> np.ndarray:
        return np.array(self.bandwidth)


def _between(bandwidth: np.ndarray) -> np.ndarray:
    size = len(bandwidth)
    least = np.full((size + 1, size + 1, size + 1), math.inf)
    for b in range(1, size):
        from_a = np.minimum.accumulate(bandwidth[:b, b:][::-1], axis=0)[::-1]  # row a: of devices a .. b-1
        least[:b, b, b + 1 :] = np.minimum.accumulate(from_a, axis=1)
    return least


def device_order(bandwidth: Matrix) -> tuple[int, ...]:
    """Return an order of devices in which neighbours have fast links, by cutting the network recursively.

    Args:
        bandwidth: bytes per second between every two devices, shape ``(V, V)``; the sum of both directions is used.
    Returns:
        All devices. Of the two sides of a cut, the one with the lowest device index comes first.
    Raises:
        PartitionError: as for :class:`Network`.
    Source: RDO in Luo et al., INFOCOM 2022; global minimum cuts by Stoer and Wagner.
    """
    speeds = Network.of(bandwidth).bandwidth
    graph = nx.Graph()
    graph.add_nodes_from(range(len(speeds)))
    graph.add_weighted_edges_from((u, v, speeds[u][v] + speeds[v][u]) for u, v in combinations(range(len(speeds)), 2))
    return tuple(_ordered(graph))


def _ordered(graph: nx.Graph) -> list[int]:
    if len(graph) < 3:
        return sorted(graph)
    _, sides = nx.stoer_wagner(graph)
    return [device for side in sorted(sides, key=min) for device in _ordered(graph.subgraph(side).copy())]
