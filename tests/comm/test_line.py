"""Lines: channels from one process to another share a connection, a thread at each end, and one order.

What usually comes is received before it is announced, and what passes a process goes on in pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_avgpipe.comm.codec import CAPACITY, MOST_TAGS, Packet
from lightning_avgpipe.comm.line import NetworkInbox, NetworkOutbox, Pair, Posted, Receiver, Sender, Wire
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Edge, Party, Route
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.errors import PeerError
from tests import processes
from tests.models import MLP, loader
from tests.threads import CPU, LIMIT_S, Hub, Injector, MemoryGroup
from tests.trainers import pipeline

THREE = Party("world", (0, 1, 2))
FORWARD = Route(Edge(0, 0, "forward"), 0, 1)
ROUTES = [FORWARD, Route(Edge(1, 0, "forward"), 0, 1), Route("news", 0, 1)]
SIZES = [10, CAPACITY, 2 * 1024**2]  # in the frame, after it, in several parts


class Group(MemoryGroup):
    """Notes what is sent, by which thread, and what is awaited; a send waits until the gate lets it go."""

    sent: list[tuple[int, int]]  # tag and bytes
    senders: set[int]
    awaited: list[int]  # tags
    gate: threading.Semaphore

    @classmethod
    def of(cls, hub: Hub, rank: int, may_send: int = 0) -> Group:
        group = cls(hub, THREE, rank)
        group.__dict__.update(sent=[], senders=set(), awaited=[], gate=threading.Semaphore(may_send))
        return group

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.senders.add(threading.get_ident())
        assert self.gate.acquire(timeout=LIMIT_S)
        self.sent.append((tag, len(tensors[0])))
        return super().send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        self.awaited.append(tag)
        return super().recv(tensors, src, tag)

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.sent]


class Blocking(Wire):
    """Whoever sends waits, so a thread does."""

    sends_at_once = False


@dataclass
class Line:
    """Both ends, with a channel for each route."""

    outboxes: list[NetworkOutbox]
    inboxes: list[NetworkInbox]
    there: Group
    here: Group
    arrivals: Arrivals

    def put(self, channel: int, i: int, *sizes: int) -> None:
        self.outboxes[channel].put(Message(i, tuple(torch.full((size,), i, dtype=torch.uint8) for size in sizes)))

    def came(self, channel: int = 0) -> Message:
        return taken(self.inboxes[channel], self.arrivals)

    def taken(self, channel: int) -> Message:
        message = self.came(channel)
        for tensor in message.tensors:
            assert tensor is not None and (tensor == message.micro_batch).all()
        return message

    def await_that(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(LIMIT_S / 2000)
        raise AssertionError("it has not come")


@contextmanager
def line(
    receives: type[Wire] = Wire,
    sends: type[Wire] = Blocking,
    routes: Sequence[Route] = ROUTES,
    may_send: int = 1000,
    opening: int = 0,
) -> Iterator[Line]:
    """No thread of it is left, and no more frames were awaited than came."""
    hub, arrivals, before = Hub(Injector()), Arrivals(), threads()
    there, here = Group.of(hub, 0, may_send), Group.of(hub, 1)
    sender = Sender(sends(1, Pair(there, 1), CPU, None, arrivals, opening))
    receiver = Receiver(receives(0, Pair(here, 0), CPU, None, arrivals, opening))
    ends = [NetworkOutbox(route, sender) for route in routes], [receiver.inbox(route) for route in routes]
    first_tag = opening * MOST_TAGS
    try:
        yield Line(*ends, there, here, arrivals)
        assert here.awaited.count(first_tag) == [tag for tag, _ in there.sent].count(first_tag)
    finally:
        there.gate.release(1000)
        for end in (*ends[0], *ends[1]):
            end.close(LIMIT_S)
    assert threads() == before


@contextmanager
def chain() -> Iterator[tuple[NetworkOutbox, NetworkInbox, NetworkOutbox, NetworkInbox, Group, Group, Arrivals]]:
    """From process 0 over process 1 to process 2; what 0 and 1 send can be held back."""
    hub, arrivals = Hub(Injector()), Arrivals()
    groups = [Group.of(hub, rank) for rank in range(3)]

    def wire(rank: int, peer: int) -> Wire:
        return Blocking(peer, Pair(groups[rank], peer), CPU, None, arrivals)

    onwards = Route(Edge(0, 1, "forward"), 1, 2)
    ends = (
        NetworkOutbox(FORWARD, Sender(wire(0, 1))), Receiver(wire(1, 0)).inbox(FORWARD),
        NetworkOutbox(onwards, Sender(wire(1, 2))), Receiver(wire(2, 1)).inbox(onwards),
    )  # fmt: skip
    try:
        yield *ends, groups[0], groups[1], arrivals
    finally:
        for group in groups:
            group.gate.release(1000)
        for end in ends:
            end.close(LIMIT_S)


def taken(inbox: NetworkInbox, arrivals: Arrivals) -> Message:
    assert arrivals.wait_for(lambda: inbox.ready() or arrivals.failure is not None, LIMIT_S)
    assert arrivals.failure is None, arrivals.failure
    return inbox.get()


def threads() -> list[str]:
    """Of this package, by name."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("avgpipe"))


