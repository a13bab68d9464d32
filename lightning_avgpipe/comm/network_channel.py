"""Channels between processes. Those from one process to another share a line: a wire with a thread at each end.

::

    process 0   channel a --+                                             +-- channel a   process 1
                channel b --+-- Sender == a0 b0 a1 news b1 ==> Receiver --+-- channel b
                news      --+             in the order in which           +-- news
                                          they were put

Threads wait for the network, because gloo's works cannot be polled. A message that need not wait is sent by the thread
that puts it: while that thread computes, the sender's thread would get the interpreter milliseconds later.

Sends are rendezvous: gloo sends nothing before its peer has announced a receive, and this waits behind other traffic on
the link. So receives are posted in advance for what is expected, and for what usually comes. Each direction has a
process group of its own, because two directions on one delay each other. Between devices a send blocks its stream until
it is received; so each direction has a communicator and a stream, and both ends start transfers in the frames' order.

There is no deadlock: while a process expects any message, its receiver takes whatever comes, in order, also what is not
expected yet, so no message blocks one that is waited for. A message that a process sends on takes its turn on the next
line while its parts still arrive: the wait for them is a wait for a line nearer to their origin, so it ends.
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
from lightning_avgpipe.comm.codec import CAPACITY, FRAMES, REST, DecodedFrame, FrameReader, FrameWriter, Head, Packet
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.wire import Passage, Posted, Wire

_MOST_POSTED = 4  # structures with receives posted in advance: a receive cannot be cancelled, and holds its memory
_MOST_FRAMES = 4  # frames that are awaited at once


@dataclass
class _Outgoing:
    """A message that is to be sent.

    Attributes:
        route: route of its channel.
        message: message to send.
        ready: event after which its tensors may be read, a passage by which its packets arrive, or None: they may be
            read.
        observers: observers of the channel's messages.
        flats: its packets, if they arrive by a passage.
        works: works of its transfer, once it has begun.
        head: head of its frame, once its place in the order of all messages is fixed.
    """

    route: Route
    message: Message
    ready: Any = None
    observers: Sequence[Traffic] = ()
    flats: Sequence[Tensor] = ()
    works: Sequence[Any] | None = None
    head: Head | None = None


class Sender:
    """The sending end of a line.

    Args:
        wire: wire to the other end.
        arrivals: told when sending fails.

    Attributes:
        routes: routes of the open channels; the thread ends when the last one is closed.
    """

    def __init__(self, wire: Wire, arrivals: Arrivals) -> None:
        self.wire = wire
        self.routes: set[Route] = set()
        self._arrivals = arrivals
        self._frames = FrameWriter()
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._waiting = 0  # queued messages whose transfer has not begun
        self._sending: Route | None = None
        self._thread = threading.Thread(target=self._work, name=f"avgpipe send to rank {wire.peer}", daemon=True)
        self._thread.start()

    def put(self, outgoing: _Outgoing) -> None:
        """Send a message in its turn; returns at once.

        Raises:
            UnsendableError: the message has something that cannot be pickled; it is not sent.
        """
        for observer in outgoing.observers:
            observer.queued()
        with self._order:
            outgoing.head = self._frames.head(outgoing.route, outgoing.message)
            # an observed message is left to the thread, which sends within the observers' contexts
            if not self._waiting and outgoing.ready is None and not outgoing.observers and self.wire.sends_at_once:
                try:
                    outgoing.works = self._begin(outgoing)
                except Exception as error:  # as in the thread
                    self._fail(error, outgoing.route)
            self._waiting += outgoing.works is None
            self._queue.put(outgoing)

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. The last one ends the thread, once all queued messages are sent or can no longer be."""
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
        self._arrivals.fail(self.wire.failure(error, "sending", route))

    def _send_next(self) -> bool:
        # a stack frame of its own: a thread that waits for the next message keeps no tensor of the last one alive
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
        message, ready, head = outgoing.message, outgoing.ready, outgoing.head
        assert head is not None
        frame, *rest = self._frames.frame(head, message)
        works = [*self.wire.begin(frame, tag=FRAMES)]
        for part in rest:
            works += self.wire.begin(part, tag=REST)
        passage = ready if isinstance(ready, Passage) else None
        for flat in outgoing.flats or self.wire.load(head.packets, message, ready):
            works += self.wire.begin(flat, message.segments, head.tag, passage)
        return works


