"""The common generators of Python and NumPy go on from where their state was noted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lightning_avgpipe.utils.random_streams import HostState, host_kept, host_lent, host_stream, seed_host


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    before = HostState.now()
    yield
    before.restore()


def drawn() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), *np.random.rand(3), *np.random.standard_normal(3)


@pytest.mark.parametrize(
    "before", [lambda: None, np.random.rand, np.random.standard_normal, lambda: random.gauss(0, 1)]
)
def test_what_is_drawn_comes_again(before: Callable[[], object]) -> None:
    seed_host(3)
    before()
    state = HostState.now()
    first = drawn()
    assert HostState.now() != state
    state.restore()
    assert HostState.now() == state
    with host_stream(9):
        drawn()
    assert drawn() == first


def test_another_kind_of_generator_is_noted_as_well() -> None:
    mersenne = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        state = HostState.now()
        first = drawn()
        state.restore()
        assert drawn() == first
    finally:
        np.random.set_bit_generator(mersenne)  # type: ignore[attr-defined]


def test_what_belongs_to_no_micro_batch_draws_as_if_nobody_had_seeded() -> None:
    seed_host(3)
    expected = [drawn() for _ in range(3)]
    seed_host(3)
    found = [drawn()]
    with host_kept():
        seed_host(5)
        drawn()
        with host_lent():
            found.append(drawn())
        drawn()
    found.append(drawn())
    assert found == expected
