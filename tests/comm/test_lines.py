"""Lines: all channels from one process to another share a connection, a thread at each end, and one order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import CAPACITY, Packet
from lightning_avgpipe.comm.line import NetworkInbox, NetworkOutbox, Pair, Posted, Receiver, Sender, Wire
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Edge, Route
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.errors import PeerError
from tests import processes
from tests.models import MLP, loader
from tests.threads import CPU, LIMIT_S, Hub, Injector, MemoryGroup, Party
from tests.trainers import pipeline

TWO = Party("world", (0, 1))
ROUTES = [Route(Edge(pipeline, 0, "forward"), 0, 1) for pipeline in range(2)] + [Route("news", 0, 1)]
SIZES = [10, CAPACITY, 2 * 1024**2]  # in the frame, after it, in several parts


@dataclass
class Group:
    """Notes tag and bytes of what is sent and received, and holds sends back while its gate is shut."""

    group: MemoryGroup
    gate: threading.Event = field(default_factory=threading.Event)
    sent: list[tuple[int, int]] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        assert tag == 0 or self.gate.wait(LIMIT_S)  # frames pass
        self.sent.append((tag, len(tensors[0])))
        return self.group.send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        self.awaited.append(tag)
        return self.group.recv(tensors, src, tag)


class Blocking(Wire):
    """Whoever sends waits, so a thread does."""

    sends_at_once = False


@dataclass
class Line:
    """Both ends, with three channels."""

    outboxes: list[NetworkOutbox]
    inboxes: list[NetworkInbox]
    there: Group
    here: Group
    arrivals: Arrivals

    def put(self, channel: int, i: int, *sizes: int) -> None:
        self.outboxes[channel].put(Message(i, tuple(torch.full((size,), i, dtype=torch.uint8) for size in sizes)))

    def taken(self, channel: int) -> Message:
        inbox, arrivals = self.inboxes[channel], self.arrivals
        with arrivals.condition:
            assert arrivals.condition.wait_for(lambda: inbox.ready() or arrivals.failure is not None, LIMIT_S)
        assert arrivals.failure is None, arrivals.failure
        message = inbox.get()
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
def line(receives: type[Wire] = Wire) -> Iterator[Line]:
    """No thread of it is left, and no more frames were awaited than came."""
    hub, arrivals, before = Hub(Injector()), Arrivals(), threads()
    there, here = (Group(MemoryGroup(hub, TWO, rank)) for rank in range(2))
    there.gate.set()
    sender = Sender(Blocking(1, Pair(there, 1), CPU, None, lambda: None), arrivals)
    receiver = Receiver(receives(0, Pair(here, 0), CPU, None, lambda: None), arrivals)
    ends = [NetworkOutbox(route, sender) for route in ROUTES], [NetworkInbox(route, receiver) for route in ROUTES]
    try:
        yield Line(*ends, there, here, arrivals)
        assert here.awaited.count(0) == [tag for tag, _ in there.sent].count(0)
    finally:
        there.gate.set()
        for end in (*ends[0], *ends[1]):
            end.close(LIMIT_S)
    assert threads() == before


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


class Noting(Observer):
    """Notes what has arrived."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def arrived(self, route: Route, micro_batch: int, stream: Any) -> None:
        self.seen.append((str(route), micro_batch))


@pytest.mark.parametrize("size", SIZES)
def test_observers_see_what_came_before_it_was_expected(size: int) -> None:
    noting = Noting()
    with line() as two:
        two.put(1, 1, size)
        two.put(2, 2)
        two.inboxes[2].expect(1)
        two.taken(2)
        two.inboxes[1].expect(1, [noting])
        assert two.inboxes[1].ready() and noting.seen == [("forward 0 of pipeline 1", 1)]
        two.taken(1)


def test_a_message_may_be_expected_while_it_comes() -> None:
    noting = Noting()
    with line() as two:
        two.there.gate.clear()
        two.put(0, 1, CAPACITY)
        two.inboxes[2].expect(1)
        two.await_that(lambda: 1 in two.here.awaited)  # what follows the frame
        two.inboxes[0].expect(1, [noting])
        assert not two.inboxes[0].ready()
        two.there.gate.set()
        assert two.taken(0).micro_batch == 1 and noting.seen == [("forward 0", 1)]
        two.put(2, 2)
        two.taken(2)


def test_an_early_message_goes_on_in_its_turn() -> None:
    with line() as first, line() as second:
        for i in range(3):
            first.put(0, i, CAPACITY)
        first.put(2, 3)
        first.inboxes[2].expect(1)
        first.taken(2)
        first.inboxes[0].expect(4, onwards=second.outboxes[0])
        first.put(0, 3, CAPACITY)
        second.inboxes[0].expect(4)
        assert [second.taken(0).micro_batch for _ in range(4)] == [0, 1, 2, 3]
        assert [first.taken(0).micro_batch for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "transfers"),
    [
        ((), 1),
        ((10, 20, 30), 1),
        ((CAPACITY,), 2),
        ((10, *[CAPACITY // 3] * 5), 2),
        ((2 * 1024**2,), 3),
    ],
)
def test_transfers_of_a_message_are_few(sizes: tuple[int, ...], transfers: int) -> None:
    """A frame, one for all else that is small, and one for each megabyte of what is large."""
    with line() as two:
        two.inboxes[0].expect(4)
        for i in range(4):
            two.put(0, i, *sizes)
            assert two.taken(0).micro_batch == i
        two.await_that(lambda: len(two.there.sent) == 4 * transfers)


def test_frames_are_awaited_before_they_come() -> None:
    with line() as two:
        two.inboxes[0].expect(2)
        two.inboxes[1].expect(1)
        assert two.here.awaited == [0, 0, 0]
        for channel, i in ((1, 0), (0, 1), (0, 2)):
            two.put(channel, i, 10)
            two.taken(channel)


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


# -- in processes ----------------------------------------------------------------------------------------------------


class Counting(L.Callback):
    """Notes the threads of this package in the last iteration."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.threads = threads()


def trained(rank: int) -> list[list[str]]:
    torch.set_num_threads(1)
    found = []
    for count in (1, 4):
        counting = Counting()
        pipeline(3, 3, {"num_pipelines": count}, callbacks=[counting], max_epochs=1).fit(MLP(), loader(MLP, 32, 4))
        found.append(counting.threads)
    return found


def test_further_pipelines_take_no_threads(tmp_path: Path) -> None:
    """Two, and two for each process that this one sends to or receives from."""
    for rank, (one, four) in enumerate(processes.results(processes.run(3, trained, folder=tmp_path))):
        assert one == four
        others = [other for other in range(3) if other != rank]
        lines = {f"avgpipe {end} rank {other}" for other in others for end in ("send to", "receive from")}
        assert set(one) - lines == {"avgpipe board", "avgpipe watch"}
        assert len(one) == len(set(one)) <= 2 + 2 * len(others)
