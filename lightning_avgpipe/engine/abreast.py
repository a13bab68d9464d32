"""Abreast: one function runs on several micro-batches, which go from one meeting to the next in turn.

::

    micro-batch 0    forward backward |                  .           | forward backward |
    micro-batch 1                     | forward backward . step()    |                  | forward backward ...
                                        a turn             the meeting: the last to come does it, once for all

A function that steps optimizers itself cannot be run for one micro-batch after the other: each would step. It cannot be
cut into pieces either, since it is plain Python. So each micro-batch has a thread with the function's variables; one of
them runs at a time, in the order of the micro-batches, until it comes to what all of them do together.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import address

T = TypeVar("T")


class _GivenUp(BaseException):
    """Leaves the function, since another micro-batch has failed; no error, so that user code does not catch it."""


class _Place(NamedTuple):
    """Where a micro-batch has come to.

    Attributes:
        what: is done there; empty at the end.
        given: what it is done with.
        before: what was done on the way, by the first micro-batch for all.
        source: line.
    """

    what: str
    given: Any
    before: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return f"{self.what} at {self.source}" if self.what else "its end"


class _Follower:
    """A micro-batch: the gate where it waits for its turn, and what it has come to."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.before: tuple[str, ...] = ()  # what was done since the last meeting
        self.ended = False


class Abreast:
    """Runs a function on micro-batches that meet.

    Args:
        count: M, of micro-batches.
        turn: context within which micro-batch i runs until it comes to a meeting.
        common: context of what one does for all.
    """

    def __init__(
        self,
        count: int,
        turn: Callable[[int], AbstractContextManager[None]],
        common: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._turn = turn
        self._common = common
        self._followers = [_Follower() for _ in range(count)]
        self._over = threading.Semaphore(0)
        self._place = _Place("", (), (), "")  # that the first has come to
        self._error: BaseException | None = None
        self._outcome: Any = None
        self._running = threading.local()
        self._open = contextlib.ExitStack()
        self._together = False

    @property
    def index(self) -> int | None:
        """The micro-batch of this thread, while it runs for itself; None elsewhere and for what all do together."""
        return None if self._together else getattr(self._running, "index", None)

    @property
    def is_for_all(self) -> bool:
        """Whether what runs now all do together."""
        return self._together

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What the function returns for each micro-batch.

        Raises:
            StepChangedError: micro-batches come to other meetings.
            BaseException: what the function raised first. No thread is left then either.
        """
        results: list[Any] = [None] * len(self._followers)
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(self._body, i, work, results))
            for i in range(len(results))
        ]
        for thread in threads:
            thread.start()
        self._followers[0].gate.release()
        try:
            self._over.acquire()
        except BaseException as error:  # somebody has interrupted this thread: no turn begins any more
            self._error = error
            self._over.acquire()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def _body(self, i: int, work: Callable[[int], Any], results: list[Any]) -> None:
        self._followers[i].gate.acquire()
        self._running.index = i
        try:
            if self._error is None:
                self._open.enter_context(self._turn(i))
                results[i] = work(i)
                self._open.close()
                self._come_to("", (), "")
        except _GivenUp:
            pass  # the micro-batch that failed has said why
        except BaseException as error:
            error.add_note(f"in micro-batch {i} of {len(results)} of a step that optimizes manually")
            self._error = self._error or error
        finally:
            self._followers[i].ended = True
            with contextlib.suppress(BaseException) if self._error is not None else contextlib.nullcontext():
                self._open.close()
            self._go_on(i)

    def _go_on(self, i: int) -> None:
        """Another micro-batch has its turn, or all have ended."""
        left = [follower for follower in self._followers if not follower.ended]
        if not left:
            self._over.release()
        else:
            (left[0] if self._error is not None else self._followers[(i + 1) % len(self._followers)]).gate.release()

    # -- meetings ----------------------------------------------------------------------------------------------------

    def meet(self, what: str, action: Callable[[], T], given: Any = ()) -> T:
        """All micro-batches come here; then the last one does it, and all get what came of it.

        Args:
            what: is done, and with what, in words; the same for all.
            given: what it is done with; tensors and numbers must be the same for all.
        """
        i = self.index
        if i is None:
            return action()
        self._check()
        self._open.close()
        self._come_to(what, given, source_line())
        if i == len(self._followers) - 1:
            self._do(action)
        if len(self._followers) > 1:
            self._go_on(i)
            self._followers[i].gate.acquire()
        self._check()
        self._open.enter_context(self._turn(i))
        return self._outcome  # type: ignore[no-any-return]

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            with self.together(), self._common():
                self._outcome = action()
        except BaseException as error:  # the function may catch it, but the others cannot go on
            self._error = error
            raise

    def _check(self) -> None:
        if self._error is not None:
            raise _GivenUp

    def first(self, what: str, action: Callable[[], Any]) -> None:
        """The first micro-batch to come does it for all, and nobody waits."""
        i = self.index
        if i is not None:
            self._followers[i].before += (what,)
        if not i:
            with self.together(), self._common():
                action()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within this context what runs is for all micro-batches."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before

    def _come_to(self, what: str, given: Any, source: str) -> None:
        """A micro-batch has come to a meeting, or to its end, as the first one has before it."""
        i = self._running.index
        place = _Place(what, given, self._followers[i].before, source)
        self._followers[i].before = ()
        if i == 0:
            self._place = place
        elif difference := _difference(self._place, place):
            self._error = StepChangedError(  # also where the function catches it
                f"training_step does not do the same with all micro-batches: {difference[0]} in micro-batch 0, and "
                f"{difference[1]} in micro-batch {i}. Micro-batches step optimizers together, so what lies between "
                "two steps must be alike; num_microbatches=1 gives it whole batches"
            )
            raise self._error


def _difference(one: _Place, other: _Place) -> tuple[str, str] | None:
    """How two differ, in words."""
    if one.what != other.what:
        return f"it comes to {one}", f"to {other}"
    if one.before != other.before:
        return f"before {one} it does {list(one.before)}", f"{list(other.before)}"
    ones, spec = tree.flatten(one.given)
    others, other_spec = tree.flatten(other.given)
    if spec != other_spec or not all(map(_same, ones, others)):
        return f"{one} is given {_shown(one.given)}", f"{_shown(other.given)}"
    return None


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return address(one) == address(other) or torch.equal(one, other)


def _shown(given: Any) -> str:
    leaves = tree.flatten(given)[0]
    shown = (f"a tensor {tuple(t.shape)}" if isinstance(t, Tensor) and t.ndim else str(t) for t in leaves)
    return ", ".join(shown) or "nothing"
