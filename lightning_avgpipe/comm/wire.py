"""Wires: they move tensors of known sizes between two processes, over the host or between devices."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import MOST_TAGS, TensorForm, as_bytes
from lightning_avgpipe.comm.device_link import DeviceLink
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
