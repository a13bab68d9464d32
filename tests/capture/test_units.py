"""Units: modules are opened as far as balance needs it, whichever way and however often their parts are reached."""

from __future__ import annotations

import copy
import random
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
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from tests.comparing import assert_same_gradients
from tests.driver import Engine, accumulate
from tests.trainers import pipeline, trainer


class Net(nn.Module):
    """Layers that can be reached in several ways."""

    def __init__(self) -> None:
        super().__init__()
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


class UsesWeights(nn.Module):
    """A module that is called uses the weights of others, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net.weights_only(x)


class Inherits(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Reaching(L.LightningModule):
    """Reaches its net in some way.

    Args:
        reach: what the step makes of a batch with the module.
        net: with eight blocks somewhere.
    """

    def __init__(self, reach: Callable[[Any, Tensor], Tensor], net: Any = None) -> None:
        super().__init__()
        self.net: Any = Net() if net is None else net
        self.alias = self.net
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 1)
        self.listed = [*self.net.blocks] if isinstance(self.net, Net) else []  # a list registers nothing
        self.reach = reach

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.reach(self, batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def called(module: Any, batch: Tensor) -> Tensor:
    return module.net(batch)


def in_a_list(module: Any, batch: Tensor) -> Tensor:
    for block in module.listed:
        batch = block(batch)
    return batch


def by_method(module: Any, batch: Tensor) -> Tensor:
    return module.net.features(batch)


def compiled_in_place() -> Net:
    net = Net()
    net.compile(backend="eager")
    return net


def with_parts(change: Callable[[Any], Any]) -> Net:
    net = Net()
    for i, block in enumerate(net.blocks):
        net.blocks[i] = change(block)
    return net


WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], Any]]] = {
    "a method": (by_method, Net),
    "between calls of other children": (lambda module, x: module.head(module.net.features(module.norm(x))), Net),
    "forward": (lambda module, x: module.net.forward(x), Net),
    "the class": (lambda module, x: Net.forward(module.net, x), Net),
    "weights": (lambda module, x: module.net.weights_only(x), Net),
    "weights in what is called": (called, UsesWeights),
    "super": (called, Inherits),
    "the step of a LightningModule": (lambda module, x: module.net.training_step(x, 0), lambda: Reaching(by_method)),
    "as a whole and by parts": (lambda module, x: module.net(x) + module.net.blocks[0](x), Net),
    "another name": (lambda module, x: module.alias(x), Net),
    "a plain list": (in_a_list, Net),
    "a wrapper": (called, lambda: nn.DataParallel(Net())),
    "a compiled net": (called, lambda: torch.compile(Net(), backend="eager")),
    "a net that is compiled in place": (called, compiled_in_place),
    "compiled parts": (called, lambda: with_parts(lambda block: torch.compile(nn.Sequential(block), backend="eager"))),
    "scripted parts": (called, lambda: with_parts(torch.jit.script)),
    "traced parts": (called, lambda: with_parts(lambda block: torch.jit.trace(block, torch.randn(2, 16)))),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:.*torch.jit.*is not supported")
@pytest.mark.parametrize("way", WAYS)
def test_parts_that_are_reached_in_any_way_are_divided(way: str) -> None:
    reach, net = WAYS[way]
    plain, module = (Reaching(reach, net()) for _ in range(2))  # what is scripted cannot be copied
    module.load_state_dict(plain.state_dict())
    batch = torch.randn(4, 16)
    engine = Engine(module, 3, batch)
    accumulate(plain, batch, 2)
    engine.train(batch)
    assert_same_gradients(plain, module, summed=engine.plan.copied)
    blocks = [{name.split("blocks.")[1][0] for name in s.parameters if "blocks." in name} for s in engine.plan.stages]
    assert all(len(found) in (2, 3, 4) for found in blocks), str(engine.plan)


def test_a_buffer_of_a_module_that_is_not_called_is_changed_on_one_stage() -> None:
    def counts(module: Any, batch: Tensor) -> Tensor:
        module.net.calls += 1
        return by_method(module, batch)

    module = Reaching(counts)
    graph = capture("training_step", module.training_step, (torch.randn(4, 16), 0), module, Divisible(module).units())
    assert graph.nodes[0].states == ("net.calls",)
    assert float(module.net.calls) == 0


def test_a_unit_runs_compiled_while_the_step_around_it_is_followed() -> None:
    seen: list[bool] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.compiler.is_compiling())
            return super().forward(x)

    module = Reaching(called)
    module.net.blocks[2] = torch.compile(Asks(16, 16), backend="eager")
    module.net = torch.compile(module.net, backend="eager")
    trainer(strategy=AvgPipeStrategy(num_stages=2), max_epochs=1).fit(
        module,
        DataLoader([torch.randn(4, 16)], batch_size=None),  # type: ignore[arg-type]
    )
    assert True in seen


# -- modules whose own code reads numbers of values: what they call may differ between micro-batches -----------------


class Experts(nn.Module):
    """Calls only those experts that have something to do."""

    def __init__(self, asks_for: str) -> None:
        super().__init__()
        self.asks_for = asks_for
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def used(self, chosen: Tensor) -> Any:
        if self.asks_for == "a number":
            return [i for i in range(4) if (chosen == i).any()]
        if self.asks_for == "a length":
            return [i for i in range(4) if len(torch.where(chosen == i)[0])]
        if self.asks_for == "the length of a selection":
            return [i for i in range(4) if chosen[chosen == i].numel()]
        return (nn.functional.one_hot(chosen, 4).sum(0) > 0).nonzero().squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for i in self.used(chosen):
            rows = chosen == i
            out[rows] = self.experts[i](x[rows])
        return x + out


class Mixture(L.LightningModule):
    def __init__(self, asks_for: str, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(asks_for) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("asks_for", ["a number", "as many as there are", "a length", "the length of a selection"])
def test_experts_that_are_called_when_needed_may_differ_between_micro_batches(asks_for: str) -> None:
    torch.manual_seed(0)
    plain, batch = Mixture(asks_for, 4), torch.randn(24, 16)
    plain.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    module = copy.deepcopy(plain)
    engine = Engine(module, 3, batch, 6)
    accumulate(plain, batch, 6)
    engine.train(batch)
    assert_same_gradients(plain, module)
    assert {node.name for node in engine.plan.graph.nodes} >= {f"layers.{i}" for i in range(4)}


def test_a_cut_among_units_whose_calls_depend_on_numbers_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'layers\.0' reads numbers of values and is divided between stages"):
        pipeline(max_epochs=1).fit(Mixture("a length", 1), torch.utils.data.DataLoader(torch.ones(24, 16), 8))


# -- layers that chance leaves out -----------------------------------------------------------------------------------


class OneOf(nn.Module):
    """Runs one of two layers, never both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.one(x) if random.random() < 0.5 else self.other(x)
        return self.layers[2](x).sum()


class OneOfList(OneOf):
    """So that it is known where the other one belongs."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[random.random() < 0.5](x)
        return self.layers[2](x).sum()


def planned(net: OneOf) -> Plan:
    step = Step("training_step", net.training_step, (torch.ones(2, 8), 0))
    return Planner(Divisible(net), 2).plan(step, Conditions(build("1f1b", 2, 1)))


def test_what_never_runs_at_once_is_refused_by_name() -> None:
    with pytest.raises(PartitionError, match=r"training_step leaves out submodules by chance, .*: (one|other) did not"):
        planned(OneOf())


def test_what_never_runs_at_once_is_on_the_stage_of_its_neighbour_in_a_list() -> None:
    first, last = (set(stage.parameters) for stage in planned(OneOfList()).stages)
    assert first == {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert last >= {"layers.2.weight", "layers.5.weight"}
