"""Lines: all channels from one process to another share a line, which is a wire with a thread at each end.

::

    process 0   channel a --+                                             +-- channel a   process 1
                channel b --+-- Sender == a0 b0 a1 news b1 ==> Receiver --+-- channel b
                news      --+             in the order in which           +-- news
                                          they were put

Threads wait for the network, because gloo's works cannot be polled. A message that need not wait is sent by the thread
that puts it: if that thread goes on to compute, the sender's thread may get the interpreter milliseconds later.

A send is a rendezvous: gloo sends nothing before its peer has announced a receive, and the announcement queues behind
other traffic on the link. So receives are posted in advance, for expected messages and for packets that usually come.
Each direction has a process group of its own, because two directions in one group delay each other.

Between devices each direction has a communicator and a stream, and both ends start transfers in the order of the
frames. A device has fewer hardware queues than streams, and work that waits at the head of a queue blocks all streams
that share it. So a send is queued before its frame is sent, a receive after the frame has arrived, and no stream waits
for the end of a send::

    sender      | send queued | frame ------>
    receiver                       frame | receive queued | work that needs it       each waits for earlier entries only

There is no deadlock. While a process expects any message, its receiver takes every message that arrives, in order and
expected or not, so no message blocks another one that is awaited. A forwarded message takes its turn on the next line
while its parts still arrive; that line waits only for a line nearer to the message's origin, so the wait ends.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.channel import Outbox, Traffic
from lightning_avgpipe.comm.codec import (
    CAPACITY,
    FRAMES,
    MOST_TAGS,
    REST,
    Head,
    Numbering,
    Packet,
    ReceivedStructures,
    Structure,
    bytes_after,
    frame_of,
    read_frame,
)
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Route
from lightning_avgpipe.comm.transfer import Arrivals, finish_transfer, is_broken_connection, start_transfer
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import port_of

if TYPE_CHECKING:
    from lightning_avgpipe.comm.mailbox import Mailbox

_MOST_POSTED = 4  # structures with receives posted in advance: a receive cannot be cancelled, and holds its memory
_MOST_FRAMES = 4  # frames that are awaited at once


def lost_connection(peer: int, doing: str, route: Route | None, error: Exception | None) -> PeerError:
    """Return an error that says that a connection broke.

    Args:
        peer: global rank of the other end.
        doing: what this end was doing, for the message.
        route: route of the channel that was in use; None if there is none.
        error: the cause; None if the other end has closed the connection.
    """
    why = "" if error is None else f": {error}"
    lost = PeerError(f"the connection to rank {peer} broke while {doing}{_on(route)}{why}")
    lost.__cause__ = error
    return lost


def _on(route: Route | None) -> str:
    return "" if route is None else f" on channel '{route}'"


# -- wires -------------------------------------------------------------------------------------------------------------


class Passage:
    """A message that is forwarded while it arrives: the receiving thread tells the sending one of each part."""

    def __init__(self) -> None:
        self._parts: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def arrived(self, error: Exception | None = None) -> None:
        """Note that the next part has arrived or, with an error, that no more will."""
        self._parts.put(error)

    def wait(self) -> None:
        """Wait for the next part, or raise the error because of which it will not arrive."""
        if (error := self._parts.get()) is not None:
            raise error


@dataclass(frozen=True)
class Pair:
    """A connection of two processes.

    Attributes:
        group: process group of torch.
        peer: rank of the other process in it.
    """

    group: Any
    peer: int


@dataclass(frozen=True)
class Posted:
    """A packet whose receive is posted, or will be.

    Attributes:
        packet: packet to receive.
        flat: host memory that receives its bytes; None if a device receives them when :meth:`Wire.finish_receive` is
            called.
        works: works of the transfer.
    """

    packet: Packet
    flat: Tensor | None
    works: Sequence[Any]


class Wire:
    """A one-way connection that moves bytes from one process to another; an instance is one end of it.

    Args:
        peer: global rank of the other end.
        on_host: connection of the two processes on the host.
        device: device of tensors on this end.
        between: connection of the two devices; None moves tensors of devices over the host.
        arrivals: notified when bytes have moved, and when this end fails.
        opening: number of earlier wires on the connection, the same at both ends. It determines the tags, so that a
            receive that an earlier wire left uncompleted does not take bytes of this one.
    """

    def __init__(
        self, peer: int, on_host: Pair, device: torch.device, between: Pair | None, arrivals: Arrivals, opening: int = 0
    ) -> None:
        self.peer, self.device, self.arrivals = peer, device, arrivals
        # process groups are called directly: the checks of dist.send take longer than the transfer of a small tensor
        self._on_host, self._between = on_host, between
        self._first_tag = opening * MOST_TAGS
        self._sending: deque[tuple[Any, Tensor]] = deque()  # works of sends between devices, with what they read
        self.port = port_of(device)

    @functools.cached_property
    def stream(self) -> Any:
        """The stream on which tensors travel, so that transfers overlap with compute; None where there are no streams.

        Streams are a scarce resource, so a wire that moves only tensors of the host makes none.
        """
        return self.port.new_stream()

    @property
    def connects_devices(self) -> bool:
        """Whether tensors of devices travel directly between the devices, and not over the hosts."""
        return self._between is not None

    @property
    def transfer_stream(self) -> Any:
        """The stream of the transfers themselves; None if the host moves tensors."""
        return self.stream if self.connects_devices else None

    def fail(self, error: Exception, doing: str, route: Route | None) -> None:
        """Report that this end has failed: with a PeerError if the connection broke, else with the error itself."""
        if is_broken_connection(error):
            error = lost_connection(self.peer, doing, route, error)
        else:
            error.add_note(f"while {doing}{_on(route)}, which connects this process with rank {self.peer}")
        self.arrivals.fail(error)

    @property
    def sends_at_once(self) -> bool:
        """Whether any thread may start a send, because starting one does not block."""
        return self.port.is_host

    def load(self, packets: Sequence[Packet], message: Message, ready: Any) -> list[Tensor]:
        """Return the bytes of packets, in the memory from which they travel.

        Tensors of the device are read after the event ``ready``. If they travel over the host, this method waits until
        they have been copied there.
        """
        if all(packet.on_host for packet in packets) or self.stream is None:
            return [packet.packed(message) for packet in packets]
        with self.port.on_stream(self.stream):
            for tensor in message.tensors:
                if tensor is not None and not tensor.is_cpu:  # its owner may free it before it has been read
                    self.port.record_use(tensor)
            self.stream.wait_event(ready)
            flats = [packet.packed(message) for packet in packets]
            if self._between is None:
                flats = [flat.to("cpu", non_blocking=True) for flat in flats]
                self.port.event().synchronize()
        return flats

    def begin(self, flat: Tensor, pieces: int = 1, tag: int = 0, passage: Passage | None = None) -> Sequence[Any]:
        """Start to send bytes from :meth:`load`, or a passage's parts as they arrive; return works for :meth:`end`."""
        if not flat.is_cpu:
            assert self._between is not None
            while self._sending and self._sending[0][0].is_completed():
                self._sending.popleft()
            with self.port.on_stream(self.stream):
                self._sending.append((self._between.group.send([flat], self._between.peer, 0), flat))
            return ()

        def send_part(part: Tensor) -> Any:
            if passage is not None:
                passage.wait()
            return self._on_host.group.send([part], self._on_host.peer, self._first_tag + tag)

        return start_transfer(send_part, flat, pieces)

    def end(self, works: Sequence[Any]) -> None:
        """Wait until a transfer on the host is done."""
        finish_transfer(works, self.arrivals.moved)

    def follow_sends(self) -> None:
        """Make the wire's stream wait for the sends between devices that were started, to time them or to finish."""
        while self._sending:
            work, flat = self._sending.popleft()
            with self.port.on_stream(self.stream):
                work.wait()  # blocks the stream, not the host
                self.port.record_use(flat)

    def start_receive(self, flat: Tensor, pieces: int = 1, tag: int = 0) -> Sequence[Any]:
        """Start to receive bytes on the host, and return works for :meth:`end`."""
        own = self._first_tag + tag
        return start_transfer(lambda part: self._on_host.group.recv([part], self._on_host.peer, own), flat, pieces)

    def post(self, packet: Packet, pieces: int = 1, tag: int = 0) -> Posted:
        """Post the receive of a packet; between devices it is posted later, by :meth:`finish_receive`."""
        on_host = packet.on_host or self.port.is_host
        if not on_host and self._between is not None:
            return Posted(packet, None, ())
        flat = torch.empty(packet.nbytes, dtype=torch.uint8, pin_memory=not on_host, device="cpu")
        return Posted(packet, flat, self.start_receive(flat, pieces, tag))

    def finish_receive(self, posted: Posted, passage: Passage | None = None) -> Tensor:
        """Wait for a packet and return its bytes. A passage, if given, is notified of each part, to forward it.

        On a device the bytes are valid once the wire's stream reaches this point.
        """

        def moved() -> None:
            self.arrivals.moved()
            if passage is not None:
                passage.arrived()

        finish_transfer(posted.works, moved)
        if posted.flat is not None and (posted.packet.on_host or self.stream is None):
            return posted.flat
        with self.port.on_stream(self.stream):
            if posted.flat is not None:
                return posted.flat.to(self.device, non_blocking=True)
            assert self._between is not None
            flat = torch.empty(posted.packet.nbytes, dtype=torch.uint8, device=self.device)
            self._between.group.recv([flat], self._between.peer, 0).wait()  # blocks the stream, not the host
            return flat


