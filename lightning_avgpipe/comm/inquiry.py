"""Inquiries: a process asks all others what they are doing, and answers them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightning_avgpipe.comm.board import Answer, Board

_ANSWER_S = 1.5  # how long the others may take to say what they do
_STORE_S = 3.0  # and the store, to pass it on


@dataclass(frozen=True)
class Account:
    """What all processes do, as far as they say it.

    Attributes:
        text: for an error message, after its first sentence; or empty.
        idle_s: since the connections of any process last moved bytes.
        silent: ranks of those that do not answer.
        across: ranks of those that wait for other groups of processes.
    """

    text: str = ""
    idle_s: float = math.inf
    silent: tuple[int, ...] = ()
    across: tuple[int, ...] = ()


class Inquiries:
    """This process's, and its answers to those of others.

    Args:
        names: of all processes, by rank.
        ranks: of those that take part now.
        answer: of this process.

    Attributes:
        account: what was found; None until it is there.
        limit_s: longest time that an account takes.
    """

    limit_s = _ANSWER_S + _STORE_S

    def __init__(
        self, names: Sequence[str], ranks: Callable[[], Collection[int]], answer: Callable[[], Answer]
    ) -> None:
        self.account: Account | None = None
        self._names = names
        self._ranks = ranks
        self._answer = answer
        self.forget()

    def forget(self) -> None:
        """Questions are numbered anew: what was asked or answered is of another board."""
        self._wanted, self._answered = False, 0
        self._asked: tuple[int, float] | None = None  # number, and until when answers are awaited

    @property
    def awaits_answers(self) -> bool:
        """Whether others are about to answer."""
        return self._asked is not None

    def begin(self) -> None:
        """Ask with the next exchange."""
        self.account, self._wanted = None, True

    def exchange(self, board: Board) -> None:
        """Ask if that is wanted, answer what others ask, and collect what they answer."""
        if self._wanted and self._asked is None:
            self._asked = board.ask(), time.monotonic() + _ANSWER_S
        if (asked := board.asked()) > self._answered:
            answer = self._answer()
            for question in range(self._answered + 1, asked + 1):  # several may ask at the same time
                board.answer(question, answer)
            self._answered = asked
        if self._asked is not None:
            self._collect(board, *self._asked)

    def _collect(self, board: Board, question: int, until: float) -> None:
        """The account, if all have answered, or some do not."""
        answers, ranks = board.answers(question), self._ranks()
        missing = tuple(rank for rank in ranks if rank not in answers)
        if missing and time.monotonic() < until:
            return
        silent = f"does not answer within {_ANSWER_S} s: it is gone, stopped or stuck"
        lines = [f"  {self._names[rank]} {answers[rank].doing if rank in answers else silent}" for rank in ranks]
        idle_s = min((answer.idle_s for answer in answers.values()), default=math.inf)
        across = tuple(rank for rank, answer in answers.items() if answer.across)
        self.account = Account(". What the processes do:\n" + "\n".join(lines), idle_s, missing, across)
        self._asked, self._wanted = None, False
