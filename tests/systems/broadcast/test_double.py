"""Doubles: a stage runs the forwards of the stage before with a copy of its weights, and nothing else is different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.execution import Compiler
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.errors import ConfigurationError, StepChangedError
from lightning_avgpipe.systems.broadcast import Broadcast
from tests.comparing import assert_equal, assert_same_gradients
from tests.driver import Engine
from tests.models import Blocks, CountingLinear, LSTMStack, TinyTransformer, UNet


def engine(module: nn.Module, num_stages: int, batch: Any, **options: Any) -> Engine:
    relays = sorted(Broadcast()(num_stages, 1).relays)
    return Engine(module, num_stages, batch, 4, relays=relays, **options)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    module = kind()
    module.log = lambda *args, **kwargs: None  # type: ignore[assignment,method-assign]  # no trainer here
    return module


def dropping() -> TinyTransformer:
    return TinyTransformer(dropout=0.3, layers=5)


@pytest.mark.parametrize(
    ("model", "num_stages", "compiled"),
    [
        (Blocks, 3, False), (Blocks, 4, False), (Blocks, 6, False), (dropping, 5, False), (dropping, 3, True),
        (LSTMStack, 4, False), (UNet, 3, False),
    ],
)  # fmt: skip
def test_gradients_and_buffers_are_those_of_1f1b_bit_for_bit(model: Any, num_stages: int, compiled: bool) -> None:
    found, expected = made(model), made(model)
    torch.manual_seed(1)
    batch = found.example(8)
    for module, schedule in ((found, "broadcast"), (expected, "1f1b")):
        compiler = Compiler({"backend": "eager"}) if compiled else None  # its code draws other numbers
        trained = engine(module, num_stages, batch, compiler=compiler)
        for iteration in range(2):
            losses = trained.train(batch, schedule, iteration)
            with torch.no_grad():  # as an optimizer that steps
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        assert len(losses) == 4
    assert_equal(found, expected)
    assert_same_gradients(found, expected)


class Watching(Observer):
    """Notes the weights that are in a layer when its hook runs, and in which action."""

    def __init__(self, layer: nn.Linear) -> None:
        self.action = ""
        self.seen: list[tuple[str, Tensor, bool]] = []
        layer.register_forward_pre_hook(self._note)

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self.action = str(work.action)
        return do()

    def _note(self, layer: nn.Module, _: Any) -> None:
        weight: Any = layer.weight
        self.seen.append((self.action, weight.detach().clone(), weight is self.own))

    own: Any = None


def test_the_copy_equals_the_weights_before_each_iteration_whoever_changed_them() -> None:
    module, batch = made(Blocks), Blocks.example(8)
    trained = engine(module, 3, batch)
    mid: Any = next(u for u in trained.plan.stages[1].units if u.startswith("layers"))
    layer: Any = module.get_submodule(mid)
    watching = Watching(layer)
    watching.own = layer.weight
    for iteration in range(3):
        watching.seen.clear()
        before = layer.weight.detach().clone()
        trained.train(batch, "broadcast", iteration, observers=[watching])
        assert sorted(action for action, _, _ in watching.seen) == [f"{kind}{i}" for kind in "DG" for i in range(4)]
        for action, weight, own in watching.seen:
            assert torch.equal(weight, before), action
            assert own == action.startswith("G"), action
        assert layer.weight is watching.own
        with torch.no_grad():
            layer.weight.data = layer.weight + 1  # in other memory


# -- what is refused -------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """Three layers, of which the second is in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 8)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.last(self.middle(self.first(batch))).square().mean()
        return loss


class Cooling(nn.Linear):
    """Changes a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return super().forward(x) * self.scale


class Collecting(nn.Linear):
    """Writes into a tensor of its own that is not a buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.sums = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.sums += x.detach().sum(0)
        return super().forward(x)


@pytest.mark.parametrize(
    ("middle", "name"),
    [
        (lambda: CountingLinear(8, 8), "the attribute 'middle.calls'"),
        (Cooling, "the parameter 'middle.scale'"),
        (Collecting, "the attribute 'middle.sums'"),
    ],
)
def test_forwards_that_change_more_than_buffers_are_refused_by_name(middle: Any, name: str) -> None:
    batch = torch.randn(8, 8)
    with pytest.raises(ConfigurationError, match=rf"stage 2 runs the forwards of stage 1 .* these change {name}"):
        engine(Layered(middle()), 3, batch, split_points=["middle", "last"])
    module = Layered(nn.Linear(8, 8))
    module.first = middle()
    engine(module, 3, batch, split_points=["middle", "last"]).train(batch, "broadcast")  # it runs once there


class Whimsical(nn.Linear):
    """In training it does, later on, what it did not do at first: it changes its input."""

    changes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            x = x.detach()
            x += 1
        return super().forward(x)


def test_a_value_that_is_changed_while_others_may_read_it_is_an_error() -> None:
    module, batch = Layered(Whimsical(8, 8)), torch.randn(8, 8)
    trained = engine(module, 3, batch, split_points=["middle", "last"])
    trained.train(batch, "broadcast")
    module.middle.changes = True  # type: ignore[assignment]
    with pytest.raises(StepChangedError, match=r"value 'first', which stage 1 received, was changed in place"):
        trained.train(batch, "broadcast")