# -- senders and receivers ---------------------------------------------------------------------------------------------


@dataclass
class Outgoing:
    """A message that is to be sent.

    Attributes:
        route: route of its channel.
        message: message to send.
        ready: event after which its tensors may be read, or the passage of a message that still arrives; None: the
            tensors may be read now.
        observers: observers of the channel's messages.
        flats: memory in which its packets arrive, if ``ready`` is a passage.
        works: works of its transfer, once it has begun.
        head: head of the message, once its position in the order of all messages is fixed.
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

    Attributes:
        routes: routes of the open channels; the thread ends when the last one is closed.
    """

    in_parts = True

    def __init__(self, wire: Wire) -> None:
        self.wire, self.port = wire, wire.port
        self.routes: set[Route] = set()
        self._numbering = Numbering()
        self._queue: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._waiting = 0  # queued messages whose transfer has not begun
        self._sending: Route | None = None
        self._thread = threading.Thread(target=self._work, name=f"avgpipe send to rank {wire.peer}", daemon=True)
        self._thread.start()

    def put(self, outgoing: Outgoing) -> None:
        """Send a message after those that were put before it; return without waiting.

        Raises:
            UnsendableError: the message has something that cannot be pickled; it is not sent.
        """
        with self._order:
            outgoing.head = self._numbering.head(outgoing.route, outgoing.message)
            # an observed message is left to the thread, which sends within the observers' contexts
            if not self._waiting and outgoing.ready is None and not outgoing.observers and self.wire.sends_at_once:
                try:
                    outgoing.works = self._begin(outgoing)
                except Exception as error:  # as in the thread
                    self.wire.fail(error, "sending", outgoing.route)
            self._waiting += outgoing.works is None
            self._queue.put(outgoing)

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. Closing the last one ends the thread, after all queued messages were sent or have failed."""
        self.routes.discard(route)
        if not self.routes:
            self._queue.put(None)
            self._thread.join(join_s)

    def _work(self) -> None:
        try:
            self.wire.port.enter_thread()
            while self._send_next():
                pass
            self.wire.follow_sends()
        except Exception as error:  # handed to the executor, which names stage and action
            self.wire.fail(error, "sending", self._sending)

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
    def _observed(self, outgoing: Outgoing) -> Iterator[None]:
        stream = self.wire.transfer_stream if outgoing.observers else None
        if stream is not None and outgoing.ready is not None:
            stream.wait_event(outgoing.ready)  # observed times begin when there is something to send
        with contextlib.ExitStack() as sending:
            for observer in outgoing.observers:
                sending.enter_context(observer.sending(outgoing.route, outgoing.message.micro_batch, stream))
            yield
            if stream is not None:
                self.wire.follow_sends()

    def _begin(self, outgoing: Outgoing) -> list[Any]:
        message, ready, head = outgoing.message, outgoing.ready, outgoing.head
        assert head is not None
        (_, packets), tag = head.structure.packets, head.structure.tag
        flats: Sequence[Tensor] | None = outgoing.flats or None
        if self.wire.connects_devices and flats is None:
            flats = self.wire.load(packets, message, ready)
            for flat in flats:
                if not flat.is_cpu:  # before the frame, see the docstring of the module
                    self.wire.begin(flat)
        frame, *rest = frame_of(head, message)
        works = [*self.wire.begin(frame, tag=FRAMES)]
        for part in rest:
            works += self.wire.begin(part, tag=REST)
        passage = ready if isinstance(ready, Passage) else None
        for flat in self.wire.load(packets, message, ready) if flats is None else flats:
            if flat.is_cpu:
                works += self.wire.begin(flat, message.segments, tag, passage)
        return works


class NetworkOutbox:
    """The sending end of a channel to another process.

    Args:
        route: route of the channel.
        sender: sending end of all channels to the other process.
    """

    def __init__(self, route: Route, sender: Sender | Mailbox) -> None:
        self._route = route
        self._sender = sender
        sender.routes.add(route)

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Queue a message to be sent, notify the observers, and return without waiting."""
        # tensors on the host are already computed, so they need no event of the device
        on_host = all(tensor is None or tensor.is_cpu for tensor in message.tensors)
        self.pass_on(message, None if on_host else self._sender.port.event(), observers)

    @property
    def in_parts(self) -> bool:
        """Whether a message may be forwarded while it arrives."""
        return self._sender.in_parts

    def pass_on(self, message: Message, ready: Any, observers: Sequence[Traffic], flats: Sequence[Tensor] = ()) -> None:
        """Send a message once the event ``ready`` has happened or, if ``ready`` is a passage, as its parts arrive."""
        for observer in observers:
            observer.queued()
        self._sender.put(Outgoing(self._route, message, ready, observers, flats))

    def close(self, join_s: float) -> None:
        """Close the channel after all queued messages are sent; see :meth:`Sender.leave`."""
        self._sender.leave(self._route, join_s)


