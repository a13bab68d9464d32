"""Channels between processes: each end has a thread that waits for the network, because gloo's works cannot be polled.

Each direction has a process group of its own, because two directions on one group get in each other's way. What waits
for nothing is sent by whoever puts it: a computing thread lets others run now and then only, and a thread of the
channel would begin milliseconds later. gloo sends nothing before its peer has said that it receives, and that word
waits behind what else is on its link. So receives are posted for what usually comes, before it is announced. Between
devices the channels of all pipelines share a link (``device_link.py``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channel import Outbox, Traffic
from lightning_avgpipe.comm.codec import CAPACITY, FrameReader, FrameWriter, Opened, TensorForm, as_bytes
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.wire import Passage, Posted, Wire

_MOST_POSTED = 2  # structures that are received unannounced: a receive cannot be taken back, and holds its memory


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