@pytest.mark.parametrize("size", SIZES)
def test_who_waits_for_a_message_is_given_it_whatever_comes_before(size: int) -> None:
    with line() as two:
        two.put(0, 1, size)
        two.put(1, 2, size)
        two.put(0, 3, size)
        two.put(2, 4, size)
        two.inboxes[2].expect(1)
        assert two.taken(2).micro_batch == 4
        assert not two.inboxes[0].ready() and not two.inboxes[1].ready()
        two.inboxes[0].expect(2)
        two.inboxes[1].expect(1)
        assert [two.taken(channel).micro_batch for channel in (0, 1, 0)] == [1, 2, 3]


def test_an_early_message_goes_on_in_its_turn() -> None:
    with line() as first, line() as second:
        for i in range(3):
            first.put(0, i, CAPACITY)
        first.put(2, 3)
        first.inboxes[2].expect(1)
        first.taken(2)
        first.inboxes[0].expect(4, forward_to=second.outboxes[0])
        first.put(0, 3, CAPACITY)
        second.inboxes[0].expect(4)
        assert [second.taken(0).micro_batch for _ in range(4)] == [0, 1, 2, 3]
        assert [first.taken(0).micro_batch for _ in range(4)] == [0, 1, 2, 3]


class WithoutMemory(Wire):
    """What follows a frame finds no memory."""

    def post(self, packet: Packet, pieces: int = 1, tag: int = 0) -> Posted:
        torch.empty(2**50, dtype=torch.uint8)
        raise AssertionError("there is so much memory")


def test_a_message_for_which_there_is_no_memory_breaks_no_connection() -> None:
    with line(WithoutMemory) as two:
        two.inboxes[0].expect(1)
        two.put(0, 1, CAPACITY)
        two.await_that(lambda: two.arrivals.failure is not None)
        failure = two.arrivals.failure
        assert "can't allocate memory" in str(failure) and not isinstance(failure, PeerError)
        assert failure is not None and "while receiving on channel 'forward 0'" in failure.__notes__[0]


# -- what passes a process ---------------------------------------------------------------------------------------------


def test_nothing_overtakes_what_is_still_to_be_sent() -> None:
    with line(sends=Wire, routes=[FORWARD], may_send=0) as two:
        two.outboxes[0].put(message(0, 80_000), [Observer()])  # by the thread, which waits
        for i in (1, 2):
            two.outboxes[0].put(message(i, 10))
        two.there.gate.release(1000)
        two.inboxes[0].expect(3)
        assert [two.came().micro_batch for _ in range(3)] == [0, 1, 2]
        assert threading.get_ident() not in two.there.senders


def message(i: int, size: int) -> Message:
    tensors = torch.arange(size).view(2, -1).T, torch.zeros(0, 3), torch.tensor(float(i))
    return Message(i, tensors, (True, False, True), ("entry", i), segments=4)