class Receiver:
    """The receiving end of a line. Arguments and attributes are those of :class:`Sender`."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.port = wire, wire.port
        self.routes: set[Route] = set()
        self._inboxes: dict[Route, NetworkInbox] = {}  # including those of channels that are not open yet
        self._receiving: Route | None = None
        self._structures = ReceivedStructures()
        self._usual: Structure | None = None  # the latest one that was repeated and has packets
        # frames that are awaited, each with its works, and the one whose message is being received; at most one for
        # each expected message
        self._frames: deque[tuple[Tensor, Sequence[Any]]] = deque()
        self._spare: list[Tensor] = []
        self._posted: dict[int, list[Posted]] = {}  # packets of structures that usually come, by tag
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"avgpipe receive from rank {wire.peer}", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Do nothing: the thread takes in what has arrived."""

    def inbox(self, route: Route) -> NetworkInbox:
        """Open a channel and return its receiving end."""
        with self._changed:
            self.routes.add(route)
            return self._inbox(route)

    def expect(self, inbox: NetworkInbox, expected: Sequence[tuple[Sequence[Traffic], NetworkOutbox | None]]) -> None:
        """Expect further messages of a channel."""
        with self._changed:
            inbox.expected.extend(expected)
            inbox.hand_in(self.wire.transfer_stream)
            try:
                self._await_frames()
            except Exception as error:  # as in the thread
                self._fail(error)
            self._changed.notify_all()

    def leave(self, route: Route, join_s: float) -> None:
        """Close a channel. Closing the last one ends the thread, or lets it end with the connection if it waits."""
        with self._changed:
            self.routes.discard(route)
            self._inboxes.pop(route, None)
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
        awaited = self._receiving or next((i.route for i in [*self._inboxes.values()] if i.expected), None)
        self.wire.fail(error, "receiving", awaited)

    def _await_frames(self) -> None:
        """Post receives of frames: one for each expected message, up to a limit."""
        owed = sum(len(inbox.expected) for inbox in self._inboxes.values())
        while len(self._frames) < min(owed, _MOST_FRAMES):
            frame = self._spare.pop() if self._spare else torch.empty(CAPACITY, dtype=torch.uint8, device="cpu")
            self._frames.append((frame, self.wire.start_receive(frame, tag=FRAMES)))

    def _post(self, structure: Structure) -> list[Posted]:
        _, packets = structure.packets
        return [self.wire.post(packet, structure.segments, structure.tag) for packet in packets]

    def _receive_next(self) -> bool:
        with self._changed:
            self._receiving = None
            self._changed.wait_for(lambda: self._frames or self._closing)
            if self._closing:
                return False
            frame, works = self._frames[0]
        if (usual := self._usual) and usual.tag not in self._posted and len(self._posted) < _MOST_POSTED:
            self._posted[usual.tag] = self._post(usual)
        self.wire.end(works)
        self._receive(frame)
        return True

    def _receive(self, frame: Tensor) -> None:
        # a stack frame of its own, as in the sender: no local variable keeps a tensor of the message alive
        rest = None
        if missing := bytes_after(frame):
            rest = torch.empty(missing, dtype=torch.uint8, device="cpu")
            self.wire.end(self.wire.start_receive(rest, tag=REST))
        route, structure, partial = read_frame(frame, rest, self._structures, self.wire.device)
        self._receiving, posted = route, self._posted.pop(structure.tag, None)
        if posted is None:  # not in advance
            posted = self._post(structure)
        if posted and structure.number >= 0:
            self._usual = structure
        passes = posted and self.wire.port.is_host
        passage = self._let_pass(route, structure, partial, posted) if passes else None
        try:
            flats = [self.wire.finish_receive(one, passage) for one in posted]
        except Exception as error:
            if passage is not None:
                passage.arrived(error)
            raise
        message, event = structure.completed(partial, flats), None
        if any(tensor is not None and not tensor.is_cpu for tensor in message.tensors):
            with self.wire.port.on_stream(self.wire.stream):
                event = self.wire.port.event()
        with self._changed:
            self._spare.append(self._frames.popleft()[0])  # what was in it has been copied
            inbox = self._inbox(route)
            inbox.early.append((message, event, None))
            inbox.hand_in(self.wire.transfer_stream, passed=passage is not None)
            self.wire.arrivals.notify()
            self._await_frames()

    def _let_pass(
        self, route: Route, structure: Structure, partial: Message, posted: Sequence[Posted]
    ) -> Passage | None:
        """Start to forward a message while its packets arrive, if it is expected and its onward channel allows it."""
        with self._changed:
            expected = self._inbox(route).expected
            observers, forward_to = expected[0] if expected else ((), None)
        if forward_to is None or not forward_to.in_parts:
            return None
        flats = [one.flat for one in posted if one.flat is not None]
        passage = Passage()
        forward_to.pass_on(structure.completed(partial, flats), passage, observers, flats)
        return passage

    def _inbox(self, route: Route) -> NetworkInbox:
        return self._inboxes.setdefault(route, NetworkInbox(route, self))


