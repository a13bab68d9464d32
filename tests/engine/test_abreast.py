"""Micro-batches abreast: one at a time, in order, from meeting to meeting."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from lightning_avgpipe.engine.abreast import Abreast
from lightning_avgpipe.errors import StepChangedError


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def abreast(count: int) -> Abreast:
    return Abreast(count, lambda i: contextlib.nullcontext())


def test_the_last_to_come_does_it_and_all_get_what_came_of_it() -> None:
    together, done = abreast(3), []

    def work(i: int) -> list[str]:
        done.append(f"{i} before")
        found = together.meet("step", lambda: done.append("step") or f"by {together.index}")  # type: ignore[func-returns-value]
        done.append(f"{i} after")
        return [found, threading.current_thread().name]

    results = together.run(work)
    assert [found for found, _ in results] == ["by None"] * 3 and len({name for _, name in results}) == 3
    assert done == ["0 before", "1 before", "2 before", "step", "0 after", "1 after", "2 after"]


def test_what_the_first_does_for_all_makes_nobody_wait() -> None:
    together, done = abreast(2), []

    def work(i: int) -> None:
        together.first("clear", lambda: done.append("clear"))
        done.append(str(i))
        together.meet("step", lambda: None)

    together.run(work)
    assert done == ["clear", "0", "1"]


@pytest.mark.parametrize(
    ("meetings", "message"),
    [
        ([["a"], ["b"]], "it comes to a at .* in micro-batch 0, and to b at .* in micro-batch 1"),
        ([["a"], []], "it comes to a at .* and to its end"),
        ([[], ["a"]], "it comes to its end in micro-batch 0, and to a"),
        ([["a", "c"], ["a"]], "it comes to c"),
    ],
)
def test_micro_batches_that_come_to_other_meetings_are_told_apart(meetings: list[list[str]], message: str) -> None:
    together = abreast(2)
    with pytest.raises(StepChangedError, match=message):
        together.run(lambda i: [together.meet(what, lambda: None) for what in meetings[i]])


def test_nobody_goes_on_after_an_error_even_if_one_catches_it() -> None:
    together, done = abreast(3), []

    def work(i: int) -> None:
        with contextlib.suppress(ValueError):
            together.meet("step", lambda: int("no number"))
        done.append(i)
        together.meet("again", lambda: done.append("again"))

    with pytest.raises(ValueError, match="no number"):
        together.run(work)
    assert done == [2]


def test_micro_batches_that_differ_do_not_go_on_even_if_one_catches_it() -> None:
    together, done = abreast(2), []

    def work(i: int) -> None:
        for what in ["backward", "step"][: 2 * i] or ["step"]:
            with contextlib.suppress(StepChangedError):
                together.meet(what, lambda: done.append(1))

    with pytest.raises(StepChangedError, match="it comes to step"):
        together.run(work)
    assert not done
