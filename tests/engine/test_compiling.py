"""Compiled units and casts of weights: the same numbers, whatever else goes on around them."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.errors import ConfigurationError
from tests.comparing import assert_equal, assert_same_gradients, assert_same_parameters
from tests.driver import Engine, accumulate
from tests.models import MLP, LSTMStack, TinyTransformer, UNet, loader
from tests.trainers import both, loaders, pipeline, trainer
from tests.zoo.own_models import BatchNorms, Hooked, Own
from tests.zoo.transformers_models import MODELS, HuggingFace

SAME = {"backend": "eager"}  # follows the code, and changes no number


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    """No test finds what another one has compiled."""
    yield
    torch.compiler.reset()


def trained(model: Any, data: Any, compiled: Any, num_stages: int = 2, **strategy: Any) -> Any:
    """A copy of a model after an epoch of training."""
    model = copy.deepcopy(model)
    options = {"num_microbatches": 2, "compile": compiled, **strategy}
    pipeline(num_stages, strategy=options, max_epochs=1).fit(model, data)
    return model


STRATEGIES: list[dict[str, Any]] = [
    {}, {"num_stages": 1}, {"num_stages": 3}, {"num_pipelines": 2},
    {"num_pipelines": 2, "averaging": Averaging(rolling=True)},
    {"recompute": True}, {"schedule": "afab"}, {"weight_policy": "stash"},
]  # fmt: skip


def settings() -> Any:
    """A transformer with all strategies; parallel models and recomputation of those that keep more."""
    for i, strategy in enumerate(STRATEGIES):
        yield pytest.param(TinyTransformer, strategy, marks=() if i == 0 else pytest.mark.slow)
    for kind in (BatchNorms, Hooked):
        yield kind, {"num_pipelines": 2}
    for kind in (LSTMStack, UNet):
        for strategy in ({"num_pipelines": 2}, {"recompute": True}):
            yield pytest.param(kind, strategy, marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "strategy"), list(settings()), ids=str)
def test_weights_are_the_same_bitwise(kind: Any, strategy: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = kind()
    example = kind.example if issubclass(kind, Own) else lambda size, length: kind.example(size)
    data = DataLoader([example(size, 4) for size in (8, 8, 6)], batch_size=None)  # the last batch is smaller
    plain, compiled = trained(model, data, False, **strategy), trained(model, data, SAME, **strategy)
    assert_equal(plain, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "vit"])
def test_stock_models_have_the_same_weights_at_default_options(name: str) -> None:
    torch.manual_seed(1)
    make, example = MODELS[name]
    model, batch = HuggingFace(make()), example(4, 6)
    data: Any = DataLoader([copy.deepcopy(batch) for _ in range(3)], batch_size=None)
    models = [copy.deepcopy(model) for _ in range(2)]
    for one, compiled in zip(models, (False, SAME), strict=True):
        strategy = AvgPipeStrategy(num_stages=2, compile=compiled)
        trainer(strategy=strategy, max_epochs=1).fit(one, copy.deepcopy(data))
    assert_same_parameters(*models)


def test_what_is_repeated_draws_the_same() -> None:
    torch.manual_seed(1)
    model, data = TinyTransformer(dropout=0.2, layers=4), loader(TinyTransformer, 16, 8)
    # the same units, which masks depend on
    kept, *others = (
        trained(model, data, SAME, split_points=["blocks.2"], **strategy)
        for strategy in ({}, {"recompute": ["blocks.*"]}, {"schedule": "afab"})
    )
    for other in others:
        assert_same_parameters(kept, other)


def test_each_class_of_units_is_compiled_once_and_parallel_models_share_it() -> None:
    graphs: list[Any] = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(1)
    model, data = TinyTransformer(layers=4), loader(TinyTransformer, 32, 8)
    trained(model, data, {"backend": counting}, num_pipelines=2)
    first = len(graphs)
    assert 0 < first <= 4  # embedding, block, norm, head
    trained(model, data, {"backend": counting}, num_pipelines=2)
    assert len(graphs) == first


def test_a_unit_that_cannot_be_compiled_is_named() -> None:
    def broken(graph: Any, example: Any) -> Any:
        raise NotImplementedError("no code for this machine")

    with pytest.raises(ConfigurationError, match=r"the unit 'layers.*no code for this machine.*compile=False") as error:
        trained(MLP(), loader(MLP, 8, 4), {"backend": broken})
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_what_the_default_compiler_makes_of_it_is_the_same_to_rounding(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model, data = TinyTransformer(layers=4), loader(TinyTransformer, 16, 8)
    with caplog.at_level(logging.WARNING):
        assert_same_parameters(trained(model, data, False), trained(model, data, True), exact=False)


# -- weights are cast once in an iteration, and gradients are as with a cast for each micro-batch --------------------


WIDTH, NUM_MICROBATCHES = 8, 4


class Layers(nn.Module):
    """Layers in mixed precision, as Lightning sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def through(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with MixedPrecision("bf16-mixed", "cpu").forward_context():
            return self.through(batch).float().square().mean()


class Limited(nn.Module):
    """Some micro-batches change its weight, and not the one that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().sum() > 100:
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return self.layer(x)


class Mapped(nn.Module):
    """A transform of torch.func calls its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.layer)(x)


class Within(Layers):
    """A layer is within another module."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.a = layer


class Counted(TorchDispatchMode):
    """Counts casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == (WIDTH, WIDTH):
            self.casts += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.fixture
def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3 * NUM_MICROBATCHES, WIDTH)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("afab", True), ("zb_h1", False)])
def test_gradients_are_those_of_a_cast_for_each_micro_batch(schedule: str, recompute: bool, batch: Tensor) -> None:
    module = Layers()
    plain = copy.deepcopy(module)
    accumulate(plain, batch, NUM_MICROBATCHES)
    Engine(module, 2, batch, NUM_MICROBATCHES, recompute=recompute).train(batch, schedule)
    assert_same_gradients(module, plain)


def test_a_weight_is_cast_once_in_an_iteration_and_again_in_the_next(batch: Tensor) -> None:
    engine = Engine(Layers(), 2, batch, NUM_MICROBATCHES)
    for iteration in range(2):
        with Counted() as counted:
            engine.train(batch, iteration=iteration)
        assert counted.casts == 3


class Clipped(MLP):
    """Clips its weights where gradients are cleared, in a way that no version shows."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.6, 0.6)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("static", ["auto", True])
def test_weights_that_a_hook_changes_between_micro_batches_are_cast_as_ever(static: Any) -> None:
    strategy = {"verify": False, "static_step": static}
    both(Clipped, loaders(Clipped, 16), precision="bf16-mixed", max_epochs=1, strategy=strategy)


@pytest.mark.parametrize("layer", [Limited, Mapped])
def test_weights_that_change_meanwhile_and_layers_under_transforms_are_cast_as_ever(layer: Any, batch: Tensor) -> None:
    batch[6] = 99.0
    module = Within(layer())
    plain, engine = copy.deepcopy(module), Engine(module, 2, batch, NUM_MICROBATCHES)
    accumulate(plain, batch, NUM_MICROBATCHES)
    engine.train(batch)
    assert_same_gradients(module, plain)
    assert layer is Mapped or torch.equal(module.a.layer.weight, plain.a.layer.weight)
