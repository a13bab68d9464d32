"""Channels: one-way FIFO links between stages. A send never blocks compute; a receive is posted ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route


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
        """Receive no more, and drop what was not taken. Waits so many seconds for that; may be called again."""


class Outbox(Protocol):
    """The sending end of a channel."""

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Send, and tell the observers; returns at once."""

    def close(self, join_s: float) -> None:
        """Stop after what is queued. Waits so many seconds for that; may be called again."""
