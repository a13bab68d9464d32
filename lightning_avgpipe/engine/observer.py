"""Observers: what looks on while a process runs an iteration, and may step in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.schedule import Action


@dataclass(frozen=True)
class Work:
    """An action that is about to run.

    Attributes:
        stage: k.
        pipeline: n.
        action: of the stage.
        received: its input; None where it has none.
        results: of the last stage, by micro-batch, once they are there.
    """

    stage: int
    pipeline: int
    action: Action
    received: Message | None = None
    results: Mapping[int, Any] = field(default_factory=dict)


class Observer:
    """Sees the iterations that it is passed to; by default it does nothing.

    The main thread tells it of actions, and any thread of messages between processes.
    """

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Have an action done; returns what to send."""
        return do()

    def waiting(self, note: str) -> AbstractContextManager[None]:
        """The executor waits within this context."""
        return contextlib.nullcontext()

    def queued(self) -> None:
        """A message will be sent."""

    def sending(self, route: Route, micro_batch: int, stream: Any) -> AbstractContextManager[None]:
        """A queued message is sent within this context: on a stream, or None: by the host."""
        return contextlib.nullcontext()

    def arrived(self, route: Route, micro_batch: int, stream: Any) -> None:
        """A message is there: when its stream gets here, or None: now."""

    def activity(self, kind: Literal["step", "averaging"]) -> AbstractContextManager[None]:
        """The device does something else, after the iteration, within this context."""
        return contextlib.nullcontext()

    def agree(self, processes: Collectives) -> None:
        """The iteration has ended here. Every process calls it, with observers of the same kinds."""


class Observers:
    """Those that see the next iterations of a process."""

    def __init__(self) -> None:
        self._present: list[Observer] = []

    def __iter__(self) -> Iterator[Observer]:
        """In the order in which they came."""
        return iter(self._present)

    @contextlib.contextmanager
    def having(self, *more: Observer) -> Iterator[None]:
        """Within this context there are more of them."""
        self._present = [*self._present, *more]
        try:
            yield
        finally:
            self._present = [observer for observer in self._present if observer not in more]

    @contextlib.contextmanager
    def activity(self, kind: Literal["step", "averaging"]) -> Iterator[None]:
        """The device does something else, after the iteration, within this context."""
        with contextlib.ExitStack() as seen:
            for observer in self._present:
                seen.enter_context(observer.activity(kind))
            yield
