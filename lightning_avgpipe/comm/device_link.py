"""Device links: one way from a device to another, which the channels of all pipelines share.

Sends and receives between devices meet: until they have, they hold up all that is behind them on their streams, of
which a process has but few. So however many pipelines there are, a link has one communicator and one stream, and both
its ends begin messages in the same order: that in which they were put. Each frame says where its message comes::

    put      | a0 b0 a1 b1          channels a and b, of two pipelines
    frames a | a0:0    a1:2         arrive on connections of the host, each when it may
    frames b | b0:1    b1:3
    link     | a0 b0 a1 b1          whoever has a place waits until those before it have begun

Nobody waits for ever: processes begin and end the iterations of all pipelines in the same order, so what comes before a
message that a process waits for is expected there as well.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.utils.device import port_of

_TAG = 0


class DeviceLink:
    """This process's end of a link.

    Args:
        group: of torch.distributed, between the two devices and for this direction only.
        peer: number of the other process in it.
        device: of this process.
        timeout_s: longest wait for the messages before one.
    """

    def __init__(self, group: Any, peer: int, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._given = 0  # places
        self._begun = 0  # messages
        self._broken = False

    @functools.cached_property
    def stream(self) -> Any:
        """On which tensors travel, so that they overlap with compute."""
        return port_of(self._device).new_stream()

    def take_place(self) -> int:
        """That of a message which is put."""
        with self._changed:
            self._given += 1
            return self._given - 1

    @contextlib.contextmanager
    def turn(self, place: int, ends: Callable[[], bool] = bool) -> Iterator[None]:
        """Begin with the tensors of a message within this context, which waits until it is its turn.

        Args:
            place: of the message.
            ends: whether nobody wants it any more; asked when :meth:`notify` is called.
        Raises:
            RuntimeError: its turn does not come.
        """
        with self._changed:
            came = self._changed.wait_for(lambda: place == self._begun or self._broken or ends(), self._timeout_s)
            if self._broken or ends():
                raise RuntimeError("the connection between the devices was given up")
            if not came:
                raise RuntimeError(
                    f"message {place} between the devices has waited {self._timeout_s:.0f} s for message {self._begun}"
                )
        try:
            yield
        except BaseException:  # nobody knows what has begun: whoever comes next would meet something else
            self.give_up()
            raise
        with self._changed:
            self._begun += 1
            self._changed.notify_all()

    def send(self, flat: Tensor) -> None:
        """Begin to send bytes; the current stream waits for it."""
        self._group.send([flat], self._peer, _TAG).wait()

    def receive(self, flat: Tensor) -> None:
        """Begin to receive bytes; the current stream waits for it."""
        self._group.recv([flat], self._peer, _TAG).wait()

    def notify(self) -> None:
        """Somebody may not want a message any more."""
        with self._changed:
            self._changed.notify_all()

    def give_up(self) -> None:
        """Let nothing begin any more; whoever waits ends with an error."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
