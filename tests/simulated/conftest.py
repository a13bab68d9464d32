"""The fixtures through which tests use the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import free_port
from tests.simulated import build
from tests.simulated.process import SimulatedProcess

BUILDING_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first of these tests builds the device."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(BUILDING_S))


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The built device."""
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    return build.built(pytestconfig.cache.mkdir("simulated"))  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def simulated(library: Path) -> Iterator[Callable[..., Any]]:
    """Calls a function of a module, with arguments, where the device is; gives what it returns."""
    process = SimulatedProcess(library)
    yield process
    process.close()


@pytest.fixture
def two_simulated(library: Path) -> Iterator[Callable[..., list[Any]]]:
    """Calls a function in two processes, as a launcher such as torchrun would."""
    ranks = [SimulatedProcess(library) for _ in range(2)]

    def call(function: Callable[..., Any], *args: Any) -> list[Any]:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        for rank, process in enumerate(ranks):
            process.begin(function, *args, LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", **address)
        return [process.end() for process in ranks]

    yield call
    for process in ranks:
        process.close()
