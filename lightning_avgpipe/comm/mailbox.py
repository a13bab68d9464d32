"""Mailboxes: two processes of one host exchange messages through shared memory, without threads that wait for them.

::

    process 0                                                                       process 1
    the thread that puts a message   -- tensors ----->  memory that 0 writes  -->  the thread that waits copies the
    copies its tensors               -- records ----->  socket of the host    -->  tensors out when it looks
                                     <-- records with the number of messages copied out --

A record on the socket says where a message lies, and has the number of its structure; a new structure is pickled into
the memory once. Every record, in either direction, also says how many messages its sender has copied out, so that their
memory can be written again. If memory fills up and no record comes back, a record asks for one. The kernel orders
records and memory, wakes the waiting process, and ends the connection when either process ends.

No thread waits for room. A message for which there is no room is queued, and sent when the other process has copied
others out. A process looks for messages between two actions and while it waits, and forwards messages at these times.

The memory is an unnamed file, so it does not outlive the processes and has no limit other than the host's. It grows to
the largest size in flight at a time. The socket has a name in the network namespace of the processes. Processes on
different hosts, or in different network namespaces, do not find each other, and use a line.
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
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.channel import Traffic
from lightning_avgpipe.comm.codec import Numbering, ReceivedStructures, Structure, aligned
from lightning_avgpipe.comm.line import NetworkInbox, NetworkOutbox, Outgoing, lost_connection
from lightning_avgpipe.comm.topology import Route
from lightning_avgpipe.comm.transfer import Arrivals, close_all
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import host_now, port_of

_log = logging.getLogger(__name__)

# opening; of the message: first byte, size of its pickle and in total (0: no message), numbers of structure, channel
# and micro-batch; number of messages that the sender has copied out, whether it asks for an answer, time on its clock
_RECORD = struct.Struct("<qqqqqqqq?d")
_MOST = 128  # most messages in the memory at a time, so that their records fit in the socket's buffer
_MOST_BYTES = 64 * 1024**2  # most bytes of these messages, unless a single one is larger
_MOST_VIEWS = 1024
_NO_MESSAGE = (0,) * 6
_CPU = torch.device("cpu")


class SharedMemory:
    """Memory that two processes share, and that one of them writes.

    Args:
        file: the memory as an unnamed file.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self._size = 0
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._views: dict[Any, list[Tensor | None]] = {}  # tensors of numbered structures, by where they lie

    def reserve(self, nbytes: int) -> None:
        """Extend the file to at least ``nbytes`` bytes; only those that are written take memory."""
        if nbytes > self._size:
            self._size = max(nbytes, 2 * self._size)
            self.file.truncate(self._size)

    def bytes(self, first: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` bytes of the memory from the byte ``first`` on; the file must be large enough."""
        if first + nbytes > len(self._flat):
            self._flat = torch.frombuffer(mmap.mmap(self.file.fileno(), 0), dtype=torch.uint8)
            self._views.clear()
        return self._flat[first : first + nbytes]

    def tensors(self, first: int, structure: Structure, opening: int) -> list[Tensor | None]:
        """Return views of the tensors of a message that begins at the byte ``first``; None for those without bytes."""
        key = (structure.number, opening, first) if structure.number >= 0 else None
        found = None if key is None else self._views.get(key)
        if found is None:
            with torch.inference_mode(False):  # the views are also used outside of inference mode
                found = [None] * len(structure.forms)
                structure.whole.unpack(self.bytes(first, structure.whole.nbytes), found)
            if key is not None:
                if len(self._views) >= _MOST_VIEWS:
                    self._views.clear()
                self._views[key] = found
        return found


class Places:
    """The places of messages in memory that this process writes.

    Attributes:
        sent: number of messages that have been put into the memory.
        out: number of those that the other process has copied out.
    """

    def __init__(self) -> None:
        self.sent = self.out = 0
        self._taken: list[tuple[int, int]] = []  # first byte and end of each message, ascending
        self._order: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> int | None:
        """Reserve a place for a message, and return its first byte; None if there is no room now."""
        number, begin = 0, 0
        while number < len(self._taken) and self._taken[number][0] - begin < nbytes:
            number, begin = number + 1, self._taken[number][1]
        if len(self._taken) >= _MOST or (self._taken and begin + nbytes > _MOST_BYTES):
            return None
        place = begin, begin + nbytes
        self._taken.insert(number, place)
        self._order.append(place)
        self.sent += 1
        return begin

    def release(self, out: int) -> None:
        """Free the places of the messages that the other process has copied out, ``out`` of them in total."""
        for _ in range(out - self.out):
            self._taken.remove(self._order.popleft())
        self.out = out

    @property
    def are_filling(self) -> bool:
        """Whether it is time to ask what the other process has copied out."""
        return len(self._taken) > _MOST // 2 or (len(self._taken) > 1 and self._taken[-1][1] > _MOST_BYTES // 2)


class Mailbox:
    """A connection of two processes of one host with all their channels; an instance is one end of it.

    It is the sending and the receiving end of its channels, as :class:`Sender` and :class:`Receiver` are of a line.

    Args:
        peer: global rank of the other end.
        door: socket to the other end.
        mine: memory that this end writes, as a file.
        theirs: memory that the other end writes, as a file.

    Attributes:
        routes: routes of the open channels.
    """

    in_parts = False

    def __init__(self, peer: int, door: socket.socket, mine: Any, theirs: Any) -> None:
        self.peer, self.port = peer, port_of(_CPU)
        self.routes: set[Route] = set()
        self._door, self._mine, self._theirs = door, SharedMemory(mine), SharedMemory(theirs)
        door.setblocking(False)
        self._shut = weakref.finalize(self, close_all, os.getpid(), door, mine, theirs)
        self._arrivals: Arrivals | None = None
        self._lost: PeerError | None = None
        self._lock = threading.RLock()  # threads of lines may put messages that they forward
        self._opening = 0
        # what has arrived, by opening, since the other end may be ahead; including channels that are not open yet
        self._readings: defaultdict[int, tuple[ReceivedStructures, dict[Route, NetworkInbox]]]
        self._readings = defaultdict(lambda: (ReceivedStructures(), {}))
        self._numbering = Numbering()
        self._queue: deque[Outgoing] = deque()
        self._places = Places()
        self._asked = 0  # number of messages that had been sent when an answer was last asked for
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
        """Close a channel. Closing the last one waits up to ``join_s`` seconds until all messages are sent."""
        self.routes.discard(route)
        self._readings[self._opening][1].pop(route, None)
        if not self.routes:
            self._readings.pop(self._opening)
            if self._arrivals is not None:
                self._arrivals.wait_for(lambda: not self._queue or self._lost is not None, join_s)

    def close(self) -> None:
        """Close the connection; messages that are queued are not sent."""
        self._lose(None, "it was given up")
        self._shut()

    def _open(self, arrivals: Arrivals) -> None:
        if not self.routes:
            self._opening += 1
            self._numbering = Numbering()
            self._queue.clear()
        if arrivals is not self._arrivals and self._lost is None:
            if self._arrivals is not None:
                self._arrivals.ignore(self._door)
            arrivals.listen(self._door, self.look)
        self._arrivals = arrivals

    def _inbox(self, opening: int, route: Route) -> NetworkInbox:
        _, inboxes = self._readings[opening]
        if route not in inboxes:
            inboxes[route] = NetworkInbox(route, self)
        return inboxes[route]

    def expect(self, inbox: NetworkInbox, expected: Sequence[tuple[Sequence[Traffic], NetworkOutbox | None]]) -> None:
        """Expect further messages of a channel."""
        assert self._arrivals is not None
        with self._lock:
            inbox.expected.extend(expected)
            inbox.hand_in()
            if inbox.expected and self._lost is not None:
                self._arrivals.fail(self._lost)

    # -- sending -------------------------------------------------------------------------------------------------------

    def put(self, outgoing: Outgoing) -> None:
        """Send a message, or queue it if there is no room; return without waiting.

        Raises:
            UnsendableError: the message has something that cannot be pickled; it is not sent.
        """
        assert self._arrivals is not None
        with self._lock:
            outgoing.head = self._numbering.head(outgoing.route, outgoing.message)
            self._queue.append(outgoing)
            self._send_queued()
            if self._queue:
                self.look()
                self._arrivals.notify()  # another thread may be waiting for a message that look() has taken in
            if self._lost is not None:
                self._arrivals.fail(self._lost)

    def _send_queued(self) -> None:
        while self._lost is None and self._queue:
            if not self._post(self._queue[0]):
                if self._places.out >= self._asked:
                    self._tell(asks=True)
                return
            self._queue.popleft()

    def _post(self, outgoing: Outgoing) -> bool:
        """Send a message if there is room, and return whether it was sent."""
        assert outgoing.head is not None
        message, (structure, channel, text) = outgoing.message, outgoing.head
        behind = aligned(len(text))
        nbytes = behind + aligned(structure.whole.nbytes) or aligned(1)
        first = self._places.take(nbytes)
        if first is None:
            return False
        with contextlib.ExitStack() as sending:
            for observer in outgoing.observers:
                sending.enter_context(observer.sending(outgoing.route, message.micro_batch, None))
            self._mine.reserve(first + nbytes)
            if text:
                self._mine.bytes(first, len(text)).numpy()[:] = np.frombuffer(text, np.uint8)
            places = self._mine.tensors(first + behind, structure, self._opening)
            for place, tensor in zip(places, message.tensors, strict=True):
                if place is not None and tensor is not None:
                    place.copy_(tensor.detach())
            self._tell(first, len(text), nbytes, structure.number, channel, message.micro_batch)
        return True

    def _tell(self, *record: int, asks: bool = False) -> None:
        """Send a record. It asks for an answer if ``asks`` or memory fills up, unless an earlier question is open."""
        asks = (asks or self._places.are_filling) and self._places.out >= self._asked
        if asks:
            self._asked = self._places.sent
        told = _RECORD.pack(self._opening, *(record or _NO_MESSAGE), self._out, asks, host_now())
        try:
            self._door.send(told, socket.MSG_NOSIGNAL)
        except OSError as error:
            self._read()  # what the other end sent before it closed
            self._lose(error, "sending")

    # -- receiving -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what has arrived, and send what is queued."""
        with self._lock:
            self._read()
            self._send_queued()

    def _read(self) -> None:
        while self._lost is None:
            try:
                record = self._door.recv(_RECORD.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the other end closed with records unread; records from it may still be here
                continue
            if not record:
                self._lose(None, "receiving")
                return
            opening, first, text, nbytes, number, channel, micro_batch, out, asks, at_s = _RECORD.unpack(record)
            self._places.release(out)
            if nbytes:
                self._receive(opening, first, text, number, channel, micro_batch, at_s)
                self._out += 1
            if asks:
                self._tell()

    def _receive(
        self, opening: int, first: int, nbytes: int, number: int, channel: int, micro_batch: int, at_s: float
    ) -> None:
        if opening < self._opening or (opening == self._opening and not self.routes):
            return  # the message belongs to channels that are closed
        text = self._theirs.bytes(first, nbytes).numpy().data if nbytes else b""
        route, structure = self._readings[opening][0].find(number, channel, text)
        tensors = structure.bare(_CPU)
        with torch.inference_mode(False):  # the message may be used outside of inference mode
            for i, place in enumerate(self._theirs.tensors(first + aligned(nbytes), structure, opening)):
                if place is not None:
                    tensors[i] = place.clone()
        inbox = self._inbox(opening, route)
        inbox.early.append((structure.message(micro_batch, tensors), None, at_s))
        inbox.hand_in()
        if self._arrivals is not None:
            self._arrivals.moved()

    def _lose(self, error: OSError | None, doing: str) -> None:
        """Note that the connection broke, and fail if a message is expected."""
        if self._lost is not None:
            return
        if self._arrivals is not None:
            self._arrivals.ignore(self._door)
        _, inboxes = self._readings[self._opening]
        awaited = next((inbox.route for inbox in inboxes.values() if inbox.expected), None)
        self._lost = lost_connection(self.peer, doing, awaited, error)
        if awaited is not None and self._arrivals is not None:
            self._arrivals.fail(self._lost)


# -- connecting --------------------------------------------------------------------------------------------------------


def meet(store: dist.Store, rank: int, peer: int, limit: timedelta, wanted: bool) -> Mailbox | None:
    """Connect two processes if they are on one host and in one network namespace. Both call it.

    Args:
        store: store that only these two processes use, for this call only.
        rank: global rank of this process.
        peer: global rank of the other one.
        limit: longest time that connecting may take.
        wanted: whether this process may use a mailbox.

    Returns:
        This end of the mailbox; None on both if there is none.

    Raises:
        DistNetworkError: the other process ended before both were connected.
    """
    memory, door, token = None, None, ""
    if wanted and sys.platform == "linux":
        try:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            door.settimeout(limit.total_seconds())
            if rank < peer:
                token = secrets.token_hex(16)
                door.bind(_address(token))
                door.listen()
            memory = os.fdopen(os.memfd_create("avgpipe"), "r+b", buffering=0)
        except (OSError, AttributeError) as error:
            _log.warning("rank %d sends to rank %d over the network: no memory can be shared (%s)", rank, peer, error)
    try:
        with door or contextlib.nullcontext():
            if rank < peer:
                found = _answer(store, door, memory, token if memory is not None else "", limit)
            else:
                found = _call(store, door, memory, limit)
        if found is None:
            if memory is not None:
                memory.close()
            return None
        other, file = found
        return Mailbox(peer, other, memory, os.fdopen(file, "r+b", buffering=0))
    except (OSError, IndexError) as error:  # no file came
        raise dist.DistNetworkError(f"rank {peer} ended while it connected with rank {rank} ({error})") from error


def _answer(
    store: dist.Store, listener: Any, memory: Any, token: str, limit: timedelta
) -> tuple[socket.socket, int] | None:
    """Accept the other process's connection and exchange memory files; return the socket, and its file's descriptor."""
    store.set("token", token)
    if _awaited(store, "found", limit) != b"yes":
        return None
    while True:
        door, _ = listener.accept()
        door.settimeout(limit.total_seconds())
        said, files, *_ = socket.recv_fds(door, len(token), 1)
        if secrets.compare_digest(said, token.encode()):
            break
        door.close()  # a connection of another program
    socket.send_fds(door, [b"\0"], [memory.fileno()])
    return door, files[0]


def _call(store: dist.Store, door: Any, memory: Any, limit: timedelta) -> tuple[socket.socket, int] | None:
    """Connect to the other process and exchange memory files; return the socket to it, and its file's descriptor."""
    token = _awaited(store, "token", limit).decode()
    found = bool(token) and memory is not None and door.connect_ex(_address(token)) == 0
    store.set("found", "yes" if found else "no")
    if not found:
        return None
    socket.send_fds(door, [token.encode()], [memory.fileno()])
    _, files, *_ = socket.recv_fds(door, 1, 1)
    return door.dup(), files[0]


def _awaited(store: dist.Store, key: str, limit: timedelta) -> bytes:
    """Return the value of a key that the other process sets within a limit, which may exceed the store's timeout."""
    store.wait([key], limit)
    return store.get(key)


def _address(token: str) -> str:
    return f"\0avgpipe-{token[: len(token) // 2]}"  # the other half is the secret
