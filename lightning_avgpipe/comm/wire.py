"""Wires: one-way connections that move bytes from one process to another, over the host or between devices."""

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
from lightning_avgpipe.comm.transfer import begun, ended, is_broken_connection
from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.device import port_of


class Passage:
    """A message that a process receives and sends on: it tells the sending thread when each part has arrived."""

    def __init__(self) -> None:
        self._parts: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def came(self, error: Exception | None = None) -> None:
        """Note that the next part has arrived, or that none will because of an error."""
        self._parts.put(error)

    def wait(self) -> None:
        """Wait for the next part."""
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
        flat: host memory that receives its bytes; None if a device receives them when :meth:`Wire.land` is called.
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
        moved: called when bytes have moved.
        opening: number of times that the connection was in use before, equal at both ends. A receive that was posted
            then and never completed must not take bytes that are sent now.
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
        # called directly: the checks of dist.send take longer than the transfer of a small tensor
        self._on_host = on_host
        self._between = between
        self._moved = moved
        self._first_tag = opening * MOST_TAGS
        self.port = port_of(device)

    @functools.cached_property
    def stream(self) -> Any:
        """The stream on which tensors travel, so that transfers overlap with compute; None where there are no streams.

        Streams are few, so a wire that only moves tensors of the host makes none.
        """
        return self.port.new_stream()

    @property
    def transfer_stream(self) -> Any:
        """The stream of the transfers themselves; None if the host moves tensors."""
        return None if self._between is None else self.stream

    def failure(self, error: Exception, doing: str, route: Route | None) -> Exception:
        """Return what to raise when this end cannot go on: PeerError if the connection broke, else the error itself."""
        where = "" if route is None else f" on channel '{route}'"
        if not is_broken_connection(error):
            error.add_note(f"while {doing}{where}, which connects this process with rank {self.peer}")
            return error
        lost = PeerError(f"the connection to rank {self.peer} broke while {doing}{where}: {error}")
        lost.__cause__ = error
        return lost

    @property
    def sends_at_once(self) -> bool:
        """Whether any thread may start a send, because starting one holds up nothing."""
        return self.port.is_host

    def load(self, packets: Sequence[Packet], message: Message, ready: Any) -> list[Tensor]:
        """Return the bytes of packets, in the memory from which they travel.

        Tensors of the device are read after the event ``ready``. If they travel over the host, this method waits until
        they have been copied there.
        """
        if all(packet.on_host for packet in packets) or self.stream is None:
            return [packet.packed(message) for packet in packets]
        for tensor in message.tensors:
            if tensor is not None and not tensor.is_cpu:  # its owner may free it before it has been read
                tensor.record_stream(self.stream)
        with self.port.on_stream(self.stream):
            self.stream.wait_event(ready)
            flats = [packet.packed(message) for packet in packets]
            if self._between is None:
                flats = [flat.to("cpu", non_blocking=True) for flat in flats]
                self.port.event().synchronize()
        return flats

    def begin(self, flat: Tensor, pieces: int = 1, tag: int = 0, passage: Passage | None = None) -> Sequence[Any]:
        """Begin to send bytes from :meth:`load`, or parts as they arrive by a passage; return works for :meth:`end`."""
        if not flat.is_cpu:
            assert self._between is not None
            with self.port.on_stream(self.stream):
                self._between.group.send([flat], self._between.peer, 0).wait()  # blocks the stream, not the host
            return ()

        def begin(part: Tensor) -> Any:
            if passage is not None:
                passage.wait()
            return self._on_host.group.send([part], self._on_host.peer, self._first_tag + tag)

        return begun(begin, flat, pieces)

    def end(self, works: Sequence[Any]) -> None:
        """Wait until a transfer on the host is done."""
        ended(works, self._moved)

    def take(self, flat: Tensor, pieces: int = 1, tag: int = 0) -> Sequence[Any]:
        """Begin to receive bytes on the host."""
        own = self._first_tag + tag
        return begun(lambda part: self._on_host.group.recv([part], self._on_host.peer, own), flat, pieces)

    def post(self, packet: Packet, pieces: int = 1, tag: int = 0) -> Posted:
        """Post the receive of a packet; between devices it is posted later, by :meth:`land`."""
        on_host = packet.on_host or self.port.is_host
        if not on_host and self._between is not None:
            return Posted(packet, None, ())
        flat = torch.empty(packet.nbytes, dtype=torch.uint8, pin_memory=not on_host, device="cpu")
        return Posted(packet, flat, self.take(flat, pieces, tag))

    def land(self, posted: Posted, passage: Passage | None = None) -> Tensor:
        """Wait for a packet and return its bytes; a passage is told of each part, so that it can be sent on.

        On a device the bytes are valid once the wire's stream reaches this point.
        """

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
            self._between.group.recv([flat], self._between.peer, 0).wait()  # blocks the stream, not the host
            return flat
