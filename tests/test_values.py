"""Values that cross from one process to another: what torch allows in one process arrives, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests import processes
from tests.averaging.models import assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline


def local_class() -> Any:
    class Pair(NamedTuple):
        x: Tensor
        y: Tensor

    return Pair


PAIR = local_class()
Function = Callable[[Tensor], Any]


class Unit(nn.Module):
    """A layer between two functions."""

    def __init__(self, before: Function, after: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.before, self.after = before, after

    def forward(self, x: Any) -> Any:
        return self.after(self.layer(self.before(x)))


def same(x: Tensor) -> Tensor:
    return x


# what the first unit returns, and how the second one reads it
CONJUGATED = (lambda x: torch.fft.fft(x).conj()), (lambda x: torch.fft.ifft(x).real)
LOCAL = (lambda x: PAIR(x, 2 * x)), (lambda pair: pair.x + pair.y)


class Two(MLP):
    def __init__(self, returned: Function, read: Function) -> None:
        super().__init__()
        self.layers = nn.Sequential(Unit(same, returned), Unit(read, same))


def trained(devices: int, kind: tuple[Function, Function]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Two(*kind)
    strategy = {"num_microbatches": 2, "timeout": "30s", "split_points": ["layers.1"]}
    pipeline(2, devices, strategy, max_epochs=1).fit(model, loader(MLP, 16, 8))
    return dict(model.state_dict())


def on_two(rank: int) -> tuple[dict[str, Tensor], str]:
    found = trained(2, CONJUGATED)
    with pytest.raises(Exception) as refused:  # a PeerError on the other rank
        trained(2, LOCAL)
    return found, str(refused.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Tensor], str]]:
    return processes.results(processes.run(2, on_two, folder=tmp_path_factory.mktemp("two")))


def test_a_value_that_torch_conjugates_when_it_is_read_crosses(found: list[tuple[dict[str, Tensor], str]]) -> None:
    expected = trained(1, CONJUGATED)
    for weights, _ in found:
        assert_equal(weights, expected)


def test_a_class_that_other_processes_cannot_find_is_named_with_its_unit_on_all_ranks(
    found: list[tuple[dict[str, Tensor], str]],
) -> None:
    for _, said in found:
        assert "unit 'layers.0' at models.py:" in said, said
        assert "Pair" in said and "Define its class at the top level of a module" in said, said
        assert "IndexError" not in said and "connection" not in said, said