class NetworkInbox:
    """The receiving end of a channel from another process.

    Attributes:
        route: route of the channel.
        expected: for each message that is expected and has not arrived, its observers and the outbox to which it is
            forwarded, or None.
        early: messages that arrived before they were expected, each with an event after which it may be read, or None,
            and with its time of arrival; None: observers are told the time at which it is handed in.
        arrived: messages that may be taken, each with such an event or None.
    """

    def __init__(self, route: Route, receiver: Receiver | Mailbox) -> None:
        self.route, self._receiver = route, receiver
        self.expected: deque[tuple[Sequence[Traffic], NetworkOutbox | None]] = deque()
        self.early: deque[tuple[Message, Any, float | None]] = deque()
        self.arrived: deque[tuple[Message, Any]] = deque()

    def expect(self, count: int, observers: Sequence[Traffic] = (), forward_to: Outbox | None = None) -> None:
        """Post the receives of ``count`` messages, reported to the observers and forwarded to ``forward_to``."""
        # no neighbour of the stage is in this process
        assert forward_to is None or isinstance(forward_to, NetworkOutbox)
        self._receiver.expect(self, [(observers, forward_to)] * count)

    def hand_in(self, stream: Any = None, passed: bool = False) -> None:
        """Move expected messages from early to arrived, in order, and forward them unless they have ``passed`` on."""
        while self.early and self.expected:
            (message, event, at_s), (observers, forward_to) = self.early.popleft(), self.expected.popleft()
            if forward_to is not None and not passed:
                forward_to.pass_on(message, event, observers)
            for observer in observers:
                observer.arrived(self.route, message.micro_batch, stream, at_s)
            self.arrived.append((message, event))

    def ready(self) -> bool:
        """Return whether a message has arrived."""
        if not self.arrived:
            self._receiver.look()
        return bool(self.arrived)

    def get(self) -> Message:
        """Take the oldest message. On an accelerator the current stream waits for its transfer; the host does not."""
        message, event = self.arrived.popleft()
        if event is not None:
            port = self._receiver.port
            port.current_stream().wait_event(event)
            for tensor in message.tensors:
                if tensor is not None and not tensor.is_cpu:
                    port.record_use(tensor)
        return message

    def close(self, join_s: float) -> None:
        """Stop receiving, and drop the messages that were not taken; see :meth:`Receiver.leave`."""
        self._receiver.leave(self.route, join_s)


class Line:
    """The line from one process to another, at one of its ends.

    A wire and its thread live as long as any channel is open. When all are closed, the next channel gets new ones.

    Attributes:
        between: connection of the devices; None if no stage sends tensors this way, or if they travel over the host.
    """

    def __init__(self, on_host: Pair, peer: int, device: torch.device) -> None:
        self.between: Pair | None = None
        self._on_host, self._peer, self._device = on_host, peer, device
        self._openings = 0  # number of times that a wire was made
        self._end: Sender | Receiver | None = None

    def outbox(self, route: Route, arrivals: Arrivals) -> NetworkOutbox:
        """Open the sending end of a channel."""
        if not isinstance(self._end, Sender) or not self._end.routes:
            self._end = Sender(self._wire(arrivals))
        return NetworkOutbox(route, self._end)

    def inbox(self, route: Route, arrivals: Arrivals) -> NetworkInbox:
        """Open the receiving end of a channel."""
        if not isinstance(self._end, Receiver) or not self._end.routes:
            self._end = Receiver(self._wire(arrivals))
        return self._end.inbox(route)

    def _wire(self, arrivals: Arrivals) -> Wire:
        self._openings += 1
        return Wire(self._peer, self._on_host, self._device, self.between, arrivals, self._openings - 1)
