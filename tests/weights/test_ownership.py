"""What a process gives up is gone, also where garbage still holds on to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_avgpipe.weights import ownership
from lightning_avgpipe.weights.ownership import give_up


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Garbage is collected when somebody asks for it."""
    gc.disable()
    yield
    gc.enable()


class Cycle:
    """Garbage with a graph."""

    def __init__(self, net: nn.Module) -> None:
        self.graph, self.itself = net(torch.randn(2, 4)), self


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("few", [0, 1000], ids=["much", "little"])
def test_garbage_is_looked_for_where_it_could_hold_on_to_much(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "FEW_BYTES", few)
    net = nn.Linear(4, 4)
    waits = weakref.ref(Cycle(net))
    give_up(net, ["weight"])
    assert net.weight.is_meta and not net.bias.is_meta
    assert (waits() is None) == (few == 0)
