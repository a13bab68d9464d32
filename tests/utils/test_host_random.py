"""The generators of Python and NumPy go on from where their state was noted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lightning_avgpipe.utils.host_random import host_state, seed_host, set_host_state


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])


def drawn() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), *np.random.rand(3), *np.random.standard_normal(3)


@pytest.mark.parametrize(
    "before", [lambda: None, np.random.rand, np.random.standard_normal, lambda: random.gauss(0, 1)]
)
@pytest.mark.parametrize("between", [lambda: None, drawn, lambda: seed_host(9)])
def test_what_is_drawn_comes_again(before: Callable[[], object], between: Callable[[], object]) -> None:
    seed_host(3)
    before()
    state = host_state()
    first = [drawn() for _ in range(300)]
    between()
    set_host_state(state)
    assert host_state() == state
    assert [drawn() for _ in range(300)] == first


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.standard_normal])
def test_every_draw_shows_in_the_state(draw: Callable[[], object]) -> None:
    seed_host(3)
    seen = [host_state()]
    for _ in range(4):
        draw()
        assert host_state() not in seen
        seen.append(host_state())


def test_a_seed_gives_what_it_always_gives() -> None:
    seed_host(2**40 + 5)
    assert random.random() == random.Random(2**40 + 5).random()
    assert np.random.rand() == np.random.RandomState((2**40 + 5) % 2**32).rand()


def test_another_kind_of_generator_is_noted_as_well() -> None:
    mersenne = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        state = host_state()
        first = drawn()
        set_host_state(state)
        assert drawn() == first
    finally:
        np.random.set_bit_generator(mersenne)  # type: ignore[attr-defined]
