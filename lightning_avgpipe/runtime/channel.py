"""Channels: one-way FIFO links between stages. A send never blocks compute; a receive is posted ahead of time.

In one process a channel is a queue. Between processes each end has a thread that waits for the network, because
gloo's works cannot be polled, and each direction has a process group of its own, because two directions on one group
get in each other's way.
"""

from __future__ import annotations

import contextlib
import pickle
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

from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.runtime.message import Message
from lightning_avgpipe.runtime.recording import Recorder
from lightning_avgpipe.runtime.watch import Watch

__all__ = ["Arrivals", "Inbox", "LocalChannel", "NetworkInbox", "NetworkOutbox", "Outbox", "Wire", "as_bytes"]

_FRAME_BYTES = 1024  # the first message of each transfer has a fixed size, so that its receive can be posted early
_LENGTH_BYTES = 8
_MAX_REMEMBERED = 256
_POLL_S = 0.5  # between two looks at the clock; whatever happens wakes the wait


class Arrivals:
    """Wakes the executor when something arrived on any of its inboxes, or when an inbox failed."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.failure: BaseException | None = None

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
        watch: Watch,
    ) -> None:
        """Block until ``ready()``.

        Args:
            timeout_s: longest wait, in seconds.
            doing: says what this process does, as ``waits for the input of F0``.
            watch: knows whether another process has failed.
        Raises:
            PeerError: nothing arrived in time, a channel broke, or another process has failed.
        """
        if ready():
            return
        with watch.during(doing()):
            self._wait(ready, timeout_s, f"{watch.name} {watch.activity}", watch)

    def _wait(self, ready: Callable[[], bool], timeout_s: float, waiting: str, watch: Watch) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            watch.check()
            with self.condition:
                if ready():
                    return
                if self.failure is None:
                    self.condition.wait(_POLL_S)
                if ready():
                    return
                failure = self.failure
            if failure is not None:
                watch.look()
                raise PeerError(f"{waiting}, but {failure}{watch.account()}") from failure
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{waiting}, and nothing arrived for {timeout_s:.0f} s. Either a process is stuck, or the work "
                    f"takes longer than the strategy's timeout; raise timeout=... if so{watch.account()}"
                )


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
        host_group: gloo group of the two ranks, for this direction only.
        device: where tensors live on this side.
        device_group: NCCL group of the two ranks, for this direction only; None moves device tensors over the host.
    """

    def __init__(
        self, peer: int, host_group: dist.ProcessGroup, device: torch.device, device_group: dist.ProcessGroup | None
    ) -> None:
        self.peer = peer
        self._host_group = host_group
        self.device = device
        self._device_group = device_group
        # transfers are queued on a stream of their own, so that they overlap with compute
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def broken(self, error: Exception, doing: str) -> PeerError:
        """What to say when the other end is gone."""
        lost = PeerError(f"the connection to rank {self.peer} broke while {doing}: {error}")
        lost.__cause__ = error
        return lost

    @property
    def transfer_stream(self) -> torch.cuda.Stream | None:
        """The stream on which tensors travel; None if the host moves them."""
        return None if self._device_group is None else self.stream

    def send_host(self, tensor: Tensor) -> None:
        dist.send(tensor, self.peer, group=self._host_group)

    def receive_host(self, tensor: Tensor) -> None:
        dist.recv(tensor, self.peer, group=self._host_group)

    def send(self, tensor: Tensor, ready: torch.cuda.Event | None) -> None:
        if tensor.device.type == "cpu" or self._device_group is None:
            if ready is not None:
                ready.synchronize()
            self.send_host(as_bytes(tensor.cpu()))
            return
        assert self.stream is not None and ready is not None
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            flat = as_bytes(tensor)
            dist.send(flat, self.peer, group=self._device_group)
            flat.record_stream(self.stream)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, on_host: bool) -> tuple[Tensor, Any]:
        """Returns the tensor and, on CUDA, the event after which it may be read."""
        if on_host or self._device_group is None:
            tensor = torch.empty(shape, dtype=dtype)
            self.receive_host(as_bytes(tensor))
            return (tensor if on_host else tensor.to(self.device)), None
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(as_bytes(tensor), self.peer, group=self._device_group)
            return tensor, self.stream.record_event()


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view in bytes: any type can be sent, also those that a backend does not know."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions as they lie in memory; None if that is their order, or if there are gaps.

    A transposed tensor arrives transposed, without a copy: kernels may round otherwise for another layout.
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
    return order if tensor.permute(order).is_contiguous() else None


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
        self._known: dict[Any, int] = {}
        self.recorder: Recorder | None = None
        self._queue: queue.SimpleQueue[tuple[Message, Any, Recorder | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"avgpipe send {name}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send; returns at once."""
        stream = self._wire.stream
        ready = torch.cuda.current_stream(stream.device).record_event() if stream is not None else None
        if (recorder := self.recorder) is not None:
            recorder.queued()
        self._queue.put((message, ready, recorder))

    def close(self, join_s: float) -> None:
        """Stop the thread after what is queued; one that waits for a peer that is gone ends with its connection."""
        self._queue.put(None)
        self._thread.join(join_s)

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                message, ready, recorder = item
                with self._recorded(message, ready, recorder):
                    self._send(message, ready)
        except Exception as error:  # handed to the executor, which names stage and action
            self._arrivals.fail(self._wire.broken(error, f"sending on channel '{self.name}'"))

    def _recorded(self, message: Message, ready: Any, recorder: Recorder | None) -> AbstractContextManager[None]:
        if recorder is None:
            return contextlib.nullcontext()
        if (stream := self._wire.transfer_stream) is not None:
            stream.wait_event(ready)  # sending begins when there is something to send
        return recorder.sending(self.name, message.micro_batch, stream)

    def _send(self, message: Message, ready: Any) -> None:
        entries, reference = message.entries, None
        try:
            reference = self._known.get(entries)
            if reference is None and len(self._known) < _MAX_REMEMBERED:
                # sent in full this time, by number from now on; the other end counts alike
                self._known[entries] = len(self._known)
                reference = -1
        except TypeError:  # an unhashable leaf: sent in full every time
            reference = None
        header = pickle.dumps(
            (
                message.micro_batch,
                tuple(
                    None if t is None else (tuple(t.shape), t.dtype, t.device.type == "cpu", _memory_order(t))
                    for t in message.tensors
                ),
                message.requires_grad,
                reference,
                entries if reference is None or reference < 0 else None,
            )
        )
        first, rest = header[: _FRAME_BYTES - _LENGTH_BYTES], header[_FRAME_BYTES - _LENGTH_BYTES :]
        frame = len(header).to_bytes(_LENGTH_BYTES, "little") + first
        self._wire.send_host(torch.frombuffer(bytearray(frame.ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8))
        if rest:
            self._wire.send_host(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
        for tensor in message.tensors:
            if tensor is not None and tensor.numel():
                order = _memory_order(tensor)
                self._wire.send(tensor if order is None else tensor.permute(order), ready)


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
        self._known: list[Any] = []
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
        """Take the oldest message; on CUDA the current stream waits for its transfer, the host does not."""
        message, events = self._arrived.popleft()
        for tensor, event in zip(message.tensors, events, strict=True):
            if event is not None:
                current = torch.cuda.current_stream()
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
                item = self._receive()
                if (recorder := self.recorder) is not None:
                    recorder.arrived(self.name, item[0].micro_batch, self._wire.transfer_stream)
                with self._arrivals.condition:
                    self._arrived.append(item)
                    self._arrivals.condition.notify_all()
        except Exception as error:  # handed to the executor, which names stage and action
            if not self._closing:
                self._arrivals.fail(self._wire.broken(error, f"receiving on channel '{self.name}'"))

    def _receive(self) -> tuple[Message, list[Any]]:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._wire.receive_host(frame)
        raw = frame.numpy().tobytes()
        length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
        header = raw[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(header):
            rest = torch.empty(length - len(header), dtype=torch.uint8)
            self._wire.receive_host(rest)
            header += rest.numpy().tobytes()
        micro_batch, metas, requires_grad, reference, entries = pickle.loads(header)
        if reference is not None:
            if reference < 0:
                self._known.append(entries)
            else:
                entries = self._known[reference]
        tensors: list[Tensor | None] = []
        events: list[Any] = []
        for meta in metas:
            tensor, event = None, None
            if meta is not None:
                shape, dtype, on_host, order = meta
                if 0 in shape:
                    tensor = torch.empty(shape, dtype=dtype, device="cpu" if on_host else self._wire.device)
                elif order is None:
                    tensor, event = self._wire.receive(shape, dtype, on_host)
                else:
                    tensor, event = self._wire.receive(tuple(shape[d] for d in order), dtype, on_host)
                    tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
            tensors.append(tensor)
            events.append(event)
        return Message(micro_batch, tuple(tensors), requires_grad, entries), events
