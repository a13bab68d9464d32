"""Channels: one-way FIFO links between stages. A send never blocks compute; a receive is posted ahead of time.

In one process a channel is a queue. Between processes each end has a thread that waits for the network, because
gloo's works cannot be polled, and each direction has a process group of its own, because two directions on one group
get in each other's way. What waits for nothing is sent by whoever puts it: a computing thread lets others run now and
then only, and a thread of the channel would begin milliseconds later. gloo sends nothing before its peer has said that
it receives, and that word waits behind what else is on its link. So receives are posted for what usually comes, before
it is announced. Between devices the channels of all pipelines share a :class:`DeviceLink`.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.codec import CAPACITY, MOST_TAGS, FrameReader, FrameWriter, Opened, TensorForm, as_bytes
from lightning_avgpipe.comm.device_link import DeviceLink
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.transfer import begun, ended
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import port_of

_MOST_POSTED = 2  # structures that are received unannounced: a receive cannot be taken back, and holds its memory


class Traffic(Protocol):
    """Is told, from any thread, of messages that travel between processes."""

    def queued(self) -> None:
        """A message will be sent."""

    def sending(self, route: Route, micro_batch: int, stream: Any) -> AbstractContextManager[None]:
        """A queued message is sent within this context: on a stream, or None: by the host."""

    def arrived(self, route: Route, micro_batch: int, stream: Any) -> None:
        """A message is there: when its stream gets here, or None: now."""


class Inbox(Protocol):
    """The receiving end of a channel."""

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """So many messages will come: receive them as they do, tell the observers, and pass them on as well."""

    def ready(self) -> bool:
        """Whether a message has arrived."""

    def get(self) -> Message:
        """Take the oldest message that has arrived."""

    def close(self, join_s: float) -> None:
        """Receive no more, and drop what was not taken."""


class Outbox(Protocol):
    """The sending end of a channel."""

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Send, and tell the observers; returns at once."""

    def close(self, join_s: float) -> None:
        """Stop after what is queued, or after so many seconds."""


class MemoryChannel:
    """Both ends of a channel within one process: between two of its stages, or two threads that stand for processes.

    Args:
        arrivals: told when a message is there; None if nobody waits elsewhere.
    """

    def __init__(self, arrivals: Arrivals | None = None) -> None:
        self._arrivals = arrivals
        self._queue: deque[Message] = deque()
        self._lock = threading.Lock()
        self._onwards: Outbox | None = None
        self._relayed = 0  # so many messages still go on

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Nothing travels; what is to be passed on is, also what is there already."""
        if onwards is not None:
            with self._lock:
                self._onwards, self._relayed = onwards, count
                for message in self._queue:
                    self._relay(message)

    def _relay(self, message: Message) -> None:
        if self._relayed:
            assert self._onwards is not None
            self._relayed -= 1
            self._onwards.put(message.copied())  # this stage, or that one, may change it

    def ready(self) -> bool:
        """Whether a message waits."""
        return bool(self._queue)

    def get(self) -> Message:
        """Take the oldest message."""
        return self._queue.popleft()

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Pass a message on; its tensors are shared, not copied."""
        with self._lock:
            self._queue.append(message)
            self._relay(message)
        if self._arrivals is not None:
            self._arrivals.notify()

    def clear(self) -> None:
        """Drop what was not taken."""
        self._queue.clear()
        self._onwards, self._relayed = None, 0

    def close(self, join_s: float = 0.0) -> None:
        """Drop what was not taken."""
        self.clear()


class Passage:
    """A message on its way through a process: which parts of it have come, for whoever sends them on."""

    def __init__(self) -> None:
        self._parts: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def came(self, error: Exception | None = None) -> None:
        """The next part is there; or none will come."""
        self._parts.put(error)

    def wait(self) -> None:
        """For the next part."""
        if (error := self._parts.get()) is not None:
            raise error


@dataclass(frozen=True)
class Pair:
    """A connection of two processes.

    Attributes:
        group: of gloo.
        peer: number of the other process in it.
    """

    group: Any
    peer: int


