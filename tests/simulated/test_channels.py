"""Channels between simulated devices: what they send arrives, in order with what made it and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.codec import Packet
from lightning_avgpipe.comm.line import NetworkInbox, NetworkOutbox, Pair, Receiver, Sender, Wire
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Edge, Party, Route, StageMap
from lightning_avgpipe.comm.transfer import Arrivals
from tests.simulated import device
from tests.simulated.communicator import Communicator
from tests.threads import LIMIT_S, TIMEOUT, Hub, Injector, MemoryGroup, MemoryNetwork

Simulated = Callable[..., Any]

ROUTE = Route(Edge(0, 0, "forward"), 0, 1)


def sim(index: int = 0) -> torch.device:
    return torch.device("sim", index)


@contextmanager
def channel(between_devices: bool = True) -> Iterator[tuple[NetworkOutbox, NetworkInbox, Callable[[], Message]]]:
    """Both ends, on two devices, and what takes a message that has arrived."""
    hub, arrivals = Hub(Injector()), Arrivals()

    def wire(rank: int) -> Wire:
        group: Any = MemoryGroup(hub, Party("world", (0, 1)), rank)
        on_devices: Any = MemoryGroup(hub, Party("leaders", (0, 1)), rank)
        link = Pair(Communicator(on_devices, rank, 2), 1 - rank) if between_devices else None
        return Wire(1 - rank, Pair(group, 1 - rank), sim(rank), link, arrivals)

    outbox = NetworkOutbox(ROUTE, Sender(wire(0)))
    inbox = Receiver(wire(1)).inbox(ROUTE)

    def take() -> Message:
        assert arrivals.wait_for(lambda: inbox.ready() or arrivals.failure is not None, LIMIT_S)
        assert arrivals.failure is None, arrivals.failure
        return inbox.get()

    try:
        yield outbox, inbox, take
    finally:
        outbox.close(LIMIT_S)
        inbox.close(LIMIT_S)


def made(kind: str) -> Tensor:
    """Of the numbers 0 to 11."""
    if kind == "dense":
        return torch.arange(12.0, device=sim()).view(3, 4)
    if kind == "strided":
        return torch.arange(24.0, device=sim()).view(3, 8)[:, ::2] / 2
    if kind == "gaps":
        return (torch.arange(24.0, device=sim()) / 2).view(3, 8)[:, ::2]
    return torch.arange(3.0, device=sim())[:, None].expand(3, 4)  # as the gradient of a sum


def sent(kind: str, between_devices: bool) -> tuple[list[float], list[float], list[str]]:
    """What was sent, and what has arrived, when the sender lets go of it and goes on at once."""
    with channel(between_devices) as (outbox, inbox, take):
        expected = made(kind).tolist()
        with device.reported() as report:
            outbox.put(Message(0, (made(kind),)))
            for _ in range(8):  # in the memory that was given back
                torch.full((24,), -1.0, device=sim())
            inbox.expect(1)
            (tensor,) = take().tensors
            received = (tensor + 0).tolist()
            torch.accelerator.synchronize(0)
    return expected, received, list(report.errors)


@pytest.mark.parametrize("between_devices", [True, False])
@pytest.mark.parametrize("kind", ["dense", "strided", "gaps", "expanded"])
def test_a_tensor_arrives_that_its_sender_has_let_go(simulated: Simulated, kind: str, between_devices: bool) -> None:
    expected, received, errors = simulated(sent, kind, between_devices)
    assert received == expected
    assert not errors


def passed(between_devices: bool) -> tuple[list[list[float]], list[str]]:
    """What arrives at a device that tensors pass, whose user overwrites them, and at the one behind it."""
    hub, arrivals, party = Hub(Injector()), Arrivals(), Party("world", (0, 1, 2))
    on_host: list[Any] = [MemoryGroup(hub, party, rank) for rank in range(3)]
    others: list[Any] = [MemoryGroup(hub, Party("leaders", (0, 1, 2)), rank) for rank in range(3)]

    def wire(rank: int, peer: int) -> Wire:
        link = Pair(Communicator(others[rank], rank, 3), peer) if between_devices else None
        return Wire(peer, Pair(on_host[rank], peer), sim(rank), link, arrivals)

    routes = [Route(Edge(0, hop, "forward"), hop, hop + 1) for hop in range(2)]
    outboxes = [NetworkOutbox(route, Sender(wire(route.source, route.target))) for route in routes]
    inboxes = [Receiver(wire(route.target, route.source)).inbox(route) for route in routes]
    found = []
    try:
        with device.reported() as report:
            inboxes[0].expect(1, forward_to=outboxes[1])
            inboxes[1].expect(1)
            outboxes[0].put(Message(0, (made("dense"), made("dense") + 1), segments=4))
            for inbox in inboxes:
                assert arrivals.wait_for(lambda i=inbox: i.ready() or arrivals.failure, LIMIT_S)
                assert arrivals.failure is None, arrivals.failure
                tensors = [t for t in inbox.get().tensors if t is not None]
                found += [(tensor + 0).tolist() for tensor in tensors]
                del tensors
                for index in range(3):
                    torch.full((24,), -1.0, device=sim(index))
            torch.accelerator.synchronize(0)
        return found, list(report.errors)
    finally:
        for end in (*outboxes, *inboxes):
            end.close(LIMIT_S)


@pytest.mark.parametrize("between_devices", [True, False])
def test_a_tensor_that_passes_a_device_arrives_on_both(simulated: Simulated, between_devices: bool) -> None:
    found, errors = simulated(passed, between_devices)
    rows = torch.arange(12.0).view(3, 4)
    assert found == [rows.tolist(), (rows + 1).tolist()] * 2
    assert not errors


def order_of_a_message() -> list[str]:
    """What a sender begins, one after the other."""
    hub, arrivals, party, order = Hub(Injector()), Arrivals(), Party("world", (0, 1)), []

    class Noted:
        def __init__(self, name: str, group: Any) -> None:
            self._name, self._group = name, group

        def send(self, tensors: Any, peer: int, tag: int) -> Any:
            order.append(self._name)
            return self._group.send(tensors, peer, tag)

    on_host = MemoryGroup(hub, party, 0)
    between = Communicator(MemoryGroup(hub, Party("leaders", (0, 1)), 0), 0, 2)  # type: ignore[arg-type]
    pairs = Pair(Noted("frame", on_host), 1), Pair(Noted("tensor", between), 1)
    outbox = NetworkOutbox(ROUTE, Sender(Wire(1, pairs[0], sim(), pairs[1], arrivals)))
    outbox.put(Message(0, (torch.ones(4, device=sim()),)))
    outbox.close(LIMIT_S)  # once it is sent
    between.abort()
    return order


def test_a_send_between_devices_is_queued_before_its_frame_goes(simulated: Simulated) -> None:
    """So that no receive is queued before its send, and holds up a send for which the other end waits."""
    assert simulated(order_of_a_message) == ["tensor", "frame"]


def sent_to_each_other() -> list[list[float]]:
    """What arrives on two devices that have both begun to send, where all streams share a queue."""
    hub, arrivals = Hub(Injector()), Arrivals()

    def wire(rank: int, source: int) -> Wire:
        party = Party("world" if source else "leaders", (0, 1))
        link = Pair(Communicator(MemoryGroup(hub, party, rank), rank, 2), 1 - rank)  # type: ignore[arg-type]
        return Wire(1 - rank, link, sim(rank), link, arrivals)

    packet = Packet((), 16, on_host=False)
    ends = [(wire(source, source), wire(1 - source, source)) for source in range(2)]
    module = torch.get_device_module("sim")
    device.backend.set_queues(1)
    try:
        for source, (sender, _) in enumerate(ends):
            module.set_device(source)
            sender.begin(torch.full((16,), 1 + source, dtype=torch.uint8, device=sim(source)))
        found = []
        for source, (_, receiver) in enumerate(ends):
            module.set_device(1 - source)
            found.append(receiver.finish_receive(receiver.post(packet)))
        torch.accelerator.synchronize(0)
        torch.accelerator.synchronize(1)
        return [sorted(set(flat.tolist())) for flat in found]
    finally:
        device.backend.set_queues(0)
        module.set_device(0)


def test_no_queue_of_a_device_is_held_by_the_end_of_a_send(simulated: Simulated) -> None:
    assert simulated(sent_to_each_other) == [[1], [2]]


def waits_over_the_host() -> tuple[list[float], int, list[str]]:
    """What arrives of a message with several tensors, how often threads wait for the device, and what was found."""
    with channel(between_devices=False) as (outbox, inbox, take), device.reported() as report:
        tensors = tuple(torch.full((4,), float(n), device=sim()) for n in range(5))
        outbox.put(Message(0, (*tensors, torch.full((4,), 5.0))))
        del tensors
        inbox.expect(1)
        arrived = [tensor for tensor in take().tensors if tensor is not None]
        waits = report.waits.total()
        return [float(tensor.mean()) for tensor in arrived], waits, list(report.errors)


def test_a_message_over_the_host_waits_once_for_the_device(simulated: Simulated) -> None:
    assert simulated(waits_over_the_host) == ([0, 1, 2, 3, 4, 5], 1, [])


# -- waits -----------------------------------------------------------------------------------------------------------


def in_a_thread() -> tuple[float, int, list[str]]:
    """What a process computes while it waits, on a stream of its device; and which device that was."""
    cluster = Cluster(StageMap(1), Process(0, sim(1), TIMEOUT.total_seconds(), MemoryNetwork(Hub(Injector()), 0)))
    found: list[Any] = []

    def collective() -> None:
        found.extend([x + 1, torch.get_device_module("sim").current_device()])

    with device.reported() as report:
        torch.get_device_module("sim").set_device(1)
        with torch.Stream(device=sim(1)):
            x = torch.ones(4, device=sim(1))
            cluster.waits.run(collective, "waits for the other processes in a sum")
            total = float((found[0] * 2).sum())
        torch.get_device_module("sim").set_device(0)
    return total, found[1], list(report.errors)


def test_what_waits_in_a_thread_is_on_the_callers_device_and_stream(simulated: Simulated) -> None:
    assert simulated(in_a_thread) == (16.0, 1, [])
