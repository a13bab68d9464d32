"""Inquiries: a process asks all others what they are doing, and answers when others ask."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_avgpipe.comm.board import Answer, Board

_ANSWER_S = 1.5  # longest wait for the answers of the others
_STORE_S = 3.0  # longest time that the store may take to transmit them


@dataclass(frozen=True)
class Account:
    """A summary of what all processes are doing, from their answers.

    Attributes:
        text: text to append to the first sentence of an error message; or empty.
        idle_s: seconds since the connections of any process last moved bytes.
    """

    text: str = ""
    idle_s: float = math.inf


class Inquiries:
    """The questions that this process asks, and its answers to those of others.

    Args:
        names: names of all processes, by rank.
        answer: returns the answer of this process.

    Attributes:
        account: summary of the answers; None until they have come or are overdue.
        limit_s: longest time that an account takes, in seconds.
    """

    limit_s = _ANSWER_S + _STORE_S

    def __init__(self, names: Sequence[str], answer: Callable[[], Answer]) -> None:
        self.account: Account | None = None
        self._names = names
        self._answer = answer
        self._wanted, self._answered = False, 0
        self._asked: tuple[int, float] | None = None  # number, and until when answers are awaited

    @property
    def awaits_answers(self) -> bool:
        """Whether answers to a question of this process are awaited."""
        return self._asked is not None

    def begin(self) -> None:
        """Ask all processes with the next exchange."""
        self.account, self._wanted = None, True

    def exchange(self, board: Board) -> None:
        """Ask if :meth:`begin` was called, answer the questions of others, and collect their answers."""
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
        """Make the account, once all have answered or the time for answers is over."""
        answers = board.answers(question)
        if len(answers) < len(self._names) and time.monotonic() < until:
            return
        silent = f"does not answer within {_ANSWER_S} s: it is gone, stopped or stuck"
        doing = [answers[rank].doing if rank in answers else silent for rank in range(len(self._names))]
        lines = [f"  {name} {does}" for name, does in zip(self._names, doing, strict=True)]
        idle_s = min((answer.idle_s for answer in answers.values()), default=math.inf)
        self.account = Account(". What the processes do:\n" + "\n".join(lines), idle_s)
        self._asked, self._wanted = None, False
