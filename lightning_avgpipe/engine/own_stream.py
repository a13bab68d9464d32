"""A stream of its own for each of several parallel pipelines, so that their kernels share a device.

::

    of the caller   batches, models -+                metric, loss +          +- optimizers, averaging
    of pipeline 0                    +- F0 F1 .......... F2 ......+- B0 B1 ---+
    of pipeline 1                    +- F0 F1 B0 F2 B1 B2 --------------------+

A pipeline's stream begins after all that the caller's has been given, which waits for it when the iteration ends. What
pipelines have in common, such as the state of a metric, stays on the caller's stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning_avgpipe.utils.device import DevicePort


class OwnStream:
    """The stream of one pipeline.

    Args:
        port: of the device, which has streams.
    """

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._stream = port.new_stream(first=False)
        self._callers: Any = None

    def begin(self) -> None:
        """An iteration begins: what the caller's stream was given comes before."""
        self._callers = self._port.current_stream()
        self._stream.wait_event(self._port.event())

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Work within this context is the pipeline's."""
        return self._port.on_stream(self._stream)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Work within this context, in the midst of the pipeline's, goes to the caller's stream."""
        self._callers.wait_event(self._stream.record_event())
        with self._port.on_stream(self._callers):
            yield
        self._stream.wait_event(self._callers.record_event())

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call something so."""
        with self.left():
            return run(*args, **kwargs)

    def end(self) -> None:
        """The iteration has ended: what the current stream is given now comes after it."""
        self._port.current_stream().wait_event(self._stream.record_event())
