"""What a process gives up is gone, also where garbage still holds on to it; errors of user code say what is absent."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from lightning_avgpipe.weights import ownership
from lightning_avgpipe.weights.ownership import explain, give_up


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


@pytest.fixture
def module() -> nn.Module:
    """Of its two layers the second is elsewhere."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


HOOKS: list[Callable[[nn.Module], object]] = [
    lambda module: sum(float(p.norm()) for p in module.parameters()),
    lambda module: [p.grad.norm() for p in module.parameters()],  # type: ignore[union-attr]
    lambda module: module[1].weight.tolist(),  # type: ignore[index]
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_looks_at_all_weights_is_told_once_which_are_absent(
    hook: Callable[[nn.Module], object], module: nn.Module
) -> None:
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        hook(module)
    for _ in range(2):
        explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "no numbers and no gradient on this process, such as '1.weight'" in note
