"""Channels: one-way FIFO links between stages. A send never blocks compute; receives are posted in advance."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route


class Traffic(Protocol):
    """An observer of the messages that travel between processes. Any thread may call it."""

    def queued(self) -> None:
        """Note that a message is queued to be sent."""

    def sending(self, route: Route, micro_batch: int, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which a queued message is sent: on a stream, or by the host if the stream is None."""

    def arrived(self, route: Route, micro_batch: int, stream: Any) -> None:
        """Note that a message arrives when the stream reaches this point, or has arrived if the stream is None."""


class Inbox(Protocol):
    """The receiving end of a channel."""

    def expect(self, count: int, observers: Sequence[Traffic] = (), onwards: Outbox | None = None) -> None:
        """Announce that ``count`` messages will come, so that they are received in advance.

        Args:
            count: number of messages.
            observers: told when each of them arrives.
            onwards: channel that each message is also sent on to; None: to none.
        """

    def ready(self) -> bool:
        """Return whether a message has arrived."""

    def get(self) -> Message:
        """Take the oldest message that has arrived."""

    def close(self, join_s: float) -> None:
        """Stop receiving, drop messages that were not taken, and wait up to ``join_s`` seconds. May be called again."""


class Outbox(Protocol):
    """The sending end of a channel."""

    def put(self, message: Message, observers: Sequence[Traffic] = ()) -> None:
        """Queue a message to be sent, and tell the observers; returns at once."""

    def close(self, join_s: float) -> None:
        """Stop after the queued messages are sent, and wait up to ``join_s`` seconds for that. May be called again."""
