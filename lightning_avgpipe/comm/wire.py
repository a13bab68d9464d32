"""Wires: they move bytes from one process to another, over the host or between devices."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import MOST_TAGS, Packet
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.transfer import begun, ended
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import port_of


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
        group: of torch.distributed.
        peer: number of the other process in it.
    """

    group: Any
    peer: int


@dataclass(frozen=True)
class Posted:
    """A packet that is on its way, or will be.

    Attributes:
        packet: what it is.
        flat: on the host, where its bytes land; None: on the device, when it is asked for.
        works: of the transfer.
    """

    packet: Packet
    flat: Tensor | None
    works: Sequence[Any]


class Wire:
    """Moves bytes from one process to another: one end of a connection for this direction only.

    Args:
        peer: global rank at the other end.
        on_host: the two processes.
        device: where tensors live on this side.
        between: the two devices; None moves what is on the device over the host.
        moved: called when bytes have moved.
        opening: how often the connection was in use before, the same at both ends: what was posted then and never came
            must not take what comes now.
    """

    def __init__(
        self,
        peer: int,
        on_host: Pair,
        device: torch.device,
        between: Pair | None,
        moved: Callable[[], None],
        opening: int = 0,
    ) -> None:
        self.peer = peer
        self.device = device
        # asked directly: dist.send would check its arguments for longer than a small tensor takes
        self._on_host = on_host
        self._between = between
        self._moved = moved
        self._first_tag = opening * MOST_TAGS
        self.port = port_of(device)

    @functools.cached_property
    def stream(self) -> Any:
        """On which tensors travel, so that they overlap with compute; None where there are no streams.

        There are few of them, so a wire that only moves what is on the host has none.
        """
        return self.port.new_stream()

    @property
    def transfer_stream(self) -> Any:
        """The same; None if the host moves tensors."""
        return None if self._between is None else self.stream

    def broken(self, error: Exception, doing: str, route: Route | None) -> PeerError:
        """What to say when the other end is gone, with the channel if one is known."""
        where = "" if route is None else f" on channel '{route}'"
        lost = PeerError(f"the connection to rank {self.peer} broke while {doing}{where}: {error}")
        lost.__cause__ = error
        return lost

    @property
    def sends_at_once(self) -> bool:
        """Whether what begins to be sent holds up nobody."""
        return self.port.is_host

    def load(self, packets: Sequence[Packet], message: Message, ready: Any) -> list[Tensor]:
        """The bytes of packets, there where they travel. What is on the device may be read after an event.

        Where that travels over the host, this waits for the event, once.
        """
        if all(packet.on_host for packet in packets) or self.stream is None:
            return [packet.packed(message) for packet in packets]
        for tensor in message.tensors:
            if tensor is not None and not tensor.is_cpu:  # whoever made it may let go of it before it has been read
                tensor.record_stream(self.stream)
        with self.port.on_stream(self.stream):
            self.stream.wait_event(ready)
            flats = [packet.packed(message) for packet in packets]
            if self._between is None:
                flats = [flat.to("cpu", non_blocking=True) for flat in flats]
                self.port.event().synchronize()
        return flats

    def begin(self, flat: Tensor, pieces: int = 1, tag: int = 0, passage: Passage | None = None) -> Sequence[Any]:
        """Begin to send bytes that :meth:`load` gave, or parts as they come by a passage; what :meth:`end` takes."""
        if not flat.is_cpu:
            assert self._between is not None
            with self.port.on_stream(self.stream):
                self._between.group.send([flat], self._between.peer, 0).wait()  # the stream does
            return ()

        def begin(part: Tensor) -> Any:
            if passage is not None:
                passage.wait()
            return self._on_host.group.send([part], self._on_host.peer, self._first_tag + tag)

        return begun(begin, flat, pieces)

    def end(self, works: Sequence[Any]) -> None:
        """Return when a transfer on the host that has begun is done."""
        ended(works, self._moved)

    def take(self, flat: Tensor, pieces: int = 1, tag: int = 0) -> Sequence[Any]:
        """Begin to receive bytes on the host."""
        own = self._first_tag + tag
        return begun(lambda part: self._on_host.group.recv([part], self._on_host.peer, own), flat, pieces)

    def post(self, packet: Packet, pieces: int = 1, tag: int = 0) -> Posted:
        """Receive a packet, as soon as it comes; where a device receives by itself, when it is asked for."""
        on_host = packet.on_host or self.port.is_host
        if not on_host and self._between is not None:
            return Posted(packet, None, ())
        flat = torch.empty(packet.nbytes, dtype=torch.uint8, pin_memory=not on_host)
        return Posted(packet, flat, self.take(flat, pieces, tag))

    def land(self, posted: Posted, passage: Passage | None = None) -> Tensor:
        """The bytes of a packet, whose parts may pass on; on a device they are there when the stream gets here."""

        def moved() -> None:
            self._moved()
            if passage is not None:
                passage.came()

        ended(posted.works, moved)
        if posted.flat is not None and (posted.packet.on_host or self.stream is None):
            return posted.flat
        with self.port.on_stream(self.stream):
            if posted.flat is not None:
                return posted.flat.to(self.device, non_blocking=True)
            assert self._between is not None
            flat = torch.empty(posted.packet.nbytes, dtype=torch.uint8, device=self.device)
            self._between.group.recv([flat], self._between.peer, 0).wait()  # the stream does
            return flat
