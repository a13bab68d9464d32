"""Probes: links, bandwidths and clock offsets, measured by round trips of messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.collectives import Collectives, Peer
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Edge, StageMap
from lightning_avgpipe.utils.device import host_now, port_of

if TYPE_CHECKING:
    from lightning_avgpipe.comm.cluster import Cluster

_SMALL = 64
_LARGE = (256 * 1024, 4 * 1024**2, 32 * 1024**2)
_LONG_S = 0.02  # the next size is tried only if round trips of the last one took no longer
_TRIPS = 4  # most trips of each size
_ENOUGH_S = 0.15  # time after which no further trip of a size is made; at least two are
_QUESTIONS = 16  # number of times that another clock is read


# -- links -----------------------------------------------------------------------------------------------------------


def time_trips(trip: Callable[[int], None], now: Callable[[], float] = host_now) -> tuple[float, float]:
    """Time round trips of messages.

    The quickest trip of each size counts, since others may have waited for the host or for a retransmitted packet.

    Args:
        trip: makes a round trip with a message of the given number of bytes.
        now: returns the time in seconds.
    Returns:
        Seconds per byte, and seconds of a message of 64 bytes.
    """

    def seconds(size: int) -> float:
        found: list[float] = []
        while len(found) < 2 or (len(found) < _TRIPS and sum(found) < _ENOUGH_S):
            begin = now()
            trip(size)
            found.append(now() - begin)
        return min(found)

    small_s = seconds(_SMALL)
    for size in _LARGE:
        large_s = seconds(size)
        if large_s > _LONG_S:
            break
    return max(0.0, large_s - small_s) / (size - _SMALL), small_s


def measure_links(cluster: Cluster, stage_map: StageMap) -> tuple[Link, ...]:
    """Measure the link of each hop by round trips between neighbouring stages. Every process calls it.

    Hops between the same two processes are measured once. A hop takes about a fifth of a second at 100 Mbit/s.

    Args:
        cluster: cluster with open channels, on which no message is in flight.
        stage_map: which process hosts which stage.

    Returns:
        The link of each hop, on every process; shape ``(K-1,)``. A hop within a process is free.

    Raises:
        PeerError: a neighbour does not answer in time.
    """
    asked: dict[tuple[int, int], Link] = {}
    group, ends = cluster.group, list(itertools.pairwise(map(stage_map.owner, range(stage_map.num_stages))))
    for pair in dict.fromkeys(ends):
        if group.rank in pair and pair[0] != pair[1]:
            link = _measure_hop(cluster, ends.index(pair), group.rank == pair[0])
            asked |= {} if link is None else {pair: link}
    everybody = {pair: link for links in group.exchange_objects(asked) for pair, link in links.items()}
    return tuple(everybody.get(pair, Link()) for pair in ends)


def _measure_hop(cluster: Cluster, hop: int, asks: bool) -> Link | None:
    """Send messages over a hop and return its link; at the other end, send messages back until an empty one arrives."""
    there, back = Edge(0, hop, "forward"), Edge(0, hop, "backward")
    transport, port = cluster.transport, port_of(cluster.device)
    doing = f"waits for its neighbour while the link between stages {hop} and {hop + 1} is timed"

    def receive(edge: Edge) -> tuple[Tensor | None, ...]:
        inbox = transport.inbox(edge)
        inbox.expect(1)
        cluster.waits.until(inbox.ready, doing)
        return inbox.get().tensors

    def trip(size: int) -> None:
        payload = torch.zeros(size, dtype=torch.uint8, device=cluster.device)
        port.synchronize()
        transport.outbox(there).put(Message(0, (payload,)))
        receive(back)
        port.synchronize()

    if not asks:
        while tensors := receive(there):
            transport.outbox(back).put(Message(0, tensors))
        return None
    per_byte, latency = time_trips(trip)
    transport.outbox(there).put(Message(0, ()))
    return Link(per_byte / 2, latency / 2)


# -- bandwidth -------------------------------------------------------------------------------------------------------


def pairings(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of ``count`` processes once, in rounds in which no process is in two pairs.

    Processes sit at a table, each paired with the one opposite. One keeps its place, the others rotate::

        0 1     0 3     0 2
        3 2     2 1     1 3
    """
    table = list(range(count + count % 2))
    for _ in range(len(table) - 1):
        pairs = [(table[i], table[-1 - i]) for i in range(len(table) // 2)]
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        table = [table[0], table[-1], *table[1:-1]]


def measure_bandwidth(group: Collectives) -> list[list[float]]:
    """Measure the bandwidth between the hosts of every two of V processes, in rounds of disjoint pairs.

    Every process calls it.

    Returns:
        The bytes per second from each process (row) to each other one, on every process; shape ``(V, V)``, infinite on
        the diagonal.
    """
    own = [math.inf] * group.world_size
    for number, pairs in enumerate(pairings(group.world_size)):
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
    """Return the bytes per second of messages to the peer, which answers each with a small one."""
    number = torch.empty(1, dtype=torch.int64, device="cpu")

    def trip(size: int) -> None:
        peer.send(number.fill_(size))
        peer.send(torch.zeros(size, dtype=torch.uint8, device="cpu"))
        peer.receive(number)

    per_byte, _ = time_trips(trip)
    peer.send(number.fill_(0))  # ends _answer
    return 1 / max(per_byte, 1e-15)


def _answer(peer: Peer) -> None:
    number = torch.empty(1, dtype=torch.int64, device="cpu")
    while size := int(peer.receive(number)):
        peer.receive(torch.empty(size, dtype=torch.uint8, device="cpu"))
        peer.send(number)


# -- clocks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a clock: ``own time + offset_s`` is the time on the clock of rank 0, up to ``error_s``.

    Attributes:
        offset_s: offset in seconds.
        error_s: largest error of the offset, in seconds.
    """

    offset_s: float = 0.0
    error_s: float = 0.0


def estimate_offset(rounds: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """Estimate the offset of another clock from questions and answers.

    The other clock was read at some time between question and answer. The middle of this interval is off by at most
    half the round trip, so the quickest round decides.

    Args:
        rounds: (own time when asking, the other's time, own time when the answer came), seconds.
    """
    asked, other, answered = min(rounds, key=lambda times: times[2] - times[0])
    return ClockOffset(other - (asked + answered) / 2, (answered - asked) / 2)


def offset_in(group: Collectives) -> ClockOffset:
    """Estimate the offset of this process's clock from that of rank 0. Every process of the group calls it."""
    rounds: list[tuple[float, float, float]] = []

    def exchange() -> None:
        first, reading = group.peer(0), torch.empty((), dtype=torch.float64, device="cpu")
        for _ in range(_QUESTIONS):
            asked = host_now()
            first.send(reading)
            reading = first.receive(reading)
            rounds.append((asked, float(reading), host_now()))

    def answer() -> None:
        for peer in map(group.peer, range(1, group.world_size)):
            for _ in range(_QUESTIONS):
                reading = peer.receive(torch.empty((), dtype=torch.float64, device="cpu"))
                peer.send(torch.full_like(reading, host_now()))

    group.together("an alignment of clocks", answer if group.rank == 0 else exchange)
    return estimate_offset(rounds) if rounds else ClockOffset()
