"""Units: modules are opened as far as balance needs it, whichever way their parts are reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.planning.divisible import Divisible
from tests.trainers import assert_defaults_equal_accumulation, trainer


class Net(nn.Module):
    """Layers that can be reached in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.register_buffer("calls", torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)

    def weights_only(self, x: Tensor) -> Tensor:
        block: Any
        for block in self.blocks:
            x = F.linear(x, block.weight, block.bias).relu()
        return x


class Base(L.LightningModule):
    def __init__(self, net: Any = None) -> None:
        super().__init__()
        self.net: Any = Net() if net is None else net

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ByMethod(Base):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.features(batch).square().mean()


class BetweenCalls(Base):
    """Other children are called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net.features(self.norm(batch))).square().mean()


class ByForward(Base):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.forward(batch).square().mean()


class ByClass(Base):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Net.forward(self.net, batch).square().mean()


class ByWeights(Base):
    """No module is called at all."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.weights_only(batch).square().mean()


class UsesWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net.weights_only(x)


class ByWeightsInside(Base):
    """A module that is called uses the weights of others, which are not."""

    def __init__(self) -> None:
        super().__init__(UsesWeights())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


class Inherits(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class BySuper(Base):
    def __init__(self) -> None:
        super().__init__(Inherits())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


class Nested(Base):
    """A LightningModule in a LightningModule, whose step is called."""

    def __init__(self) -> None:
        super().__init__(ByMethod())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.training_step(batch, batch_idx)


class Twice(Base):
    """As a whole, and by parts."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) + self.net.blocks[0](batch)).square().mean()


class UnderTwoNames(Base):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.alias(batch).square().mean()


class InPlainList(Base):
    """What is called lies in a list too, which registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.all = [self.net.blocks[i] for i in range(8)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.all:
            batch = block(batch)
        return batch.square().mean()


class Wrapped(Base):
    def __init__(self) -> None:
        super().__init__(nn.DataParallel(Net()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


MODELS = [
    ByMethod, BetweenCalls, ByForward, ByClass, ByWeights, ByWeightsInside, BySuper, Nested, Twice,
    UnderTwoNames, InPlainList, Wrapped,
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_parts_that_are_reached_in_any_way_are_divided(model: Callable[[], Base]) -> None:
    num_stages = 3
    plan = assert_defaults_equal_accumulation(model(), torch.randn(4, 16), num_stages)
    blocks = [{name.split("blocks.")[1][0] for name in s.parameters if "blocks." in name} for s in plan.stages]
    # measured, so a little may move; no stage has less than half or more than twice its share of eight
    assert all(len(found) in range(8 // num_stages - 1, 8 // num_stages + 3) for found in blocks), str(plan)


def test_a_buffer_of_a_module_that_is_not_called_is_changed_on_one_stage() -> None:
    class Counts(ByMethod):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.net.calls += 1
            return super().training_step(batch, batch_idx)

    module = Counts()
    graph = capture("training_step", module.training_step, (torch.randn(4, 16), 0), module, Divisible(module).units())
    assert graph.nodes[0].states == ("net.calls",)
    assert float(module.net.calls) == 0


# -- compiled and scripted modules -------------------------------------------------------------------------------------


def compiled(net: Net) -> Any:
    return torch.compile(net, backend="eager")


def compiled_in_place(net: Net) -> Any:
    net.compile(backend="eager")
    return net


def with_parts(change: Callable[[Any], Any]) -> Callable[[Net], Any]:
    def changed(net: Net) -> Any:
        for i, block in enumerate(net.blocks):
            net.blocks[i] = change(block)
        return net

    return changed


class Whole(Base):
    """Can be copied, whatever was done to its net."""

    def __init__(self, change: Callable[[Net], Any]) -> None:
        super().__init__(change(Net()))
        self.change = change

    def __deepcopy__(self, memo: Any) -> Whole:
        other = Whole(self.change)
        other.load_state_dict(self.state_dict())
        return other

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()


CHANGES = [
    compiled, compiled_in_place,
    with_parts(lambda block: torch.compile(nn.Sequential(block), backend="eager")),
    with_parts(torch.jit.script),
    with_parts(lambda block: torch.jit.trace(block, torch.randn(2, 16))),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:.*torch.jit.*is not supported")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_compiled_is_opened_and_what_is_scripted_is_a_unit(change: Callable[[Net], Any]) -> None:
    plan = assert_defaults_equal_accumulation(Whole(change), torch.randn(4, 16), 2)
    assert max(stage.share for stage in plan.stages) < 0.75, str(plan)


def test_a_unit_runs_compiled_while_the_step_around_it_is_followed() -> None:
    seen: list[bool] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.compiler.is_compiling())
            return super().forward(x)

    module = Whole(lambda net: net)
    module.net.blocks[2] = torch.compile(Asks(16, 16), backend="eager")
    module.net = torch.compile(module.net, backend="eager")
    trainer(strategy=AvgPipeStrategy(num_stages=2), max_epochs=1).fit(
        module,
        DataLoader([torch.randn(4, 16)], batch_size=None),  # type: ignore[arg-type]
    )
    assert True in seen
