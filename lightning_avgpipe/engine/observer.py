"""Define observers of an iteration in a process, which may also intervene."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Route
from lightning_avgpipe.schedule import Action


@dataclass(frozen=True)
class Work:
    """An action that is about to run.

    Attributes:
        stage: number k of the stage.
        pipeline: number n of the pipeline.
        action: action of the stage.
        received: input of the action; None if it has none.
        results: results of the last stage so far, by micro-batch.
    """

    stage: int
    pipeline: int
    action: Action
    received: Message | None = None
    results: Mapping[int, Any] = field(default_factory=dict)


class Observer:
    """A base class for observers of iterations; by default it does nothing.

    The main thread calls the methods about actions; any thread may call those about messages.
    """

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action by calling ``do``; return the message to send."""
        return do()

    def waiting(self, note: str) -> AbstractContextManager[None]:
        """Observe a wait of the executor, which lasts for this context."""
        return contextlib.nullcontext()

    def queued(self) -> None:
        """Observe that a message will be sent."""

    def sending(self, route: Route, micro_batch: int, stream: Any) -> AbstractContextManager[None]:
        """Observe the sending of a queued message within this context, on a stream, or (None) by the host."""
        return contextlib.nullcontext()

    def arrived(self, route: Route, micro_batch: int, stream: Any) -> None:
        """Observe the arrival of a message: when its stream gets here, or (None) now."""

    def activity(self, kind: Literal["step", "averaging"]) -> AbstractContextManager[None]:
        """Observe other work of the device after the iteration, which lasts for this context."""
        return contextlib.nullcontext()

    def agree(self, processes: Collectives) -> None:
        """Exchange findings after the iteration. Every process must call this, with observers of the same kinds."""


class Observers:
    """The observers of a process's next iterations."""

    def __init__(self) -> None:
        self._present: list[Observer] = []

    def __iter__(self) -> Iterator[Observer]:
        """Iterate over the observers in the order in which they were added."""
        return iter(self._present)

    @contextlib.contextmanager
    def having(self, *more: Observer) -> Iterator[None]:
        """Add observers within this context."""
        self._present = [*self._present, *more]
        try:
            yield
        finally:
            self._present = [observer for observer in self._present if observer not in more]

    @contextlib.contextmanager
    def activity(self, kind: Literal["step", "averaging"]) -> Iterator[None]:
        """Let all observers observe other work of the device after the iteration, within this context."""
        with contextlib.ExitStack() as seen:
            for observer in self._present:
                seen.enter_context(observer.activity(kind))
            yield
