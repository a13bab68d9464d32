"""Give each of several parallel pipelines a device stream of its own, so that their kernels share the device.

::

    of the caller   batches, models -+                metric, loss +          +- optimizers, averaging
    of pipeline 0                    +- F0 F1 .......... F2 ......+- B0 B1 ---+
    of pipeline 1                    +- F0 F1 B0 F2 B1 B2 --------------------+

A pipeline's stream starts after all work queued on the caller's stream, which waits for it when the iteration ends.
Work that pipelines share, such as the update of a metric, stays on the caller's stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning_avgpipe.utils.device import DevicePort


class OwnStream:
    """The device stream of one pipeline.

    Args:
        port: port of the device, which must have streams.
    """

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._stream = port.new_stream(first=False)
        self._callers: Any = None

    def begin(self) -> None:
        """Begin an iteration after the work queued on the caller's stream."""
        self._callers = self._port.current_stream()
        self._stream.wait_event(self._port.event())

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Run work of the pipeline within this context."""
        return self._port.on_stream(self._stream)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Run work on the caller's stream within this context, between work of the pipeline."""
        self._callers.wait_event(self._stream.record_event())
        with self._port.on_stream(self._callers):
            yield
        self._stream.wait_event(self._callers.record_event())

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function on the caller's stream."""
        with self.left():
            return run(*args, **kwargs)

    def end(self) -> None:
        """End the iteration: later work on the current stream waits for the pipeline."""
        self._port.current_stream().wait_event(self._stream.record_event())
