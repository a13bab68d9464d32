"""Channels: one-way FIFO links between stages. A send never blocks compute; a receive is posted ahead of time.

In one process a channel is a queue. Between processes each end has a thread that waits for the network, because
gloo's works cannot be polled, and each direction has a process group of its own, because two directions on one group
get in each other's way.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.codec import CAPACITY, FrameReader, FrameWriter, as_bytes
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.process_groups import Pair
from lightning_avgpipe.comm.transfer import transfer
from lightning_avgpipe.engine.recording import Recorder
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import port_of

__all__ = ["Arrivals", "Inbox", "LocalChannel", "NetworkInbox", "NetworkOutbox", "Outbox", "Wire"]

_TAG = 0
_POLL_S = 0.5  # between two looks at the clock; whatever happens wakes the wait


class Arrivals:
    """Wakes the executor when something arrived on any of its inboxes, or when an inbox failed."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None
        self._moved = -math.inf

    def moved(self) -> None:
        """Bytes went over a connection of this process."""
        self._moved = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._moved

    def notify(self) -> None:
        """Something arrived."""
        with self.condition:
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """A channel cannot go on."""
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

    def wait_for(
        self,
        ready: Callable[[], bool],
        timeout_s: float,
        doing: Callable[[], str],
        monitor: Monitor,
    ) -> None:
        """Block until ``ready()``.

        Args:
            timeout_s: longest wait in which no connection of any process moves bytes, in seconds. Time in which this
                process itself does not run, because it is stopped, does not count.
            doing: says what this process does, as ``waits for the input of F0``.
            watch: knows whether another process has failed.
        Raises:
            PeerError: nothing arrived in time, a channel broke, or another process has failed.
        """
        if ready():
            return
        with monitor.during(doing()):
            self._wait(ready, timeout_s, f"{monitor.name} {monitor.activity}", monitor)

    def _wait(self, ready: Callable[[], bool], timeout_s: float, waiting: str, monitor: Monitor) -> None:
        waited_s, looked = 0.0, time.monotonic()
        while True:
            monitor.check()
            with self.condition:
                if ready():
                    return
                if self.failure is None:
                    self.condition.wait(_POLL_S)
                if ready():
                    return
                failure = self.failure
            if failure is not None:
                monitor.look()
                raise PeerError(f"{waiting}, but {failure}{monitor.account().text}") from failure
            now = time.monotonic()
            waited_s, looked = waited_s + min(now - looked, 2 * _POLL_S), now
            if waited_s > timeout_s:
                account = monitor.account()
                waited_s = min(waited_s, account.idle_s, self.idle_s())
                if waited_s > timeout_s:
                    raise PeerError(
                        f"{waiting}, and nothing arrived for {timeout_s:g} s. Either a process is stuck, or the work "
                        f"takes longer than the strategy's timeout; raise timeout=... if so{account.text}"
                    )
                looked = time.monotonic()


class Inbox(Protocol):
    """The receiving end of a channel."""

    def expect(self, count: int) -> None:
        """So many messages will come: receive them as they do."""

    def ready(self) -> bool:
        """Whether a message has arrived."""

    def get(self) -> Message:
        """Take the oldest message that has arrived."""


class Outbox(Protocol):
    """The sending end of a channel."""

    def put(self, message: Message) -> None:
        """Send; returns at once."""


