"""Links: bandwidth and latency between processes of neighbouring stages, measured once."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Edge
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.comm.transport import Transport
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.utils.device import port_of

_SMALL = 64
_LARGE = (256 * 1024, 4 * 1024**2, 32 * 1024**2)
_LONG_S = 0.02  # a larger message is tried as long as the last round trip was shorter
_REPETITIONS = 3


def measure_links(
    stage_map: StageMap, group: Collectives, transport: Transport, waits: Waits, device: torch.device
) -> tuple[Link, ...]:
    """Measure the link of each hop by round trips between neighbouring stages. Every process calls it.

    A hop takes less than a fifth of a second at 100 Mbit/s. Hops between the same two processes are measured once.

    Args:
        stage_map: which process hosts which stage.
        group: group of this process.
        transport: transport with open channels, on which no message is in flight.
        waits: waits for the neighbours.
        device: device of this process.

    Returns:
        On rank 0 the link of each hop, shape ``(K-1,)``; a hop within a process is free. On other ranks only the links
        that this process measured.

    Raises:
        PeerError: a neighbour does not answer in time.
    """
    found: dict[tuple[int, int], Link] = {}
    ends = list(itertools.pairwise(map(stage_map.owner, range(stage_map.num_stages))))
    for hop, (a, b) in enumerate(ends):
        if a == b or (a, b) in found:
            continue
        found[a, b] = Link()
        if group.rank in (a, b):
            probe = _Probe(transport, waits, hop, device)
            if group.rank == a:
                found[a, b] = probe.ask()
            else:
                probe.answer()
    asked = {pair: link for pair, link in found.items() if pair[0] == group.rank}
    everybody = {pair: link for links in group.gather_objects(asked) for pair, link in links.items()}
    return tuple(everybody.get(pair, Link()) for pair in ends)


class _Probe:
    """A measurement of one hop: one end sends messages and the other returns them, until an empty one comes."""

    def __init__(self, transport: Transport, waits: Waits, hop: int, device: torch.device) -> None:
        self._there, self._back = Edge(0, hop, "forward"), Edge(0, hop, "backward")
        self._transport = transport
        self._waits = waits
        self._device = device
        self._doing = f"waits for its neighbour while the link between stages {hop} and {hop + 1} is timed"

    def ask(self) -> Link:
        small = self._round_trip_s(_SMALL)
        size, large = 0, 0.0
        for size in _LARGE:
            large = self._round_trip_s(size)
            if large > _LONG_S:
                break
        self._transport.outbox(self._there).put(Message(0, ()))
        return Link(max(0.0, large - small) / 2 / (size - _SMALL), small / 2)

    def answer(self) -> None:
        while (message := self._receive(self._there)).tensors:
            self._transport.outbox(self._back).put(Message(0, message.tensors))

    def _round_trip_s(self, size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=self._device)
        seconds = []
        for _ in range(1 + _REPETITIONS):  # the first one warms up
            port_of(self._device).synchronize()
            begin = time.perf_counter()
            self._transport.outbox(self._there).put(Message(0, (payload,)))
            self._receive(self._back)
            port_of(self._device).synchronize()
            seconds.append(time.perf_counter() - begin)
            if seconds[0] > _LONG_S and len(seconds) > 1:
                break
        return statistics.median(seconds[1:])

    def _receive(self, edge: Edge) -> Message:
        inbox = self._transport.inbox(edge)
        inbox.expect(1)
        self._waits.until(inbox.ready, self._doing)
        return inbox.get()