@pytest.mark.parametrize("size", [10, 80_000, 1_000_000])
def test_what_passes_a_process_arrives_as_it_was_sent_and_in_order(size: int) -> None:
    with chain() as (out, there, onwards, inbox, first, second, arrivals):
        first.gate.release(1000)
        second.gate.release(1000)
        onwards.put(Message(7, (torch.ones(3),)))  # a message of this process comes first
        there.expect(3, forward_to=onwards)
        there.expect(1)
        inbox.expect(4)
        for i in range(4):
            out.put(message(i, size))
        passed = [taken(inbox, arrivals) for _ in range(4)]
        assert [found.micro_batch for found in passed] == [7, 0, 1, 2]
        for i, found in enumerate([*passed[1:], taken(there, arrivals)]):
            assert found.micro_batch == i % 3 and found.descriptions == ("entry", i % 3)
        assert [taken(there, arrivals).micro_batch for _ in range(3)] == [1, 2, 3]
        for i, found in enumerate(passed[1:]):
            assert found.requires_grad == (True, False, True)
            for tensor, expected in zip(found.tensors, message(i, size).tensors, strict=True):
                assert torch.equal(tensor, expected) and tensor.stride() == expected.stride()


def test_pieces_go_on_before_the_last_one_has_come() -> None:
    with chain() as (out, there, onwards, inbox, first, second, arrivals):
        second.gate.release(1000)
        there.expect(1, forward_to=onwards)
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
        there.expect(1, forward_to=onwards)
        inbox.expect(1)
        out.put(message(0, 80_000))
        first.gate.release(2)
        first.hub.leave(0)
        assert arrivals.wait_for(lambda: arrivals.failure is not None, LIMIT_S)
        onwards.close(LIMIT_S)
        assert not any(thread.name == "avgpipe send to rank 2" for thread in threading.enumerate())
        first.hub.leave(1)


# -- what is received before it is announced --------------------------------------------------------------------------

LARGE = CAPACITY // 4  # numbers, of four bytes


@contextmanager
def channel(opening: int = 0) -> Iterator[tuple[Callable[..., Tensor], list[int]]]:
    """What passes a tensor through both ends, as soon as it may; and the tags of receives."""
    with line(sends=Wire, routes=[FORWARD], opening=opening) as two:

        def passed(tensor: Tensor, may_go: Callable[[], bool] = lambda: True) -> Tensor:
            two.inboxes[0].expect(1)
            two.await_that(may_go)
            two.outboxes[0].put(Message(0, (tensor,)))
            (arrived,) = two.came().tensors
            return arrived

        yield passed, two.here.awaited


def test_a_structure_that_has_repeated_is_received_before_it_is_announced() -> None:
    with channel() as (passed, tags):
        for i in range(4):
            # from the third message on what follows the frame is awaited before anything is sent
            tensor, before = torch.full((LARGE,), float(i)), len(tags) + (1 if i < 2 else 2)
            assert torch.equal(passed(tensor, lambda before=before: len(tags) == before), tensor)
    assert tags == [0, 1, 0, 2, 0, 2, 0, 2]


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


# -- in processes ----------------------------------------------------------------------------------------------------


def trained() -> list[list[str]]:
    """The threads of this package in the last iteration that do not end with a wait."""
    found = []
    for count in (1, 4):
        seen = list[list[str]]()
        note = LambdaCallback(on_train_batch_end=lambda *_, seen=seen: seen.append(threads()))
        pipeline(3, 3, {"num_pipelines": count}, callbacks=[note], max_epochs=1).fit(MLP(), loader(MLP, 8, 2))
        found.append([name for name in seen[-1] if name != "avgpipe collective"])
    return found


def test_further_pipelines_take_no_threads(tmp_path: Path) -> None:
    """Two, and two for each process that this one sends to or receives from."""
    for rank, (one, four) in enumerate(processes.everywhere(3, trained, folder=tmp_path)):
        assert one == four
        others = [other for other in range(3) if other != rank]
        lines = {f"avgpipe {end} rank {other}" for other in others for end in ("send to", "receive from")}
        assert set(one) - lines == {"avgpipe board", "avgpipe watch"}
        assert len(one) == len(set(one)) <= 2 + 2 * len(others)
