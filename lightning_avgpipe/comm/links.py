"""Links: bandwidth and latency between neighbouring processes, measured once."""

from __future__ import annotations

import statistics
import time

import torch

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.channel import Inbox
from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.utils.device import port_of

__all__ = ["measure_links"]

_SMALL = 64
_LARGE = (256 * 1024, 4 * 1024**2, 32 * 1024**2)
_LONG_S = 0.02  # a larger message is tried while the round trip is shorter
_REPETITIONS = 3


def measure_links(mesh: Mesh) -> tuple[Link, ...]:
    """Time round trips between the processes of neighbouring stages. Every process calls it; a second call is free.

    A hop takes less than a fifth of a second at 100 Mbit/s; hops of equal ends are measured once.

    Args:
        mesh: with open channels, on which nothing is under way.
    Returns:
        On rank 0 the link of each hop, shape ``(K-1,)``; those inside a process are free. Elsewhere what this process
        found.
    Raises:
        PeerError: no answer within the mesh's timeout.
    """
    if mesh.links is None:
        found: dict[tuple[int, int], Link] = {}
        ends = [(mesh.rank_of(k), mesh.rank_of(k + 1)) for k in range(mesh.num_stages - 1)]
        for k, (a, b) in enumerate(ends):
            if a == b or (a, b) in found:
                continue
            found[a, b] = Link()
            if mesh.rank == a:
                found[a, b] = _ask(mesh, k)
            elif mesh.rank == b:
                _answer(mesh, k)
        asked = {pair: link for pair, link in found.items() if pair[0] == mesh.rank}
        everybody = {pair: link for links in mesh.gather_objects(asked) for pair, link in links.items()}
        mesh.links = tuple(everybody.get(pair, Link()) for pair in ends)
    return mesh.links


def _ask(mesh: Mesh, hop: int) -> Link:
    small = _round_trip_s(mesh, hop, _SMALL)
    size, large = 0, 0.0
    for size in _LARGE:
        large = _round_trip_s(mesh, hop, size)
        if large > _LONG_S:
            break
    wiring = mesh.wiring[0, hop]
    assert wiring.to_next is not None
    wiring.to_next.put(Message(0, (), (), ("probe", "end")))
    return Link(max(0.0, large - small) / 2 / (size - _SMALL), small / 2)


def _round_trip_s(mesh: Mesh, hop: int, size: int) -> float:
    wiring = mesh.wiring[0, hop]
    assert wiring.to_next is not None and wiring.gradients is not None
    probe = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    seconds = []
    for _ in range(1 + _REPETITIONS):  # the first one warms up
        port_of(mesh.device).synchronize()
        begin = time.perf_counter()
        wiring.to_next.put(Message(0, (probe,), (False,), ("probe", "echo")))
        _receive(mesh, wiring.gradients, hop)
        port_of(mesh.device).synchronize()
        seconds.append(time.perf_counter() - begin)
        if seconds[0] > _LONG_S and len(seconds) > 1:
            break
    return statistics.median(seconds[1:])


def _answer(mesh: Mesh, hop: int) -> None:
    wiring = mesh.wiring[0, hop + 1]
    assert wiring.values is not None and wiring.to_previous is not None
    while (message := _receive(mesh, wiring.values, hop)).entries != ("probe", "end"):
        wiring.to_previous.put(Message(0, message.tensors))


def _receive(mesh: Mesh, inbox: Inbox, hop: int) -> Message:
    inbox.expect(1)
    mesh.wait(inbox.ready, f"waits for its neighbour while the link between stages {hop} and {hop + 1} is timed")
    return inbox.get()
