"""Channels between processes. All those from one process to another share a line: one wire, and a thread at each end.

::

    process 0   channel a --+                                             +-- channel a   process 1
                channel b --+-- Sender == a0 b0 a1 news b1 ==> Receiver --+-- channel b
                news      --+             in the order in which           +-- news
                                          they were put

Threads wait for the network, because gloo's works cannot be polled. What waits for nothing is sent by whoever puts it:
a computing thread lets others run now and then only, and the sender's would begin milliseconds later.

Sends are rendezvous: gloo sends nothing before its peer has said that it receives, and that word waits behind what else
is on its link, so receives are posted for what is expected, and for what usually comes. Each direction has a process
group of its own, because two on one get in each other's way. Between devices a send holds up its stream until it is
received; so each direction has a communicator and a stream, and both ends begin with tensors in the frames' order.

Nobody waits for ever: while any message is owed to a process its receiver takes whatever comes, in order, also what is
not expected yet, so nothing stays before a message that somebody waits for. And what passes a process is sent on in its
turn with parts that are on their way already: whoever waits for them waits for a line nearer to where they began.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channel import Outbox, Traffic
from lightning_avgpipe.comm.codec import CAPACITY, FRAMES, REST, FrameReader, FrameWriter, Opened, Packet
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.wire import Passage, Posted, Wire

_MOST_POSTED = 4  # structures that are received unannounced: a receive cannot be taken back, and holds its memory
_MOST_FRAMES = 4  # that are awaited


@dataclass
class _Outgoing:
    """A message that is to be sent.

    Attributes:
        route: of its channel.
        message: of its.
        ready: an event after which it may be read, a passage by which its packets come, or None: it is there.
        observers: are told.
        flats: its packets, if they come by a passage.
        works: of its transfer, if it has begun.
    """

    route: Route
    message: Message
    ready: Any = None
    observers: Sequence[Traffic] = ()
    flats: Sequence[Tensor] = ()
    works: Sequence[Any] | None = None


class Sender:
    """The sending end of a line.

    Args:
        wire: to the other end.
        arrivals: told when sending fails.

    Attributes:
        routes: the channels that are open; with the last one it ends.
    """

    def __init__(self, wire: Wire, arrivals: Arrivals) -> None:
        self.wire = wire
        self.routes: set[Route] = set()
        self._arrivals = arrivals
        self._frames = FrameWriter()
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._waiting = 0  # messages that have not begun
        self._sending: Route | None = None
        self._thread = threading.Thread(target=self._work, name=f"avgpipe send to rank {wire.peer}", daemon=True)
        self._thread.start()

    def put(self, outgoing: _Outgoing) -> None:
        """Send in turn; returns at once."""
        for observer in outgoing.observers:
            observer.queued()
        with self._order:
            # observers see the thread send
            if not self._waiting and outgoing.ready is None and not outgoing.observers and self.wire.sends_at_once:
                try:
                    outgoing.works = self._begin(outgoing)
                except Exception as error:  # as in the thread
                    self._fail(error, outgoing.route)
            self._waiting += outgoing.works is None
            self._queue.put(outgoing)

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. After the last one the thread ends when what is queued is sent, or cannot be any more."""
        self.routes.discard(route)
        if not self.routes:
            self._queue.put(None)
            self._thread.join(join_s)

    def _work(self) -> None:
        try:
            self.wire.port.enter_thread()
            while self._send_next():
                pass
        except Exception as error:  # handed to the executor, which names stage and action
            self._fail(error, self._sending)

    def _fail(self, error: Exception, route: Route | None) -> None:
        self._arrivals.fail(self.wire.broken(error, "sending", route))

    def _send_next(self) -> bool:
        # a frame of its own: a thread that waits for the next message keeps no tensor of the last one alive
        outgoing = self._queue.get()
        if outgoing is None:
            return False
        self._sending = outgoing.route
        if outgoing.works is None:
            with self._observed(outgoing):
                works = self._begin(outgoing)
                with self._order:
                    self._waiting -= 1
                self.wire.end(works)
        else:
            self.wire.end(outgoing.works)
        return True

    @contextlib.contextmanager
    def _observed(self, outgoing: _Outgoing) -> Iterator[None]:
        stream = self.wire.transfer_stream if outgoing.observers else None
        if stream is not None and outgoing.ready is not None:
            stream.wait_event(outgoing.ready)  # sending begins when there is something to send
        with contextlib.ExitStack() as sending:
            for observer in outgoing.observers:
                sending.enter_context(observer.sending(outgoing.route, outgoing.message.micro_batch, stream))
            yield

    def _begin(self, outgoing: _Outgoing) -> list[Any]:
        message, ready = outgoing.message, outgoing.ready
        (frame, *rest), packets, tag = self._frames.write(outgoing.route, message)
        works = [*self.wire.begin(frame, tag=FRAMES)]
        for part in rest:
            works += self.wire.begin(part, tag=REST)
        passage = ready if isinstance(ready, Passage) else None
        for flat in outgoing.flats or self.wire.load(packets, message, ready):
            works += self.wire.begin(flat, message.segments, tag, passage)
        return works


