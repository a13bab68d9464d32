"""Mailboxes: two processes of one host exchange messages through memory that both have, and no thread waits for them.

::

    process 0                                                                          process 1
    whoever puts a message  -- frame and packets -->  memory that 0 writes  -->  the thread that waits copies them out
    copies it               -- where they lie ----->  socket of the host    -->  when it looks
                            <-- how many are out ---

The frames are those of lines. A record on the socket says where a message lies; each record, of either direction, also
says how many messages its sender has copied out, whose memory may be written again. Where too little comes back, a
record asks for it. The kernel orders records and memory, wakes the process that waits, and ends the connection with
either process.

Nobody waits for room: what finds none is queued, and goes when the other process has looked. A process looks between
two actions and while it waits, so a message that it sends on leaves then.

The memory has no name, so nothing of it outlives the processes, and no limit but the host's: it grows to what is under
way at a time. The socket has a name within the network of the processes. Those on two hosts, or with networks of their
own, do not find each other and use a line.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.channel import Traffic
from lightning_avgpipe.comm.codec import FrameReader, FrameWriter, laid_out
from lightning_avgpipe.comm.line import NetworkInbox, NetworkOutbox, Outgoing
from lightning_avgpipe.comm.topology import Route
from lightning_avgpipe.comm.transfer import Arrivals, close_all
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import host_now, port_of

_log = logging.getLogger(__name__)

# opening, first byte and size of the message (0: none), how many are out, whether to answer, and the sender's time
_RECORD = struct.Struct("<qqqq?d")
_MOST = 128  # messages in the memory at a time: their records fit in the socket's buffer
_MOST_BYTES = 64 * 1024**2  # of messages in the memory at a time, unless a single one is larger
_CPU = torch.device("cpu")


class Memory:
    """Memory that this process writes for another one.

    Attributes:
        file: the memory as a file without a name.
        sent: number of messages that have been put there.
        out: number of those that the other process has copied out.
    """

    def __init__(self) -> None:
        self.file = os.fdopen(os.memfd_create("avgpipe"), "r+b", buffering=0)
        self.sent = self.out = 0
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._places: list[tuple[int, int]] = []  # first byte and end of each message, ascending
        self._order: deque[tuple[int, int]] = deque()

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to ask what the other process has copied out."""
        return max(len(self._places) / _MOST, sum(end - at for at, end in self._places) / _MOST_BYTES) >= 0.5

    def take(self, nbytes: int) -> tuple[int, Tensor] | None:
        """Return the first byte and the memory of a further message; None if there is no room now."""
        number, begin = 0, 0
        while number < len(self._places) and self._places[number][0] - begin < nbytes:
            number, begin = number + 1, self._places[number][1]
        end = begin + nbytes
        if len(self._places) >= _MOST or (self._places and end > _MOST_BYTES):
            return None
        if end > len(self._flat):
            size = max(end, 2 * len(self._flat), mmap.PAGESIZE)
            self.file.truncate(size)
            self._flat = mapped(self.file)
        self._places.insert(number, (begin, end))
        self._order.append((begin, end))
        self.sent += 1
        return begin, self._flat[begin:end]

    def release(self, out: int) -> None:
        """Note how many messages the other process has copied out by now."""
        for _ in range(out - self.out):
            self._places.remove(self._order.popleft())
        self.out = out


