"""Mailboxes: processes of one host exchange messages through memory, bounded, in order, and without threads."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_avgpipe.comm.mailbox import Mailbox, meet
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Edge, Route
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.errors import PeerError, UnsendableError
from tests import processes
from tests.comm.test_codec import TENSORS, assert_same
from tests.threads import CPU, LIMIT_S

FORWARD = Route(Edge(0, 0, "forward"), 0, 1)
BACKWARD = Route(Edge(0, 0, "backward"), 1, 0)
NEWS = Route("news", 0, 1)
LIMIT = timedelta(seconds=LIMIT_S)
MEBI = 2**20
CLONE_NEWNET = 0x40000000


def both(
    wanted: Sequence[bool] = (True, True),
    before: Callable[[int], None] = lambda rank: None,
    store: dist.Store | None = None,
) -> list[Mailbox | None]:
    """Both ends, which two threads connect."""
    store = dist.HashStore() if store is None else store

    def one(rank: int) -> Mailbox | None:
        before(rank)
        return meet(store, rank, 1 - rank, LIMIT, wanted[rank])

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2), timeout=2 * LIMIT_S))


class Two:
    """Both ends in this thread."""

    def __init__(self, ends: Sequence[Mailbox | None]) -> None:
        first, second = ends
        self.ends = first, second
        self.reopen()

    def reopen(self) -> None:
        self.arrivals = Arrivals(), Arrivals()
        self.out = {route: self.ends[route.source].outbox(route, self.arrivals[route.source]) for route in ROUTES}
        self.into = {route: self.ends[route.target].inbox(route, self.arrivals[route.target]) for route in ROUTES}

    def close(self) -> None:
        for end in (*self.out.values(), *self.into.values()):
            end.close(0.0)

    def came(self, route: Route) -> Message:
        arrivals = self.arrivals[route.target]
        assert arrivals.wait_for(lambda: self.into[route].ready() or arrivals.failure is not None, LIMIT_S)
        assert arrivals.failure is None, arrivals.failure
        return self.into[route].get()


ROUTES = (FORWARD, BACKWARD, NEWS)


@contextmanager
def two() -> Iterator[Two]:
    """No file in memory is left."""
    files = os.listdir("/dev/shm")
    made = Two(both())
    try:
        yield made
    finally:
        made.close()
        for end in made.ends:
            end.close()
        assert os.listdir("/dev/shm") == files


def memory_bytes() -> int:
    """Of the largest memory of a mailbox in this process."""
    found = [0]
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and "memfd:avgpipe" in os.readlink(path):
            found.append(os.stat(path).st_size)
    return max(found)


class ImpatientStore(dist.HashStore):
    """A store that answers at once by itself, or not at all. ``asked`` is set when somebody has asked for a key."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def get(self, key: str) -> bytes:
        known = self.check([key])
        self.asked.set()
        if not known:
            raise dist.DistStoreError("wait timeout after 0ms")
        return super().get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.asked.set()
        super().wait(keys, timeout)


def test_an_end_waits_for_the_other_longer_than_the_store_would() -> None:
    store = ImpatientStore()

    def before(rank: int) -> None:
        assert rank == 1 or store.asked.wait(LIMIT_S)

    ends = both(before=before, store=store)
    assert all(ends)
    for end in ends:
        end.close()


def test_messages_arrive_as_they_are_whatever_their_structure_and_channel() -> None:
    conj = torch.randn(3, dtype=torch.complex64).conj()
    messages = [
        Message(0, TENSORS, (True, False), ("text", 3)),
        Message(1, ()),
        Message(2, (torch.randn(2, 3), None), decoded=(torch.float64, None)),
        Message(3, (), descriptions=[{"a": 1}]),  # cannot be hashed
        Message(4, (conj.resolve_conj(),)),
    ]
    with two() as pair:
        for i in range(6):
            for route in ROUTES:
                pair.into[route].expect(len(messages))
                for message in messages:
                    pair.out[route].put(message._replace(micro_batch=10 * i + message.micro_batch))
            for route in ROUTES:
                for message in messages:
                    assert_same(pair.came(route), message._replace(micro_batch=10 * i + message.micro_batch))
        pair.into[NEWS].expect(1)
        pair.out[NEWS].put(Message(5, (conj,)))
        (found,) = pair.came(NEWS).tensors
        assert found is not None and torch.equal(found, conj) and not found.is_conj()


def test_what_is_received_is_its_own_and_no_tensor_of_inference() -> None:
    with two() as pair:
        for infers in (True, False, True, False):
            with torch.inference_mode(infers):
                sent = torch.ones(4)
                pair.out[FORWARD].put(Message(0, (sent,)))
            with torch.inference_mode(not infers):
                pair.into[FORWARD].expect(1)
                (found,) = pair.came(FORWARD).tensors
            assert found is not None and not found.is_inference()
            found.add_(1)
            assert sent.sum() == 4


def test_no_descriptor_is_left() -> None:
    gc.collect()  # what other tests have left
    descriptors = len(os.listdir("/proc/self/fd"))
    for closes in (True, False):
        pair = Two(both())
        pair.out[FORWARD].put(Message(0, (torch.ones(3),)))
        pair.into[FORWARD].expect(1)
        pair.came(FORWARD)
        pair.close()
        if closes:
            for end in pair.ends:
                end.close()
        end, pair = None, None  # type: ignore[assignment]
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_message_that_cannot_be_pickled_is_not_sent_and_the_next_one_is() -> None:
    with two() as pair:
        pair.into[FORWARD].expect(1)
        with pytest.raises(UnsendableError, match="cannot be pickled"):
            pair.out[FORWARD].put(Message(0, (), descriptions=threading.Lock()))
        pair.out[FORWARD].put(Message(1, ()))
        assert pair.came(FORWARD).micro_batch == 1


