"""The board: what the processes tell each other through the store that they share, beside their connections."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.distributed as dist

_LONGEST = 64 * 1024  # characters of a text


@dataclass(frozen=True)
class Answer:
    """What a process says when it is asked.

    Attributes:
        doing: what it does.
        idle_s: since its connections last moved bytes.
        across: whether it waits for other groups of processes.
    """

    doing: str
    idle_s: float
    across: bool = False


class Board:
    """One process's view. Nothing here waits for another process, but the store may take its time.

    Args:
        store: shared by all processes, for one run.
        rank: of this process.
        ranks: of the processes that take part now.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Callable[[], Collection[int]]) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks

    def move(self, store: dist.Store) -> None:
        """From now on it is in another store, of the same processes and more."""
        self._store = store

    # -- failures ----------------------------------------------------------------------------------------------------

    def post_failure(self, text: str) -> None:
        """Say what has failed, unless there is a failure: the first one is the cause of the others."""
        self._store.compare_set("failure", "", sendable(text))

    def failure(self) -> str | None:
        """What has failed, if something has; this process counts as one that has read it. To be read once."""
        if not self._store.check(["failure"]):
            return None
        self._store.add("read", 1)
        return _received(self._store.get("failure"))

    def read_by_all(self) -> bool:
        """Whether all processes have read of the failure."""
        return self._store.add("read", 0) >= len(self._ranks())

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, name: str) -> None:
        """Ask all processes for something."""
        self._store.set(f"request/{name}", "1")

    def requested(self, name: str) -> bool:
        """Whether a process has asked for it."""
        return bool(self._store.check([f"request/{name}"]))

    # -- questions ---------------------------------------------------------------------------------------------------

    def ask(self) -> int:
        """Ask all processes what they do; returns the number of the question."""
        return int(self._store.add("questions", 1))

    def asked(self) -> int:
        """Number of the last question; 0 if there was none."""
        return int(self._store.add("questions", 0))

    def answer(self, question: int, answer: Answer) -> None:
        """Say what this process does."""
        self._store.set(
            f"answer/{question}/{self._rank}", f"{answer.idle_s:.3f} {answer.across:d} {sendable(answer.doing)}"
        )

    def answers(self, question: int) -> dict[int, Answer]:
        """rank -> what it has answered by now."""
        keys = {rank: f"answer/{question}/{rank}" for rank in self._ranks()}
        found = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        return {rank: _answered(_received(told)) for rank, told in found.items()}


def sendable(text: str) -> str:
    """Of a size that fits the store, and of characters that can be encoded; what is not is shown by its number."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _answered(told: str) -> Answer:
    try:
        idle_s, across, doing = told.split(" ", 2)
        return Answer(doing, float(idle_s), across == "1")
    except ValueError:  # of a stranger
        return Answer(told, math.inf)


def _received(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