def mapped(file: Any) -> Tensor:
    """Return the bytes of a file in memory."""
    return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class Mailbox:
    """A connection of two processes of one host with all their channels; an instance is one end of it.

    It is the sending and the receiving end of its channels, as :class:`Sender` and :class:`Receiver` are of a line.

    Args:
        peer: global rank of the other end.
        door: socket to the other end.
        memory: memory that this end writes.
        theirs: memory that the other end writes, as a file.

    Attributes:
        routes: routes of the open channels.
    """

    in_parts = False

    def __init__(self, peer: int, door: socket.socket, memory: Memory, theirs: Any) -> None:
        self.peer, self.port = peer, port_of(_CPU)
        self.routes: set[Route] = set()
        self._door, self._memory, self._theirs = door, memory, theirs
        door.setblocking(False)
        weakref.finalize(self, close_all, door, memory.file, theirs)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._arrivals: Arrivals | None = None
        self._lost: PeerError | None = None
        self._lock = threading.RLock()  # threads of lines may put what they send on
        self._opening = 0
        self._frames = FrameWriter()
        # what is read by opening, also of one that this end comes to later: the other one may be ahead
        self._readers: dict[int, tuple[FrameReader, dict[Route, NetworkInbox]]] = {}
        self._queue: deque[Outgoing] = deque()
        self._asked = 0  # number of messages about which the last question was
        self._out = 0  # number of messages that this end has copied out

    # -- channels ------------------------------------------------------------------------------------------------------

    def outbox(self, route: Route, arrivals: Arrivals) -> NetworkOutbox:
        """Open the sending end of a channel."""
        self._open(arrivals)
        return NetworkOutbox(route, self)

    def inbox(self, route: Route, arrivals: Arrivals) -> NetworkInbox:
        """Open the receiving end of a channel."""
        self._open(arrivals)
        self.routes.add(route)
        return self._inbox(self._opening, route)

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. The last one waits up to ``join_s`` seconds until all messages are sent."""
        self.routes.discard(route)
        if self._opening in self._readers:
            self._readers[self._opening][1].pop(route, None)
        if not self.routes:
            self._readers.pop(self._opening, None)
            if self._arrivals is not None:
                self._arrivals.wait_for(lambda: not self._queue or self._lost is not None, join_s)

    def close(self) -> None:
        """Give the connection up."""
        self._lose(None, "it was open")
        self._door.close()

    def _open(self, arrivals: Arrivals) -> None:
        if not self.routes:
            self._opening += 1
            self._frames = FrameWriter()
            self._queue.clear()
        if arrivals is not self._arrivals and self._lost is None:
            if self._arrivals is not None:
                self._arrivals.ignore(self._door)
            arrivals.listen(self._door, self.look)
        self._arrivals = arrivals

    def _inbox(self, opening: int, route: Route) -> NetworkInbox:
        _, inboxes = self._readers.setdefault(opening, (FrameReader(_CPU), {}))
        return inboxes.setdefault(route, NetworkInbox(route, self))

    def expect(self, inbox: NetworkInbox, expected: Sequence[tuple[Sequence[Traffic], NetworkOutbox | None]]) -> None:
        """Expect further messages of a channel."""
        assert self._arrivals is not None
        with self._lock:
            inbox.expected.extend(expected)
            inbox.hand_in(self._arrivals)
            self.look()
            if inbox.expected and self._lost is not None:
                self._arrivals.fail(self._lost)

    # -- sending -------------------------------------------------------------------------------------------------------

    def event(self) -> None:
        """Return None: what is computed on the host may be read."""

    def put(self, outgoing: Outgoing) -> None:
        """Send a message, or queue it if there is no room; returns at once.

        Raises:
            UnsendableError: the message has something that cannot be pickled; it is not sent.
        """
        for observer in outgoing.observers:
            observer.queued()
        with self._lock:
            outgoing.head = self._frames.head(outgoing.route, outgoing.message)
            self._queue.append(outgoing)
            self.look()
            if self._lost is not None and self._arrivals is not None:
                self._arrivals.fail(self._lost)

    def _post(self, outgoing: Outgoing) -> bool:
        """Send a message, if there is room."""
        message, head = outgoing.message, outgoing.head
        assert head is not None
        *begins, nbytes = laid_out(head.nbytes, head.packets)
        if (found := self._memory.take(nbytes)) is None:
            return False
        first, whole = found
        with contextlib.ExitStack() as sending:
            for observer in outgoing.observers:
                sending.enter_context(observer.sending(outgoing.route, message.micro_batch, None))
            head.fill(whole[: head.nbytes], message)
            for begin, packet in zip(begins, head.packets, strict=True):
                packet.fill(whole[begin:], message)
            self._tell(first, nbytes, asks=self._memory.is_half_full)
        return True

    def _tell(self, first: int = 0, nbytes: int = 0, asks: bool = False) -> None:
        """Send a record, which asks only if no question is open."""
        asks = asks and self._memory.out >= self._asked
        if asks:
            self._asked = self._memory.sent
        record = _RECORD.pack(self._opening, first, nbytes, self._out, asks, host_now())
        try:
            self._door.send(record)
        except OSError as error:
            self._lose(error, "sending")

    # -- receiving -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what has arrived, and send what is queued."""
        with self._lock:
            while self._lost is None and (record := self._record()):
                opening, first, nbytes, out, asks, at_s = _RECORD.unpack(record)
                self._memory.release(out)
                if nbytes:
                    self._take_in(opening, first, nbytes, at_s)
                if asks:
                    self._tell()
            while self._lost is None and self._queue:
                if not self._post(self._queue[0]):
                    self._tell(asks=True)
                    return
                self._queue.popleft()

    def _record(self) -> bytes:
        try:
            record = self._door.recv(_RECORD.size)
        except BlockingIOError:
            return b""
        except OSError as error:
            self._lose(error, "receiving")
            return b""
        if not record:
            self._lose(None, "receiving")
        return record

    def _take_in(self, opening: int, first: int, nbytes: int, at_s: float) -> None:
        if first + nbytes > len(self._flat):
            self._flat = mapped(self._theirs)
        self._out += 1
        if opening < self._opening or (opening == self._opening and not self.routes):
            return  # nobody waits for it any more
        whole = self._flat[first : first + nbytes]
        reader, _ = self._readers.setdefault(opening, (FrameReader(_CPU), {}))
        opened = reader.read(whole, None)
        begins = laid_out(opened.nbytes, opened.packets)
        flats = [
            whole[begin : begin + packet.nbytes].clone() for begin, packet in zip(begins, opened.packets, strict=False)
        ]
        inbox = self._inbox(opening, opened.route)
        inbox.early.append((opened.message(flats), None, at_s))
        if self._arrivals is not None:
            self._arrivals.moved()
            inbox.hand_in(self._arrivals)

    def _lose(self, error: OSError | None, doing: str) -> None:
        """Note that the connection broke; whoever waits for a message is told."""
        if self._lost is not None:
            return
        if self._arrivals is not None:
            self._arrivals.ignore(self._door)
        _, inboxes = self._readers.get(self._opening, (None, {}))
        awaited = next((inbox.route for inbox in inboxes.values() if inbox.expected), None)
        where, why = "" if awaited is None else f" on channel '{awaited}'", "" if error is None else f": {error}"
        self._lost = PeerError(f"the connection to rank {self.peer} broke while {doing}{where}{why}")
        self._lost.__cause__ = error
        if awaited is not None and self._arrivals is not None:
            self._arrivals.fail(self._lost)


