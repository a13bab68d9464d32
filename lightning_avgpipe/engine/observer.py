"""Define observers of an iteration in a process, which may also change what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lightning_avgpipe.comm.channel import Traffic
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.errors import MemoryShortage
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.utils.device import is_out_of_memory

T = TypeVar("T")


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


class Observer(Traffic):
    """A base class for observers of iterations; by default it does nothing.

    The main thread calls the methods about actions; any thread may call those about messages.
    """

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action by calling ``do``; return the message to send."""
        return do()

    def waiting(self, note: str) -> AbstractContextManager[None]:
        """Observe a wait of the executor, which lasts for this context."""
        return contextlib.nullcontext()

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
    def with_added(self, *more: Observer) -> Iterator[None]:
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


class MemoryGuard(Observer):
    """An observer that catches running out of memory in one iteration, so that all processes end it without hanging.

    ::

        stage 0 | F0 F1 F2 B0 .. ..       F1 of stage 1 does not fit. From then on stage 1 computes nothing and sends
        stage 1 | F0 !! .. .. .. ..       empty messages, and so does each process that gets one. No receive hangs.

    Only trials of other settings use the guard. In training, a process that runs out of memory ends all processes.
    """

    def __init__(self) -> None:
        self._spoilt = False
        self._account: str | None = None

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action, unless an action on this or another process has run out of memory."""
        self._spoilt = self._spoilt or (work.received is not None and work.received.abandoned)
        output = self.run(do, f"stage {work.stage} in {work.action}")
        return Message(work.action.micro_batch, (), abandoned=True) if self._spoilt else output

    def run(self, do: Callable[[], T], what: str) -> T | None:
        """Return ``do()``, or None if memory has run out before or does now; ``what`` describes the work."""
        if not self._spoilt:
            try:
                return do()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._spoilt = True
                self._account = f"{what}: {str(error) or type(error).__name__}"  # the traceback holds tensors
        return None

    def agree(self, processes: Collectives) -> None:
        """Check on all processes that the iteration fitted the memory. Every process must call this.

        Raises:
            MemoryShortage: it did not; the message says where, and quotes the allocator.
        """
        accounts = processes.exchange_objects(self._account)
        short = [f"rank {rank}, {account}" for rank, account in enumerate(accounts) if account is not None]
        if short:
            raise MemoryShortage("; ".join(short))