class NetworkOutbox:
    """The sending end of a channel to another process.

    Args:
        route: for messages.
        sender: of the line to it.
    """

    def __init__(self, route: Route, sender: Sender) -> None:
        self._route = route
        self._sender = sender
        sender.routes.add(route)

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Send, and tell the observers; returns at once."""
        # what is on the host is there: news and batches wait for no work of the device
        on_host = all(tensor is None or tensor.is_cpu for tensor in message.tensors)
        self.pass_on(message, None if on_host else self._sender.wire.port.event(), observers)

    def pass_on(self, message: Message, ready: Any, observers: Sequence[Traffic], flats: Sequence[Tensor] = ()) -> None:
        """Send what another process has sent: after an event, or its packets as they come by a passage."""
        self._sender.put(_Outgoing(self._route, message, ready, observers, flats))

    def close(self, join_s: float) -> None:
        """Send what is queued, and no more; see :meth:`Sender.leave`."""
        self._sender.leave(self._route, join_s)


@dataclass(frozen=True)
class _Mail:
    """What comes on one channel.

    Attributes:
        expected: observers of each message that is expected and not there, and where it goes on.
        early: what has come before it was expected, and an event after which it may be read, or None.
        arrived: the same of what may be taken.
    """

    expected: deque[tuple[Sequence[Traffic], NetworkOutbox | None]] = field(default_factory=deque)
    early: deque[tuple[Message, Any]] = field(default_factory=deque)
    arrived: deque[tuple[Message, Any]] = field(default_factory=deque)


class _Posts:
    """Receives that are posted before it is announced what they receive.

    Args:
        wire: to the other end.

    Attributes:
        frames: that are awaited, each with its works, and the one whose message comes: no more than messages are owed.
    """

    def __init__(self, wire: Wire) -> None:
        self.frames: deque[tuple[Tensor, Sequence[Any]]] = deque()
        self._wire = wire
        self._spare: list[Tensor] = []
        self._packets: dict[int, list[Posted]] = {}  # by tag

    def await_frames(self, owed: int) -> None:
        """So many messages will come, or more."""
        while len(self.frames) < min(owed, _MOST_FRAMES):
            frame = self._spare.pop() if self._spare else torch.empty(CAPACITY, dtype=torch.uint8)
            self.frames.append((frame, self._wire.take(frame, tag=FRAMES)))

    def frame_read(self) -> None:
        """All that the first frame said has come; what was in it has been copied."""
        self._spare.append(self.frames.popleft()[0])

    def await_packets(self, tag: int, packets: Sequence[Packet], segments: int) -> None:
        """These come usually."""
        if tag not in self._packets and len(self._packets) < _MOST_POSTED:
            self._packets[tag] = self._post(tag, packets, segments)

    def packets(self, opened: Opened) -> list[Posted]:
        """Those of a message."""
        known = self._packets.pop(opened.tag, None)
        return self._post(opened.tag, opened.packets, opened.partial.segments) if known is None else known

    def _post(self, tag: int, packets: Sequence[Packet], segments: int) -> list[Posted]:
        return [self._wire.post(packet, segments, tag) for packet in packets]


class Receiver:
    """The receiving end of a line. Arguments and attributes as of :class:`Sender`."""

    def __init__(self, wire: Wire, arrivals: Arrivals) -> None:
        self.wire = wire
        self.routes: set[Route] = set()
        self._mail: dict[Route, _Mail] = defaultdict(_Mail)
        self._receiving: Route | None = None
        self._arrivals = arrivals
        self._reader = FrameReader(wire.device)
        self._posts = _Posts(wire)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"avgpipe receive from rank {wire.peer}", daemon=True)
        self._thread.start()

    def arrived(self, route: Route) -> deque[tuple[Message, Any]]:
        """Messages of a channel, which is open from now on, with events after which they may be read."""
        with self._changed:
            self.routes.add(route)
            return self._mail[route].arrived

    def expect(self, route: Route, count: int, observers: Sequence[Traffic], onwards: NetworkOutbox | None) -> None:
        """So many further messages are owed to a channel."""
        with self._changed:
            self._mail[route].expected.extend([(observers, onwards)] * count)
            self._hand_in(route)
            try:
                self._posts.await_frames(self._owed())
            except Exception as error:  # as in the thread
                self._fail(error)
            self._changed.notify_all()

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. After the last one the thread ends; if it waits for a peer, when the connection does."""
        with self._changed:
            self.routes.discard(route)
            self._mail.pop(route, None)
            self._closing = not self.routes
            self._changed.notify_all()
        if self._closing:
            self._thread.join(join_s)

    def _work(self) -> None:
        try:
            self.wire.port.enter_thread()
            while self._receive_next():
                pass
        except Exception as error:  # handed to the executor, which names stage and action
            if not self._closing:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        awaited = self._receiving or next((route for route, mail in [*self._mail.items()] if mail.expected), None)
        self._arrivals.fail(self.wire.broken(error, "receiving", awaited))

    def _owed(self) -> int:
        return sum(len(mail.expected) for mail in self._mail.values())

    def _receive_next(self) -> bool:
        with self._changed:
            self._receiving = None
            self._changed.wait_for(lambda: self._posts.frames or self._closing)
            if self._closing:
                return False
            frame, works = self._posts.frames[0]
        if self._reader.usual is not None:
            self._posts.await_packets(*self._reader.usual)
        self.wire.end(works)
        self._receive(frame)
        return True

    def _receive(self, frame: Tensor) -> None:
        # a frame of its own, as in the sender: nothing of a message stays behind
        rest = None
        if missing := self._reader.missing(frame):
            rest = torch.empty(missing, dtype=torch.uint8)
            self.wire.end(self.wire.take(rest, tag=REST))
        opened = self._reader.read(frame, rest)
        self._receiving, posted = opened.route, self._posts.packets(opened)
        passage = self._let_pass(opened, posted) if posted and self.wire.port.is_host else None
        try:
            flats = [self.wire.land(one, passage) for one in posted]
        except Exception as error:
            if passage is not None:
                passage.came(error)
            raise
        message, event = opened.message(flats), None
        if any(tensor is not None and not tensor.is_cpu for tensor in message.tensors):
            with self.wire.port.on_stream(self.wire.stream):
                event = self.wire.port.event()
        with self._changed:
            self._posts.frame_read()
            self._mail[opened.route].early.append((message, event))
            self._hand_in(opened.route, passed=passage is not None)
            self._posts.await_frames(self._owed())

    def _let_pass(self, opened: Opened, posted: Sequence[Posted]) -> Passage | None:
        """Send a message on while its packets come, if it is expected and goes on."""
        with self._changed:
            expected = self._mail[opened.route].expected
            observers, onwards = expected[0] if expected else ((), None)
        if onwards is None:
            return None
        flats = [one.flat for one in posted if one.flat is not None]
        passage = Passage()
        onwards.pass_on(opened.message(flats), passage, observers, flats)
        return passage

    def _hand_in(self, route: Route, passed: bool = False) -> None:
        """Give what has come and is expected. Within the lock: messages go on in their order."""
        mail = self._mail[route]
        while mail.early and mail.expected:
            (message, event), (observers, onwards) = mail.early.popleft(), mail.expected.popleft()
            if onwards is not None and not passed:
                onwards.pass_on(message, event, observers)
            for observer in observers:
                observer.arrived(route, message.micro_batch, self.wire.transfer_stream)
            with self._arrivals.condition:
                mail.arrived.append((message, event))
                self._arrivals.condition.notify_all()


class NetworkInbox:
    """The receiving end of a channel from another process.

    Args:
        route: for messages.
        receiver: of the line from it.
    """

    def __init__(self, route: Route, receiver: Receiver) -> None:
        self._route = route
        self._receiver = receiver
        self._arrived = receiver.arrived(route)

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Post the receives of so many messages, of which the observers will be told, and which are passed on."""
        assert onwards is None or isinstance(onwards, NetworkOutbox)  # no neighbour of the stage is in this process
        self._receiver.expect(self._route, count, observers, onwards)

    def ready(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._arrived)

    def get(self) -> Message:
        """Take the oldest message; on an accelerator the current stream waits for its transfer, the host does not."""
        message, event = self._arrived.popleft()
        if event is not None:
            current = self._receiver.wire.port.current_stream()
            current.wait_event(event)
            for tensor in message.tensors:
                if tensor is not None and not tensor.is_cpu:
                    tensor.record_stream(current)
        return message

    def close(self, join_s: float) -> None:
        """Receive no more, and drop what was not taken; see :meth:`Receiver.leave`."""
        self._receiver.leave(self._route, join_s)