# -- connecting --------------------------------------------------------------------------------------------------------


def meet(store: dist.Store, rank: int, peer: int, limit: timedelta, wanted: bool) -> Mailbox | None:
    """Connect two processes if they are on one host and in one network. Both call it.

    Args:
        store: store that only these two use, once.
        rank: global rank of this process.
        peer: global rank of the other one.
        limit: longest time that it may take.
        wanted: whether this process may use a mailbox.

    Returns:
        This end of the mailbox; None on both if there is none.

    Raises:
        DistNetworkError: the other process has ended meanwhile.
    """
    memory = None
    if wanted and sys.platform == "linux":
        try:
            memory = Memory()
        except OSError as error:
            _log.warning("rank %d sends to rank %d over the network: no memory can be shared (%s)", rank, peer, error)
    try:
        found = (_answer if rank < peer else _call)(store, limit, memory)
        if found is None or memory is None:
            return None
        door, file = found
        return Mailbox(peer, door, memory, os.fdopen(file, "r+b", buffering=0))
    except (OSError, IndexError) as error:  # no file came
        raise dist.DistNetworkError(f"rank {peer} ended while it connected with rank {rank} ({error})") from error


def _answer(store: dist.Store, limit: timedelta, memory: Memory | None) -> tuple[socket.socket, int] | None:
    """Wait for the other process, and exchange memories; return the socket to it, and its memory."""
    with contextlib.ExitStack() as listening:
        token = secrets.token_hex(16) if memory is not None else ""
        if memory is not None:
            listener = listening.enter_context(_socket(limit))
            listener.bind(_address(token))
            listener.listen()
        store.set("token", token)
        if store.get("found") != b"yes":
            return None
        assert memory is not None
        while True:
            door, _ = listener.accept()
            door.settimeout(limit.total_seconds())
            said, files, *_ = socket.recv_fds(door, len(token), 1)
            if secrets.compare_digest(said, token.encode()):
                break
            close_all(door)  # somebody else's
        socket.send_fds(door, [b"\0"], [memory.file.fileno()])
        return door, files[0]


def _call(store: dist.Store, limit: timedelta, memory: Memory | None) -> tuple[socket.socket, int] | None:
    """Look for the other process, and exchange memories; return the socket to it, and its memory."""
    token = store.get("token").decode()
    door = _socket(limit) if memory is not None and token else None
    found = door is not None and door.connect_ex(_address(token)) == 0
    store.set("found", "yes" if found else "no")
    if door is None or memory is None or not found:
        return None
    socket.send_fds(door, [token.encode()], [memory.file.fileno()])
    _, files, *_ = socket.recv_fds(door, 1, 1)
    return door, files[0]


def _socket(limit: timedelta) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(limit.total_seconds())
    return made


def _address(token: str) -> str:
    return f"\0avgpipe-{token[: len(token) // 2]}"  # the other half is the secret
