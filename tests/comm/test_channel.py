"""Channels: what usually comes is received before it is announced, and what passes a process goes on in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.comm.channel import MemoryChannel
from lightning_avgpipe.comm.codec import CAPACITY
from lightning_avgpipe.comm.line import NetworkInbox, NetworkOutbox, Pair, Receiver, Sender, Wire
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Edge, Route
from lightning_avgpipe.comm.transfer import Arrivals, transfer
from lightning_avgpipe.engine.observer import Observer
from tests.threads import CPU, LIMIT_S, Hub, Injector, MemoryGroup, Party

THREE = Party("world", (0, 1, 2))


class Slow(MemoryGroup):
    """What is sent waits until it may go."""

    sizes: list[int]
    gate: threading.Semaphore

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        assert self.gate.acquire(timeout=LIMIT_S)
        self.sizes.append(len(tensors[0]))
        return super().send(tensors, dst, tag)


class Blocking(Wire):
    """Whoever sends waits, so a thread does."""

    sends_at_once = False


@contextmanager
def chain() -> Iterator[tuple[NetworkOutbox, NetworkInbox, NetworkOutbox, NetworkInbox, Slow, Slow, Arrivals]]:
    """From process 0 over process 1 to process 2; what 0 and 1 send can be held back."""
    hub, arrivals = Hub(Injector()), Arrivals()
    groups: list[Any] = [Slow(hub, THREE, rank) for rank in range(3)]
    for group in groups:
        group.__dict__.update(sizes=[], gate=threading.Semaphore(0))

    def wire(rank: int, peer: int) -> Wire:
        return Blocking(peer, Pair(groups[rank], peer), CPU, None, lambda: None)

    ends = (
        NetworkOutbox(Route(Edge(0, 0, "forward"), 0, 1), Sender(wire(0, 1), arrivals)),
        NetworkInbox(Route(Edge(0, 0, "forward"), 0, 1), Receiver(wire(1, 0), arrivals)),
        NetworkOutbox(Route(Edge(0, 1, "forward"), 1, 2), Sender(wire(1, 2), arrivals)),
        NetworkInbox(Route(Edge(0, 1, "forward"), 1, 2), Receiver(wire(2, 1), arrivals)),
    )
    try:
        yield *ends, groups[0], groups[1], arrivals
    finally:
        for group in groups:
            group.gate.release(1000)
        for end in ends:
            end.close(LIMIT_S)


def taken(inbox: NetworkInbox, arrivals: Arrivals) -> Message:
    with arrivals.condition:
        assert arrivals.condition.wait_for(lambda: inbox.ready() or arrivals.failure is not None, LIMIT_S)
    assert arrivals.failure is None, arrivals.failure
    return inbox.get()


class Noting(Slow):
    """Notes who sends."""

    senders: list[int]

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.senders.append(threading.get_ident())
        return super().send(tensors, dst, tag)


@contextmanager
def noting() -> Iterator[tuple[NetworkOutbox, NetworkInbox, Noting, Arrivals]]:
    """From process 0 to process 1."""
    hub, arrivals, route = Hub(Injector()), Arrivals(), Route(Edge(0, 0, "forward"), 0, 1)
    group, other = Noting(hub, THREE, 0), MemoryGroup(hub, THREE, 1)
    group.__dict__.update(sizes=[], senders=[], gate=threading.Semaphore(0))
    outbox = NetworkOutbox(route, Sender(Wire(1, Pair(group, 1), CPU, None, lambda: None), arrivals))
    inbox = NetworkInbox(route, Receiver(Wire(0, Pair(other, 0), CPU, None, lambda: None), arrivals))
    try:
        yield outbox, inbox, group, arrivals
    finally:
        group.gate.release(1000)
        outbox.close(LIMIT_S)
        inbox.close(LIMIT_S)


@pytest.mark.parametrize("size", [10, 80_000])
def test_what_waits_for_nothing_is_sent_by_whoever_puts_it(size: int) -> None:
    with noting() as (outbox, inbox, group, arrivals):
        group.gate.release(1000)
        outbox.put(message(0, size))
        assert set(group.senders) == {threading.get_ident()}
        inbox.expect(1)
        assert torch.equal(taken(inbox, arrivals).tensors[0], message(0, size).tensors[0])


def test_nothing_overtakes_what_is_still_to_be_sent() -> None:
    with noting() as (outbox, inbox, group, arrivals):
        outbox.put(message(0, 80_000), [Observer()])  # by the thread, which waits
        for i in (1, 2):
            outbox.put(message(i, 10))
        group.gate.release(1000)
        inbox.expect(3)
        assert [taken(inbox, arrivals).micro_batch for _ in range(3)] == [0, 1, 2]
        assert threading.get_ident() not in group.senders


def message(i: int, size: int) -> Message:
    tensors = torch.arange(size).view(2, -1).T, torch.zeros(0, 3), torch.tensor(float(i))
    return Message(i, tensors, (True, False, True), ("entry", i), segments=4)


@pytest.mark.parametrize("size", [10, 80_000, 1_000_000])
def test_what_passes_a_process_arrives_as_it_was_sent_and_in_order(size: int) -> None:
    with chain() as (out, there, onwards, inbox, first, second, arrivals):
        first.gate.release(1000)
        second.gate.release(1000)
        onwards.put(Message(7, (torch.ones(3),)))  # a message of this process comes first
        there.expect(3, onwards=onwards)
        there.expect(1)
        inbox.expect(4)
        for i in range(4):
            out.put(message(i, size))
        passed = [taken(inbox, arrivals) for _ in range(4)]
        assert [found.micro_batch for found in passed] == [7, 0, 1, 2]
        for i, found in enumerate([*passed[1:], taken(there, arrivals)]):
            assert found.micro_batch == i % 3 and found.entries == ("entry", i % 3)
        assert [taken(there, arrivals).micro_batch for _ in range(3)] == [1, 2, 3]
        for i, found in enumerate(passed[1:]):
            assert found.requires_grad == (True, False, True)
            for tensor, expected in zip(found.tensors, message(i, size).tensors, strict=True):
                assert tensor is not None and expected is not None
                assert torch.equal(tensor, expected) and tensor.stride() == expected.stride()


def test_pieces_go_on_before_the_last_one_has_come() -> None:
    with chain() as (out, there, onwards, inbox, first, second, arrivals):
        second.gate.release(1000)
        there.expect(1, onwards=onwards)
        inbox.expect(1)
        out.put(message(0, 80_000))
        first.gate.release(3)  # the frame, and two of four pieces
        deadline = threading.Event()
        for _ in range(1000):
            if len(second.sizes) == 3:
                break
            deadline.wait(0.01)
        assert second.sizes[1:] == [160_000, 160_000] and not there.ready() and not inbox.ready()
        first.gate.release(1000)
        assert taken(inbox, arrivals).micro_batch == taken(there, arrivals).micro_batch == 0
        assert first.sizes[1:5] == second.sizes[1:5] == [160_000] * 4


def test_a_message_that_breaks_off_ends_who_waits_for_the_rest() -> None:
    with chain() as (out, there, onwards, inbox, first, second, arrivals):
        second.gate.release(1000)
        there.expect(1, onwards=onwards)
        inbox.expect(1)
        out.put(message(0, 80_000))
        first.gate.release(2)
        first.hub.leave(0)
        with arrivals.condition:
            assert arrivals.condition.wait_for(lambda: arrivals.failure is not None, LIMIT_S)
        onwards.close(LIMIT_S)
        assert not any(thread.name == "avgpipe send to rank 2" for thread in threading.enumerate())
        first.hub.leave(1)


def test_within_a_process_what_goes_on_is_a_copy_and_the_rest_stays() -> None:
    first, second = MemoryChannel(), MemoryChannel()
    first.put(Message(0, (torch.zeros(2),)))  # before anybody expects it
    first.expect(2, onwards=second)
    first.put(Message(1, (torch.zeros(2),)))
    first.put(Message(2, (torch.zeros(2),)))  # of the next iteration
    kept, passed = first.get().tensors[0], second.get().tensors[0]
    assert kept is not None and passed is not None
    kept += 1
    assert passed.tolist() == [0, 0]
    assert second.get().micro_batch == 1 and not second.ready()
    first.get()
    first.expect(1, onwards=second)
    assert second.get().micro_batch == 2


@pytest.mark.parametrize(
    ("size", "pieces", "parts"),
    [(10, 8, [10]), (100_000, 1, [100_000]), (400_000, 4, [100_000] * 4), (100_000, 8, [65_536, 34_464])],
)
def test_a_tensor_travels_in_as_many_pieces_as_are_worth_it(size: int, pieces: int, parts: list[int]) -> None:
    sizes: list[int] = []
    transfer(lambda part: sizes.append(len(part)), torch.zeros(size, dtype=torch.uint8), lambda: None, pieces)
    assert sizes == parts


# -- what is received before it is announced --------------------------------------------------------------------------

LARGE = CAPACITY // 4  # numbers, of four bytes


class Telling:
    """A process group that notes the tag of each receive, as it is posted."""

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self.tags: list[int] = []

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        self.tags.append(tag)
        return self._group.recv(tensors, src, tag)


@contextmanager
def channel(opening: int = 0) -> Iterator[tuple[Callable[..., Tensor], list[int]]]:
    """What passes a tensor through both ends, as soon as it may; and the tags of receives."""
    hub, arrivals = Hub(Injector()), Arrivals()
    party = Party("world", (0, 1))
    telling = Telling(MemoryGroup(hub, party, 1))
    sends = Wire(1, Pair(MemoryGroup(hub, party, 0), 1), CPU, None, lambda: None, opening)
    receives = Wire(0, Pair(telling, 0), CPU, None, lambda: None, opening)
    outbox, inbox = (
        NetworkOutbox(Route(Edge(0, 0, "forward"), 0, 1), Sender(sends, arrivals)),
        NetworkInbox(Route(Edge(0, 0, "forward"), 0, 1), Receiver(receives, arrivals)),
    )

    def passed(tensor: Tensor, may_go: Callable[[], bool] = lambda: True) -> Tensor:
        inbox.expect(1)
        deadline = time.monotonic() + LIMIT_S
        while not may_go():
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)
        outbox.put(Message(0, (tensor,)))
        with arrivals.condition:
            assert arrivals.condition.wait_for(lambda: inbox.ready() or arrivals.failure is not None, LIMIT_S)
        assert arrivals.failure is None, arrivals.failure
        (arrived,) = inbox.get().tensors
        assert arrived is not None
        return arrived

    try:
        yield passed, telling.tags
    finally:
        outbox.close(LIMIT_S)
        inbox.close(LIMIT_S)


def test_a_structure_that_has_repeated_is_received_before_it_is_announced() -> None:
    with channel() as (passed, tags):
        for i in range(4):
            # from the third message on what follows the frame is awaited before anything is sent
            tensor, before = torch.full((LARGE,), float(i)), len(tags) + (1 if i < 2 else 2)
            assert torch.equal(passed(tensor, lambda before=before: len(tags) == before), tensor)
    assert tags == [0, 1, 0, 2, 0, 2, 0, 2]


def test_where_structures_change_all_the_time_few_receives_hold_memory() -> None:
    lengths = [*range(1, 9)] * 3
    with channel() as (passed, tags):
        for length in lengths:
            assert len(passed(torch.zeros(length * LARGE))) == length * LARGE
    came = sum(1 + -(-4 * length * LARGE // 1024**2) for length in lengths)  # a frame, and the parts of the rest
    assert len(tags) <= came + 4 * 2


@pytest.mark.parametrize("lengths", [(2, 2, 3, 2, 3, 3, 2), (3, 3, 2, 2, 3), (2, 2, 0, 2, 0, 0)])
def test_other_structures_may_come_in_between(lengths: tuple[int, ...]) -> None:
    with channel() as (passed, tags):
        for i, length in enumerate(lengths):
            tensor = torch.full((length * LARGE or 1,), float(i))
            assert torch.equal(passed(tensor), tensor)
    assert tags.count(0) >= len(lengths)


def test_what_an_earlier_channel_has_awaited_on_the_connection_takes_nothing_of_a_later_one() -> None:
    tags: list[set[int]] = []
    for opening in range(3):
        with channel(opening) as (passed, seen):
            for length in (2, 2, 3, 3, 2, 3):
                assert len(passed(torch.zeros(length * LARGE))) == length * LARGE
        tags.append({*seen})
    assert all(len(of) > 1 for of in tags) and not tags[0] & tags[1] and not tags[1] & tags[2]
