"""The board: what the processes tell each other through the store that they share, not through their channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist

STOP, REQUEUE = "stop", "requeue"  # requests from outside: to end, and to save a checkpoint for a later start
_LONGEST = 64 * 1024  # most characters of a text


@dataclass(frozen=True)
class Answer:
    """The answer of a process to the question what it is doing.

    Attributes:
        doing: what the process does, as text.
        idle_s: seconds since its connections last moved bytes.
    """

    doing: str
    idle_s: float


class Board:
    """One process's view of the store. No method waits for another process, but the store itself may be slow to answer.

    Args:
        store: store that all processes share, used for one run.
        rank: rank of this process.
        world_size: number of processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    # -- failures ----------------------------------------------------------------------------------------------------

    def post_failure(self, text: str) -> None:
        """Post a failure, unless one is posted already: the first one is the cause of the others."""
        self._store.compare_set("failure", "", _sendable(text))

    def failure(self) -> str | None:
        """Return the posted failure, or None if there is none.

        A call that returns a failure counts this process as one that has read it, so make only one.
        """
        if not self._store.check(["failure"]):
            return None
        self._store.add("read", 1)
        return _received(self._store.get("failure"))

    def read_by_all(self) -> bool:
        """Return whether all processes have read the failure."""
        return self._store.add("read", 0) >= self._world_size

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, name: str) -> None:
        """Post a request to all processes."""
        self._store.set(f"request/{name}", "1")

    def requested(self, name: str) -> bool:
        """Return whether a process has posted this request."""
        return bool(self._store.check([f"request/{name}"]))

    # -- questions ---------------------------------------------------------------------------------------------------

    def ask(self) -> int:
        """Ask all processes what they are doing, and return the number of the question."""
        return int(self._store.add("questions", 1))

    def asked(self) -> int:
        """Return the number of the last question; 0 if there was none."""
        return int(self._store.add("questions", 0))

    def answer(self, question: int, answer: Answer) -> None:
        """Post this process's answer to a question."""
        self._store.set(f"answer/{question}/{self._rank}", f"{answer.idle_s:.3f} {_sendable(answer.doing)}")

    def answers(self, question: int) -> dict[int, Answer]:
        """Return the answers that have been posted by now, by rank."""
        keys = {rank: f"answer/{question}/{rank}" for rank in range(self._world_size)}
        found = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        return {rank: _answered(_received(told)) for rank, told in found.items()}


class Requests:
    """The requests from outside, such as to stop by a signal, that this process knows of.

    Args:
        gathers: whether this process forwards requests to the others, and so must read those that others posted.
    """

    def __init__(self, gathers: bool) -> None:
        self._gathers = gathers
        self._known: set[str] = set()
        self._posted: set[str] = set()

    @property
    def known(self) -> frozenset[str]:
        """The requests that came to this process and, if this process gathers, to any other."""
        return frozenset(self._known)

    def note(self, request: str) -> None:
        """Note a request to this process. Nothing here waits, so a signal handler may call it."""
        self._known.add(request)

    def exchange(self, board: Board) -> None:
        """Post the requests that are new here, and read those that are new elsewhere."""
        for request in (STOP, REQUEUE):
            if request in self._known and request not in self._posted:
                self._posted.add(request)
                board.request(request)
            elif self._gathers and request not in self._known and board.requested(request):
                self._known.add(request)


def _sendable(text: str) -> str:
    """Shorten a text to a size that fits the store, and escape characters that cannot be encoded."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _answered(told: str) -> Answer:
    try:
        idle_s, doing = told.split(" ", 1)
        return Answer(doing, float(idle_s))
    except ValueError:  # not in this format
        return Answer(told, math.inf)


def _received(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