@dataclass(frozen=True)
class Posted:
    """A tensor that is on its way, or will be.

    Attributes:
        form: of the tensor.
        tensor: on the host, where it lands; None: on the device, when it is asked for.
        works: of the transfer.
    """

    form: TensorForm
    tensor: Tensor | None
    works: Sequence[Any]


class Wire:
    """Moves tensors of known sizes between two ranks.

    Args:
        peer: global rank at the other end.
        on_host: the two processes, for this direction only.
        device: where tensors live on this side.
        link: between the devices, for this direction only; None moves device tensors over the host.
        moved: called when bytes have moved.
        opening: how often the route was opened before on this connection, the same at both ends: what was posted then
            and never came must not take what comes now.
    """

    def __init__(
        self,
        peer: int,
        on_host: Pair,
        device: torch.device,
        link: DeviceLink | None,
        moved: Callable[[], None],
        opening: int = 0,
    ) -> None:
        self.peer = peer
        self.device = device
        # asked directly: dist.send would check its arguments for longer than a small tensor takes
        self._on_host = on_host
        self.link = link
        self._moved = moved
        self._first_tag = opening * MOST_TAGS
        self.port = port_of(device)

    @functools.cached_property
    def stream(self) -> Any:
        """On which tensors travel, so that they overlap with compute; None where there are no streams.

        There are few of them, so a wire that only moves what is on the host has none.
        """
        return self.port.new_stream() if self.link is None else self.link.stream

    def broken(self, error: Exception, doing: str) -> PeerError:
        """What to say when the other end is gone."""
        lost = PeerError(f"the connection to rank {self.peer} broke while {doing}: {error}")
        lost.__cause__ = error
        return lost

    @property
    def sends_at_once(self) -> bool:
        """Whether what begins to be sent holds up nobody."""
        return self.port.is_host

    @property
    def transfer_stream(self) -> Any:
        """The stream on which tensors travel; None if the host moves them."""
        return None if self.link is None else self.link.stream

    def begin_host(
        self, tensor: Tensor, pieces: int = 1, tag: int = 0, passage: Passage | None = None
    ) -> Sequence[Any]:
        """Begin to send what is on the host, or its parts as they come by a passage; gives what :meth:`end` takes."""

        def begin(part: Tensor) -> Any:
            if passage is not None:
                passage.wait()
            return self._on_host.group.send([part], self._on_host.peer, self._first_tag + tag)

        return begun(begin, tensor, pieces)

    def end(self, works: Sequence[Any]) -> None:
        """Return when a transfer that has begun is done."""
        ended(works, self._moved)

    def send_host(self, tensor: Tensor, pieces: int = 1, tag: int = 0, passage: Passage | None = None) -> None:
        self.end(self.begin_host(tensor, pieces, tag, passage))

    def receive_host(self, tensor: Tensor) -> None:
        self.end(self._begun(tensor))

    def _begun(self, tensor: Tensor, pieces: int = 1, tag: int = 0) -> list[Any]:
        own = self._first_tag + tag
        return begun(lambda part: self._on_host.group.recv([part], self._on_host.peer, own), tensor, pieces)

    def staged(self, tensors: Sequence[Tensor], ready: Any) -> Sequence[Tensor]:
        """Those on an accelerator as bytes on the host, after an event, for which this waits once; others as given."""
        if all(tensor.is_cpu for tensor in tensors) or self.stream is None:
            return tensors
        for tensor in tensors:
            if not tensor.is_cpu:  # whoever made it may let go of it before it has been read
                tensor.record_stream(self.stream)
        with self.port.on_stream(self.stream):
            self.stream.wait_event(ready)
            there = [tensor if tensor.is_cpu else as_bytes(tensor).to("cpu", non_blocking=True) for tensor in tensors]
            self.port.event().synchronize()
        return there

    def send(self, tensor: Tensor, ready: Any, pieces: int = 1, tag: int = 0) -> None:
        """Send a tensor, which is there after an event, if it is on an accelerator with a link; or as it passes."""
        if tensor.is_cpu or self.link is None:
            passage = ready if isinstance(ready, Passage) else None
            self.send_host(as_bytes(tensor.cpu()), pieces, tag, passage)
            return
        tensor.record_stream(self.stream)
        with self.port.on_stream(self.stream):
            self.stream.wait_event(ready)
            self.link.send(as_bytes(tensor))

    def post(self, form: TensorForm, pieces: int = 1, tag: int = 0) -> Posted:
        """Receive a tensor, as soon as it comes; where a device receives by itself, when it is asked for."""
        lands = form.on_host or self.stream is None
        if not lands and self.link is not None:
            return Posted(form, None, ())
        tensor = torch.empty(form.wire_shape, dtype=form.dtype, pin_memory=not lands)
        return Posted(form, tensor, self._begun(as_bytes(tensor), pieces, tag))

    def receive(self, posted: Posted, passage: Passage | None = None) -> tuple[Tensor, Any]:
        """Returns the tensor and, on an accelerator, the event after which it may be read; its parts may pass on."""

        def moved() -> None:
            self._moved()
            if passage is not None:
                passage.came()

        ended(posted.works, moved)
        form, tensor = posted.form, posted.tensor
        if tensor is not None and (form.on_host or self.stream is None):
            return (tensor if form.on_host else tensor.to(self.device)), None
        with self.port.on_stream(self.stream):
            if tensor is not None:
                return tensor.to(self.device, non_blocking=True), self.port.event()
            assert self.link is not None
            tensor = torch.empty(form.wire_shape, dtype=form.dtype, device=self.device)
            self.link.receive(as_bytes(tensor))
            return tensor, self.port.event()