@pytest.mark.parametrize("nbytes", [8, MEBI, 40 * MEBI])
def test_memory_is_bounded_and_nothing_is_lost_while_nobody_looks(nbytes: int) -> None:
    count = 300 if nbytes < 40 * MEBI else 5
    with two() as pair:
        payload = torch.zeros(nbytes, dtype=torch.uint8)
        for i in range(count):
            pair.out[FORWARD].put(Message(i, (payload,)))
        pair.out[NEWS].put(Message(0, ()))  # behind all of them
        assert memory_bytes() <= 128 * MEBI
        pair.into[FORWARD].expect(count)
        pair.into[NEWS].expect(1)
        sender = pair.arrivals[0]
        for i in range(count):
            while not pair.into[FORWARD].ready():  # both processes wait
                sender.wait(0.01)
            assert pair.came(FORWARD).micro_batch == i
        assert sender.wait_for(pair.into[NEWS].ready, LIMIT_S)


def test_a_message_larger_than_the_bound_keeps_its_place() -> None:
    with two() as pair:
        sizes = [8, 65 * MEBI, 16]
        for i, size in enumerate(sizes):
            pair.out[FORWARD].put(Message(i, (torch.full((size,), i, dtype=torch.uint8),)))
        pair.into[FORWARD].expect(3)
        for i, size in enumerate(sizes):
            while not pair.into[FORWARD].ready():
                pair.arrivals[0].wait(0.01)
            (found,) = pair.came(FORWARD).tensors
            assert found is not None and len(found) == size and (found == i).all()


def test_what_was_not_taken_before_the_channels_were_closed_does_not_come_later() -> None:
    with two() as pair:
        for i in range(3):
            pair.out[FORWARD].put(Message(i, (torch.ones(2),)))
        pair.into[FORWARD].expect(1)
        assert pair.came(FORWARD).micro_batch == 0
        pair.close()
        pair.reopen()
        pair.into[FORWARD].expect(1)
        pair.out[FORWARD].put(Message(7, (torch.ones(2),)))
        assert pair.came(FORWARD).micro_batch == 7


def test_a_lost_connection_fails_who_expects_and_who_sends() -> None:
    with two() as pair:
        pair.into[FORWARD].expect(1)
        pair.ends[0].close()
        arrivals = pair.arrivals[1]
        assert arrivals.wait_for(lambda: arrivals.failure is not None, LIMIT_S)
        assert isinstance(arrivals.failure, PeerError)
        assert "the connection to rank 0 broke while receiving on channel 'forward 0'" in str(arrivals.failure)
    with two() as pair:
        pair.ends[0].close()
        pair.out[BACKWARD].put(Message(0, ()))
        assert isinstance(pair.arrivals[1].failure, PeerError)


@pytest.mark.parametrize("sends", [True, False])
def test_what_was_sent_before_the_other_end_went_arrives(sends: bool) -> None:
    with two() as pair:
        pair.out[BACKWARD].put(Message(0, ()))  # nobody reads it
        for i in range(2):
            pair.out[FORWARD].put(Message(i, (torch.full((5,), i),)))
        pair.ends[0].close()
        pair.into[FORWARD].expect(2)
        if sends:
            pair.out[BACKWARD].put(Message(1, ()))
        for i in range(2):
            assert pair.into[FORWARD].ready() and pair.into[FORWARD].get().micro_batch == i
        pair.into[FORWARD].expect(1)
        assert not pair.into[FORWARD].ready()
        pair.into[FORWARD].expect(1)
        assert isinstance(pair.arrivals[1].failure, PeerError)


# -- who has one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), [(os, "memfd_create"), (socket.socket, "bind")])
def test_without_memory_or_socket_there_is_a_line_and_a_log(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(module, name, refused)
    with caplog.at_level(logging.WARNING):
        assert both() == [None, None]
    assert "over the network: no memory can be shared (no memory)" in caplog.text


def test_processes_with_networks_of_their_own_share_no_memory() -> None:
    """Or emulated links between them would be passed by."""
    refused: list[int] = []

    def leave(rank: int) -> None:
        if rank == 1:
            refused.append(ctypes.CDLL(None).unshare(CLONE_NEWNET))  # of this thread only

    found = both(before=leave)
    if refused[0]:
        pytest.skip("only root may have another network")
    assert found == [None, None]


def exchange(rank: int, network: type[ProcessGroups], shared_memory: bool, dies: bool) -> tuple[list[str], str]:
    """A message to rank 1 over a network; returns the threads for it, and how the wait for another one ends."""
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=LIMIT)
    arrivals, groups = Arrivals(), network(rank, CPU, LIMIT, shared_memory=shared_memory)
    groups.open()
    groups.connect(NEWS)
    if rank == 0:
        groups.outbox(NEWS, arrivals).put(Message(0, (torch.ones(1),)))
        dist.barrier()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return [], ""
    inbox = groups.inbox(NEWS, arrivals)
    inbox.expect(2)
    assert arrivals.wait_for(inbox.ready, LIMIT_S)
    inbox.get()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("avgpipe")]
    dist.barrier()
    if dies:
        assert arrivals.wait_for(lambda: arrivals.failure is not None, LIMIT_S)
    return names, str(arrivals.failure)


def test_a_process_that_is_killed_is_noticed_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    files = os.listdir("/dev/shm")
    killed, other = processes.run(2, exchange, ProcessGroups, True, True, folder=tmp_path)
    assert killed.exit_code == -signal.SIGKILL
    assert other.error is None
    assert "the connection to rank 0 broke while receiving on channel 'news'" in other.result[1]
    assert os.listdir("/dev/shm") == files
