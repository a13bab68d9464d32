"""The fixtures through which tests use the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import build
from tests.simulated.process import SimulatedProcess

BUILDING_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first of these tests builds the device, which takes longer than all of them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(BUILDING_S))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The built device."""
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    return build.built(pytestconfig.cache.mkdir("simulated"))  # type: ignore[union-attr]


@pytest.fixture(scope="module")  # what the tests of a file break on purpose, those of the next one do not find
def simulated(library: Path) -> Iterator[Callable[..., Any]]:
    """Calls a function of a module, with arguments, where the device is; gives what it returns."""
    process = SimulatedProcess(library)
    yield process
    process.close()