class NetworkOutbox:
    """The sending end of a channel to another process.

    Args:
        route: route of the channel.
        sender: sender of the line to the other process.
    """

    def __init__(self, route: Route, sender: Sender) -> None:
        self._route = route
        self._sender = sender
        sender.routes.add(route)

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Queue a message to be sent, and tell the observers; returns at once."""
        # tensors on the host are computed: they need no event of the device
        on_host = all(tensor is None or tensor.is_cpu for tensor in message.tensors)
        self.pass_on(message, None if on_host else self._sender.wire.port.event(), observers)

    def pass_on(self, message: Message, ready: Any, observers: Sequence[Traffic], flats: Sequence[Tensor] = ()) -> None:
        """Send a message, once ``ready`` has happened; or send its packets on as they arrive by a passage."""
        self._sender.put(_Outgoing(self._route, message, ready, observers, flats))

    def close(self, join_s: float) -> None:
        """Send what is queued, and no more; see :meth:`Sender.leave`."""
        self._sender.leave(self._route, join_s)


@dataclass(frozen=True)
class _Mail:
    """The messages of one channel.

    Attributes:
        expected: for each message that is expected and has not arrived, its observers and the outbox that it is sent on
            to.
        early: messages that arrived before they were expected, each with an event after which it may be read, or None.
        arrived: messages that may be taken, each with such an event or None.
    """

    expected: deque[tuple[Sequence[Traffic], NetworkOutbox | None]] = field(default_factory=deque)
    early: deque[tuple[Message, Any]] = field(default_factory=deque)
    arrived: deque[tuple[Message, Any]] = field(default_factory=deque)


class _Posts:
    """The receives that are posted before the other end announces what it sends.

    Args:
        wire: wire to the other end.

    Attributes:
        frames: frames that are awaited, each with its works, and the one whose message is being received; at most as
            many as messages are expected.
    """

    def __init__(self, wire: Wire) -> None:
        self.frames: deque[tuple[Tensor, Sequence[Any]]] = deque()
        self._wire = wire
        self._spare: list[Tensor] = []
        self._packets: dict[int, list[Posted]] = {}  # by tag

    def await_frames(self, owed: int) -> None:
        """Post receives of frames, as at least ``owed`` messages will come."""
        while len(self.frames) < min(owed, _MOST_FRAMES):
            frame = self._spare.pop() if self._spare else torch.empty(CAPACITY, dtype=torch.uint8, device="cpu")
            self.frames.append((frame, self._wire.take(frame, tag=FRAMES)))

    def frame_read(self) -> None:
        """Release the first frame: its whole message has arrived, and what was in the frame has been copied."""
        self._spare.append(self.frames.popleft()[0])

    def await_packets(self, tag: int, packets: Sequence[Packet], segments: int) -> None:
        """Post receives of the packets of a structure that usually comes."""
        if tag not in self._packets and len(self._packets) < _MOST_POSTED:
            self._packets[tag] = self._post(tag, packets, segments)

    def packets(self, opened: DecodedFrame) -> list[Posted]:
        """Return the receives of the packets of a message; those that are not posted yet are posted now."""
        known = self._packets.pop(opened.tag, None)
        return self._post(opened.tag, opened.packets, opened.partial.segments) if known is None else known

    def _post(self, tag: int, packets: Sequence[Packet], segments: int) -> list[Posted]:
        return [self._wire.post(packet, segments, tag) for packet in packets]


class Receiver:
    """The receiving end of a line. Arguments and attributes are those of :class:`Sender`."""

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
        """Open a channel and return its queue of messages to take, each with an event to wait for or None."""
        with self._changed:
            self.routes.add(route)
            return self._mail[route].arrived

    def expect(self, route: Route, count: int, observers: Sequence[Traffic], onwards: NetworkOutbox | None) -> None:
        """Expect ``count`` further messages on a channel."""
        with self._changed:
            self._mail[route].expected.extend([(observers, onwards)] * count)
            self._hand_in(route)
            try:
                self._posts.await_frames(self._owed())
            except Exception as error:  # as in the thread
                self._fail(error)
            self._changed.notify_all()

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. The last one ends the thread; a thread that waits for its peer ends with the connection."""
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
        self._arrivals.fail(self.wire.failure(error, "receiving", awaited))

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
        # a stack frame of its own, as in the sender: no local variable keeps a tensor of the message alive
        rest = None
        if missing := self._reader.missing(frame):
            rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
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

    def _let_pass(self, opened: DecodedFrame, posted: Sequence[Posted]) -> Passage | None:
        """Start to send a message on while its packets arrive, if it is expected and has an onward channel."""
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
        """Move messages that are expected from early to arrived. Hold the lock: they are sent on in their order."""
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
        route: route of the channel.
        receiver: receiver of the line from the other process.
    """

    def __init__(self, route: Route, receiver: Receiver) -> None:
        self._route = route
        self._receiver = receiver
        self._arrived = receiver.arrived(route)

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Post the receives of ``count`` messages, which are reported to the observers, and sent on to ``onwards``."""
        assert onwards is None or isinstance(onwards, NetworkOutbox)  # no neighbour of the stage is in this process
        self._receiver.expect(self._route, count, observers, onwards)

    def ready(self) -> bool:
        """Return whether a message has arrived."""
        return bool(self._arrived)

    def get(self) -> Message:
        """Take the oldest message. On an accelerator the current stream waits for its transfer; the host does not."""
        message, event = self._arrived.popleft()
        if event is not None:
            current = self._receiver.wire.port.current_stream()
            current.wait_event(event)
            for tensor in message.tensors:
                if tensor is not None and not tensor.is_cpu:
                    tensor.record_stream(current)
        return message

    def close(self, join_s: float) -> None:
        """Stop receiving, and drop messages that were not taken; see :meth:`Receiver.leave`."""
        self._receiver.leave(self._route, join_s)
