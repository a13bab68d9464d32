"""Bandwidth between every two processes of a group, measured in rounds of pairs that have no process in common."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from lightning_avgpipe.comm.collectives import Collectives, Peer

_SMALL = 64
_LARGE = (256 * 1024, 2 * 1024**2, 16 * 1024**2)
_LONG_S = 0.05  # a larger message is tried as long as the last one took less
_REPETITIONS = 3


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of ``count`` processes once, in rounds in which no process is in two pairs.

    One process keeps its place, the others move round the table::

        0 1     0 3     0 2
        3 2     2 1     1 3
    """
    table = list(range(count + count % 2))
    for _ in range(len(table) - 1):
        pairs = [(table[i], table[-1 - i]) for i in range(len(table) // 2)]
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        table = [table[0], table[-1], *table[1:-1]]


def measure_bandwidth(group: Collectives) -> list[list[float]]:
    """Measure the bandwidth between every two processes, over the hosts, in V - 1 rounds. Every process calls it.

    Returns:
        The bytes per second from each process (row) to each other one, on every process; shape ``(V, V)``, infinite on
        the diagonal.
    """
    own = [math.inf] * group.world_size
    for number, pairs in enumerate(rounds(group.world_size)):
        for a, b in pairs:
            if group.rank in (a, b):
                peer = b if group.rank == a else a

                def both(first: bool = group.rank == a, peer: int = peer) -> None:
                    for asks in (first, not first):
                        if asks:
                            own[peer] = _ask(group.peer(peer))
                        else:
                            _answer(group.peer(peer))

                group.together(f"the measurement of the link between ranks {a} and {b}", both)
        group.barrier(f"round {number} of the measurement of links")
    return group.exchange_objects(own)


def _ask(peer: Peer) -> float:
    small_s = _seconds(peer, _SMALL)
    for size in _LARGE:
        large_s = _seconds(peer, size)
        if large_s > _LONG_S:
            break
    peer.send(torch.zeros(1, dtype=torch.int64, device="cpu"))  # ends _answer
    return (size - _SMALL) / max(large_s - small_s, 1e-9)


def _seconds(peer: Peer, size: int) -> float:
    """Return the shortest time, in seconds, of a message to the peer and a small one back."""
    payload, found = torch.zeros(size, dtype=torch.uint8, device="cpu"), []
    for _ in range(_REPETITIONS):
        begin = time.perf_counter()
        peer.send(torch.tensor([size], device="cpu"))
        peer.send(payload)
        peer.receive(torch.empty(1, dtype=torch.int64, device="cpu"))
        found.append(time.perf_counter() - begin)
        if found[0] > 4 * _LONG_S:
            break
    return min(found)


def _answer(peer: Peer) -> None:
    while size := int(peer.receive(torch.empty(1, dtype=torch.int64, device="cpu"))):
        peer.receive(torch.empty(size, dtype=torch.uint8, device="cpu"))
        peer.send(torch.ones(1, dtype=torch.int64, device="cpu"))