@dataclass
class _Outgoing:
    """A message that is to be sent.

    Attributes:
        message: or None: it was the last one.
        ready: an event after which it may be read, a passage by which it comes, or None: it is there.
        observers: are told.
        works: of its transfer, if it has begun.
        place: among the messages of the link between devices; None: it does not travel there.
    """

    message: Message | None
    ready: Any = None
    observers: Sequence[Traffic] = ()
    works: Sequence[Any] | None = None
    place: int | None = None


class NetworkOutbox:
    """The sending end of a channel to another process.

    Args:
        route: for messages.
        wire: to the other end.
        arrivals: told when sending fails.
    """

    def __init__(self, route: Route, wire: Wire, arrivals: Arrivals) -> None:
        self._route = route
        self._wire = wire
        self._arrivals = arrivals
        self._frames = FrameWriter()
        self._queue: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._unsent = 0
        self._thread = threading.Thread(target=self._work, name=f"avgpipe send {route}", daemon=True)
        self._thread.start()

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Send, and tell the observers; returns at once."""
        # what is on the host is there: news and batches wait for no work of the device
        self.pass_on(message, None if _on_host(message) else self._wire.port.event(), observers)

    def pass_on(self, message: Message, ready: Any, observers: Sequence[Traffic]) -> None:
        """Send what another process has sent: after an event, or as it comes by a passage. Returns at once."""
        for observer in observers:
            observer.queued()
        outgoing = _Outgoing(message, ready, observers)
        link = self._wire.link
        with self._order:
            if link is not None and not _on_host(message):
                outgoing.place = link.take_place()
            # observers see the thread send
            if not self._unsent and ready is None and not observers and self._wire.sends_at_once:
                with self._failing():
                    outgoing.works = self._begin(message)
            self._unsent += 1
            self._queue.put(outgoing)

    def close(self, join_s: float) -> None:
        """Stop the thread after what is queued; one that waits for a peer that is gone ends with its connection."""
        self._queue.put(_Outgoing(None))
        self._thread.join(join_s)

    def _work(self) -> None:
        with self._failing():
            self._wire.port.enter_thread()
            while self._send_next():
                pass

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # handed to the executor, which names stage and action
            if self._wire.link is not None:
                self._wire.link.give_up()  # the places of what is queued here are never taken
            self._arrivals.fail(self._wire.broken(error, f"sending on channel '{self._route}'"))

    def _send_next(self) -> bool:
        # a frame of its own: a thread that waits for the next message keeps no tensor of the last one alive
        outgoing = self._queue.get()
        if (message := outgoing.message) is None:
            return False
        if outgoing.works is not None:
            self._wire.end(outgoing.works)
        else:
            with self._observed(message, outgoing) if outgoing.observers else contextlib.nullcontext():
                self._send(message, outgoing.ready, outgoing.place)
        with self._order:
            self._unsent -= 1
        return True

    @contextlib.contextmanager
    def _observed(self, message: Message, outgoing: _Outgoing) -> Iterator[None]:
        stream, ready = self._wire.transfer_stream, outgoing.ready
        if stream is not None and ready is not None and not isinstance(ready, Passage):
            stream.wait_event(ready)  # sending begins when there is something to send
        with contextlib.ExitStack() as sending:
            for observer in outgoing.observers:
                sending.enter_context(observer.sending(self._route, message.micro_batch, stream))
            yield

    def _begin(self, message: Message) -> list[Any]:
        """Send what is on the host: nobody waits here."""
        first, forms, tag = self._frames.write(message, True)
        works = [work for part in first for work in self._wire.begin_host(part)]
        for tensor, form in zip(message.tensors, forms, strict=True):
            if tensor is not None and form is not None and not (tag is None or form.is_empty):
                works += self._wire.begin_host(as_bytes(form.on_wire(tensor)), message.segments, tag)
        return works

    def _send(self, message: Message, ready: Any, place: int | None) -> None:
        inner = _on_host(message) and not isinstance(ready, Passage)  # of which nothing may be there yet
        first, forms, tag = self._frames.write(message, inner, place)
        parts = [
            (form.on_wire(tensor), tensor.is_cpu) for tensor, form in zip(message.tensors, forms, strict=True)
            if tensor is not None and form is not None and not (tag is None or form.is_empty)
        ]  # fmt: skip
        if place is None:
            for part in first:
                self._wire.send_host(part)
            for tensor in self._wire.staged([tensor for tensor, _ in parts], ready):
                self._wire.send(tensor, ready, message.segments, tag or 0)
            return
        # the frame may be awaited late: nobody behind this message waits for that
        works = [work for part in first for work in self._wire.begin_host(part)]
        assert self._wire.link is not None
        with self._wire.link.turn(place):
            for tensor, on_host in parts:
                if not on_host:
                    self._wire.send(tensor, ready, message.segments, tag or 0)
        for tensor, on_host in parts:
            if on_host:
                works += self._wire.begin_host(as_bytes(tensor), message.segments, tag or 0)
        self._wire.end(works)


def _on_host(message: Message) -> bool:
    return all(tensor is None or tensor.is_cpu for tensor in message.tensors)


class NetworkInbox:
    """The receiving end of a channel from another process. Same arguments as :class:`NetworkOutbox`."""

    def __init__(self, route: Route, wire: Wire, arrivals: Arrivals) -> None:
        self._route = route
        self._wire = wire
        self._arrivals = arrivals
        self._frames = FrameReader()
        self._arrived: deque[tuple[Message, list[Any]]] = deque()
        self._expected: queue.SimpleQueue[tuple[Sequence[Traffic], Outbox | None]] = queue.SimpleQueue()
        self._posted: dict[int, list[Posted]] = {}  # by tag, what was not announced when it was posted
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"avgpipe receive {route}", daemon=True)
        self._thread.start()

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Post the receives of so many messages, of which the observers will be told, and which are passed on."""
        for _ in range(count):
            self._expected.put((observers, onwards))

    def ready(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._arrived)

    def get(self) -> Message:
        """Take the oldest message; on an accelerator the current stream waits for its transfer, the host does not."""
        message, events = self._arrived.popleft()
        for tensor, event in zip(message.tensors, events, strict=True):
            if event is not None:
                current = self._wire.port.current_stream()
                current.wait_event(event)
                assert tensor is not None
                tensor.record_stream(current)
        return message

    def close(self, join_s: float) -> None:
        """Stop the thread; one that waits for a peer that is gone ends with its connection."""
        self._closing = True
        self._expected.put(((), None))
        if self._wire.link is not None:
            self._wire.link.notify()
        self._thread.join(join_s)

    def _work(self) -> None:
        try:
            self._wire.port.enter_thread()
            while True:
                observers, onwards = self._expected.get()
                if self._closing:
                    return
                self._hand_in(observers, onwards)
        except Exception as error:  # handed to the executor, which names stage and action
            if self._wire.link is not None:
                self._wire.link.give_up()
            if not self._closing:
                self._arrivals.fail(self._wire.broken(error, f"receiving on channel '{self._route}'"))

    def _hand_in(self, observers: Sequence[Traffic], onwards: Outbox | None) -> None:
        # a frame of its own, as in the outbox: nothing of a message stays behind
        item = self._receive(observers, onwards)
        for observer in observers:
            observer.arrived(self._route, item[0].micro_batch, self._wire.transfer_stream)
        with self._arrivals.condition:
            self._arrived.append(item)
            self._arrivals.condition.notify_all()

    def _receive(self, observers: Sequence[Traffic], onwards: Outbox | None) -> tuple[Message, list[Any]]:
        usual = self._frames.usual
        if usual is not None and usual[0] not in self._posted and len(self._posted) < _MOST_POSTED:
            self._posted[usual[0]] = self._post(*usual)
        frame, rest = torch.empty(CAPACITY, dtype=torch.uint8), None
        self._wire.receive_host(frame)
        if missing := self._frames.missing(frame):
            rest = torch.empty(missing, dtype=torch.uint8)
            self._wire.receive_host(rest)
        opened = self._frames.read(frame, rest)
        assert onwards is None or isinstance(onwards, NetworkOutbox)  # no neighbour of this stage's is in this process
        posted: list[Posted] = []
        if opened.tensors is None:
            known = self._posted.pop(opened.tag, None)
            posted = self._post(opened.tag, opened.forms, opened.segments) if known is None else known
        if opened.tensors is None and self._wire.port.is_host and onwards is not None:
            return self._pass_on(opened, posted, observers, onwards), [None] * len(opened.forms)
        inner, coming = iter(opened.tensors or ()), iter(self._land(posted, opened.place))
        tensors: list[Tensor | None] = []
        events: list[Any] = []
        for form in opened.forms:
            tensor, event = None, None
            if form is not None:
                if form.is_empty:
                    device = "cpu" if form.on_host else self._wire.device
                    tensor = torch.empty(form.wire_shape, dtype=form.dtype, device=device)
                elif opened.tensors is not None:
                    tensor = next(inner)
                else:
                    tensor, event = next(coming)
                tensor = form.from_wire(tensor)
            tensors.append(tensor)
            events.append(event)
        message = _message(opened, tensors)
        if onwards is not None:  # on one stream they come in order: the last one is there after all
            onwards.pass_on(message, next((e for e in reversed(events) if e is not None), None), observers)
        return message, events

    def _post(self, tag: int, forms: Sequence[TensorForm | None], segments: int) -> list[Posted]:
        return [self._wire.post(form, segments, tag) for form in forms if form is not None and not form.is_empty]

    def _land(self, posted: Sequence[Posted], place: int | None) -> list[tuple[Tensor, Any]]:
        """Receive tensors, those on the device when it is the message's turn."""
        if place is None:
            return [self._wire.receive(one) for one in posted]
        assert self._wire.link is not None
        with self._wire.link.turn(place, lambda: self._closing):
            on_device = {n: self._wire.receive(one) for n, one in enumerate(posted) if one.tensor is None}
        return [on_device[n] if n in on_device else self._wire.receive(one) for n, one in enumerate(posted)]

    def _pass_on(
        self, opened: Opened, posted: Sequence[Posted], observers: Sequence[Traffic], onwards: NetworkOutbox
    ) -> Message:
        """Receive tensors while the parts that are there go on."""
        coming, tensors = iter(posted), list[Tensor | None]()
        for form in opened.forms:
            if form is None:
                tensors.append(None)
            else:
                part = torch.empty(form.wire_shape, dtype=form.dtype) if form.is_empty else next(coming).tensor
                assert part is not None  # it is on the host
                tensors.append(form.from_wire(part))
        message, passage = _message(opened, tensors), Passage()
        onwards.pass_on(message, passage, observers)
        try:
            for one in posted:
                self._wire.receive(one, passage)
        except Exception as error:
            passage.came(error)
            raise
        return message


def _message(opened: Opened, tensors: Sequence[Tensor | None]) -> Message:
    return Message(
        opened.micro_batch, tuple(tensors), opened.requires_grad, opened.entries, opened.abandoned,
        opened.forward_only, opened.segments,
    )  # fmt: skip