class LocalChannel:
    """Both ends of a channel between two stages of one process."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()

    def expect(self, count: int) -> None:
        """Nothing to prepare."""

    def ready(self) -> bool:
        """Whether a message waits."""
        return bool(self._queue)

    def get(self) -> Message:
        """Take the oldest message."""
        return self._queue.popleft()

    def put(self, message: Message) -> None:
        """Pass a message on; its tensors are shared, not copied."""
        self._queue.append(message)

    def clear(self) -> None:
        """Drop what was not taken."""
        self._queue.clear()


class Wire:
    """Moves tensors of known sizes between two ranks.

    Args:
        peer: global rank at the other end.
        on_host: the two processes, for this direction only.
        device: where tensors live on this side.
        on_devices: the same of NCCL; None moves device tensors over the host.
        moved: called when bytes have moved.
    """

    def __init__(
        self,
        peer: int,
        on_host: Pair,
        device: torch.device,
        on_devices: Pair | None,
        moved: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.device = device
        # asked directly: dist.send would check its arguments for longer than a small tensor takes
        self._on_host = on_host
        self._on_devices = on_devices
        self._moved = moved
        # transfers are queued on a stream of their own, so that they overlap with compute
        self.port = port_of(device)
        self.stream = self.port.new_stream()

    def broken(self, error: Exception, doing: str) -> PeerError:
        """What to say when the other end is gone."""
        lost = PeerError(f"the connection to rank {self.peer} broke while {doing}: {error}")
        lost.__cause__ = error
        return lost

    @property
    def transfer_stream(self) -> Any:
        """The stream on which tensors travel; None if the host moves them."""
        return None if self._on_devices is None else self.stream

    def send_host(self, tensor: Tensor) -> None:
        transfer(lambda part: self._on_host.group.send([part], self._on_host.peer, _TAG), tensor, self._moved)

    def receive_host(self, tensor: Tensor) -> None:
        transfer(lambda part: self._on_host.group.recv([part], self._on_host.peer, _TAG), tensor, self._moved)

    def send(self, tensor: Tensor, ready: Any) -> None:
        if tensor.is_cpu or self._on_devices is None:
            if ready is not None:
                ready.synchronize()
            self.send_host(as_bytes(tensor.cpu()))
            return
        assert self.stream is not None and ready is not None
        with self.port.on_stream(self.stream):
            self.stream.wait_event(ready)
            flat = as_bytes(tensor)
            dist.send(flat, self.peer, group=self._on_devices.group)
            flat.record_stream(self.stream)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, on_host: bool) -> tuple[Tensor, Any]:
        """Returns the tensor and, on an accelerator, the event after which it may be read."""
        if on_host or self._on_devices is None:
            tensor = torch.empty(shape, dtype=dtype)
            self.receive_host(as_bytes(tensor))
            return (tensor if on_host else tensor.to(self.device)), None
        assert self.stream is not None
        with self.port.on_stream(self.stream):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(as_bytes(tensor), self.peer, group=self._on_devices.group)
            return tensor, self.stream.record_event()


class NetworkOutbox:
    """The sending end of a channel to another process.

    Args:
        name: for messages, as ``forward 0``.
        wire: to the other end.
        arrivals: told when sending fails.

    Attributes:
        recorder: told of every message that is put from now on.
    """

    def __init__(self, name: str, wire: Wire, arrivals: Arrivals) -> None:
        self.name = name
        self._wire = wire
        self._arrivals = arrivals
        self._frames = FrameWriter()
        self.recorder: Recorder | None = None
        self._queue: queue.SimpleQueue[tuple[Message, Any, Recorder | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"avgpipe send {name}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send; returns at once."""
        ready = self._wire.port.event()
        if (recorder := self.recorder) is not None:
            recorder.queued()
        self._queue.put((message, ready, recorder))

    def close(self, join_s: float) -> None:
        """Stop the thread after what is queued; one that waits for a peer that is gone ends with its connection."""
        self._queue.put(None)
        self._thread.join(join_s)

    def _work(self) -> None:
        try:
            while self._send_next():
                pass
        except Exception as error:  # handed to the executor, which names stage and action
            self._arrivals.fail(self._wire.broken(error, f"sending on channel '{self.name}'"))

    def _send_next(self) -> bool:
        # a frame of its own: a thread that waits for the next message keeps no tensor of the last one alive
        if (item := self._queue.get()) is None:
            return False
        message, ready, recorder = item
        with self._recorded(message, ready, recorder):
            self._send(message, ready)
        return True

    def _recorded(self, message: Message, ready: Any, recorder: Recorder | None) -> AbstractContextManager[None]:
        if recorder is None:
            return contextlib.nullcontext()
        if (stream := self._wire.transfer_stream) is not None:
            stream.wait_event(ready)  # sending begins when there is something to send
        return recorder.sending(self.name, message.micro_batch, stream)

    def _send(self, message: Message, ready: Any) -> None:
        first, forms, complete = self._frames.write(message, inner=ready is None)
        for part in first:
            self._wire.send_host(part)
        for tensor, form in zip(message.tensors, forms, strict=True):
            if tensor is not None and form is not None and not (complete or form.is_empty):
                self._wire.send(form.on_wire(tensor), ready)


class NetworkInbox:
    """The receiving end of a channel from another process. Same arguments as :class:`NetworkOutbox`.

    Attributes:
        recorder: told of every message that arrives from now on.
    """

    def __init__(self, name: str, wire: Wire, arrivals: Arrivals) -> None:
        self.name = name
        self._wire = wire
        self._arrivals = arrivals
        self.recorder: Recorder | None = None
        self._frames = FrameReader()
        self._arrived: deque[tuple[Message, list[Any]]] = deque()
        self._expected = threading.Semaphore(0)
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"avgpipe receive {name}", daemon=True)
        self._thread.start()

    def expect(self, count: int) -> None:
        """Post the receives of so many messages."""
        if count:
            self._expected.release(count)

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
        self._expected.release()
        self._thread.join(join_s)

    def _work(self) -> None:
        try:
            while True:
                self._expected.acquire()
                if self._closing:
                    return
                self._hand_in()
        except Exception as error:  # handed to the executor, which names stage and action
            if not self._closing:
                self._arrivals.fail(self._wire.broken(error, f"receiving on channel '{self.name}'"))

    def _hand_in(self) -> None:
        # a frame of its own, as in the outbox: nothing of a message stays behind
        item = self._receive()
        if (recorder := self.recorder) is not None:
            recorder.arrived(self.name, item[0].micro_batch, self._wire.transfer_stream)
        with self._arrivals.condition:
            self._arrived.append(item)
            self._arrivals.condition.notify_all()

    def _receive(self) -> tuple[Message, list[Any]]:
        frame, rest = torch.empty(CAPACITY, dtype=torch.uint8), None
        self._wire.receive_host(frame)
        if missing := self._frames.missing(frame):
            rest = torch.empty(missing, dtype=torch.uint8)
            self._wire.receive_host(rest)
        opened = self._frames.read(frame, rest)
        inner = None if opened.tensors is None else iter(opened.tensors)
        tensors: list[Tensor | None] = []
        events: list[Any] = []
        for form in opened.forms:
            tensor, event = None, None
            if form is not None:
                if form.is_empty:
                    device = "cpu" if form.on_host else self._wire.device
                    tensor = torch.empty(form.wire_shape, dtype=form.dtype, device=device)
                elif inner is not None:
                    tensor = next(inner)
                else:
                    tensor, event = self._wire.receive(form.wire_shape, form.dtype, form.on_host)
                tensor = form.from_wire(tensor)
            tensors.append(tensor)
            events.append(event)
        return Message(opened.micro_batch, tuple(tensors), opened.requires_grad, opened.entries), events
