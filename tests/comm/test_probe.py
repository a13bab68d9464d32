"""Links are timed by trips there and back, of which some wait by chance."""

from __future__ import annotations

import pytest

from lightning_avgpipe.comm.probe import time_trips


class Journey:
    """A link with a clock of its own.

    Args:
        per_byte: seconds of a byte, there and back.
        late: numbers of trips that are late by 0.3 s, as if a packet had been sent again.
    """

    def __init__(self, per_byte: float, late: tuple[int, ...] = ()) -> None:
        self.per_byte, self.late = per_byte, late
        self.trips, self.now_s = 0, 0.0

    def trip(self, size: int) -> None:
        self.now_s += 1e-4 + size * self.per_byte + 0.3 * (self.trips in self.late)
        self.trips += 1

    def now(self) -> float:
        return self.now_s


@pytest.mark.parametrize("per_byte", [1e-9, 2e-8, 1.6e-7, 1.6e-6])  # 2 Gbit/s .. 10 Mbit/s, there and back
@pytest.mark.parametrize("late", [(), (0,), (1,), (4,), (5,), (8,)])
def test_a_trip_that_is_late_by_chance_does_not_count(per_byte: float, late: tuple[int, ...]) -> None:
    journey = Journey(per_byte, late)
    found, message_s = time_trips(journey.trip, journey.now)
    assert found == pytest.approx(per_byte, rel=1e-3)
    assert message_s == pytest.approx(1e-4 + 64 * per_byte)


def test_a_link_of_100_megabits_is_timed_in_a_fifth_of_a_second() -> None:
    journey = Journey(1.6e-7)
    time_trips(journey.trip, journey.now)
    assert journey.now_s <= 0.2
