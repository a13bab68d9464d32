"""Links between devices: messages begin in the order of their places, and nobody waits for one that will not come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from lightning_avgpipe.comm.device_link import DeviceLink

LIMIT_S = 20.0


def link(timeout_s: float = LIMIT_S) -> DeviceLink:
    return DeviceLink(None, 1, torch.device("cpu"), timeout_s)


def in_thread(work: Callable[[], None]) -> Callable[[], str]:
    """Begins; gives what ends it, and with which error."""
    errors: list[str] = []

    def run() -> None:
        try:
            work()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended() -> str:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        return errors[0] if errors else ""

    return ended


def test_messages_begin_in_the_order_in_which_they_were_put() -> None:
    shared, begun = link(), list[int]()

    def begin(place: int) -> None:
        with shared.turn(place):
            begun.append(place)

    places = [shared.take_place() for _ in range(4)]
    for ended in [in_thread(lambda p=place: begin(p)) for place in reversed(places)]:  # type: ignore[misc]
        assert ended() == ""
    assert begun == places


@pytest.mark.parametrize("how", ["given up", "fails"])
def test_who_waits_for_a_link_that_breaks_ends_with_an_error(how: str) -> None:
    shared = link()

    def begin() -> None:
        with shared.turn(1):
            raise AssertionError("it is not its turn")

    ended = in_thread(begin)
    if how == "given up":
        shared.give_up()
    else:
        with pytest.raises(ValueError, match="half"), shared.turn(0):
            raise ValueError("half of it has begun")
    assert "given up" in ended()


def test_who_closes_a_channel_waits_for_no_message_before() -> None:
    shared, closing = link(), threading.Event()

    def begin() -> None:
        with shared.turn(1, closing.is_set):
            raise AssertionError("it is not its turn")

    ended = in_thread(begin)
    closing.set()
    shared.notify()
    assert "given up" in ended()


def test_a_turn_that_does_not_come_names_the_message_before() -> None:
    with pytest.raises(RuntimeError, match="message 2 between the devices has waited 0 s for message 0"):
        link(timeout_s=0.01).turn(2).__enter__()
