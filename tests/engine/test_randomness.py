"""What is drawn depends on seed, iteration, micro-batch and the drawing module only, whoever seeds or decides by it."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe.errors import ConfigurationError
from tests.commands import run
from tests.comparing import assert_same_gradients, assert_same_parameters
from tests.driver import Engine, by_hand
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline

M = 4


def trained(model: Any, num_stages: int, schedule: str = "1f1b", **options: Any) -> tuple[Any, list[float]]:
    """A copy of the model after three steps on a batch, and the losses; the common generator stays where it was."""
    torch.manual_seed(3)
    model = copy.deepcopy(model)
    batch, optimizer = model.example(8), model.configure_optimizers()
    engine = Engine(model, num_stages, batch, M, **options)
    model.is_captured = True
    losses = []
    for iteration in range(3):
        optimizer.zero_grad()
        before = torch.get_rng_state()
        losses += engine.train(batch, schedule, iteration)
        assert torch.equal(torch.get_rng_state(), before)
        optimizer.step()
    return model, [float(loss) for loss in losses]


class Drops(nn.Module):
    """Draws in its own code, in a function of its own code that sees the input, and in two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.1, self.training)
        x = self.drop(x) + torch.randn(8) * 0.1
        x = self.inner(self.second(x).tanh())
        return F.dropout(x, 0.1, self.training) + self.drop(x)


class Drawing(Regression):
    """Blocks, draws in the step's own code before and between them, and one block that is called twice."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.blocks = nn.ModuleList(Drops() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * 0.01
        for block in self.blocks:
            x = block(F.dropout(x, 0.05, self.training))
        return self.blocks[0](x) * (1 + random.random())


def test_each_call_and_each_micro_batch_draws_anew() -> None:
    seen: list[Tensor] = []

    class Seen(Drawing):
        def forward(self, x: Tensor) -> Tensor:
            masks = self.blocks[0].drop(torch.ones(64)), self.blocks[0].drop(torch.ones(64))
            seen.extend(mask.detach() for mask in masks)
            return super().forward(x)

    model = Seen()
    batch = model.example(4)
    engine = Engine(model, 1, batch, 2)
    seen.clear()
    engine.train(batch)
    engine.train(batch, iteration=1)
    assert len(seen) == 8
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_what_is_drawn_does_not_depend_on_stages_and_on_which_units_are_open() -> None:
    modules, units = [Drawing() for _ in range(4)], set()
    batch = Drawing.example(4)
    options = [(1, False), (3, False), (3, ["blocks.0.second"]), (3, ["blocks.*"])]
    for module, (num_stages, recompute) in zip(modules, options, strict=True):
        module.load_state_dict(modules[0].state_dict())
        engine = Engine(module, num_stages, batch, recompute=recompute)
        engine.train(batch, iteration=3)
        assert_same_gradients(modules[0], module, summed=engine.plan.copied)
        units.add(tuple(engine.plan.graph.units))
    assert len(units) > 2


def test_the_streams_of_the_user_go_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(1)
    random.seed(1)
    model = Drawing()
    states = torch.get_rng_state(), random.getstate()
    batch = torch.ones(4, 8), torch.ones(4, 8)
    Engine(model, 2, batch, 2).train(batch)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_parallel_models_draw_different_numbers() -> None:
    class Seeing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.drop(self.first(x)))

    module, masks = Seeing(), []
    module.drop.register_forward_hook(lambda layer, args, output: masks.append(output.detach() != 0))
    running = pipeline(2, strategy={"num_pipelines": 2, "num_microbatches": 2, "split_points": ["last"]}, max_epochs=1)
    running.fit(module, DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 8)), batch_size=8))
    drawn = masks[-4:]  # of two micro-batches in each of two models; before that the step was followed
    assert len({mask.shape for mask in drawn}) == 1
    for i, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[i + 1 :])


class DropsLate(nn.Module):
    """Drops with a rate that is 0 at first, perhaps in a checkpointed region.

    Args:
        reentrant: kind of the checkpoint; None: it has none.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.linear, self.rate, self.reentrant = nn.Linear(8, 8), 0.0, reentrant

    def drop(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), self.rate, self.training).tanh()

    def forward(self, x: Tensor) -> Any:
        return self.drop(x) if self.reentrant is None else checkpoint(self.drop, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpointed_region_begins_to_drop_late_it_drops_in_the_backward_too(reentrant: bool) -> None:
    gradients = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        drops = DropsLate(kind)
        layers = nn.Sequential(nn.Linear(8, 8), drops, nn.Linear(8, 8))
        model = MLP()
        model.layers = layers
        batch = model.example(4)
        engine = Engine(model, 2, batch, 2, split_points=["layers.2"])
        drops.rate = 0.5
        engine.train(batch)
        gradients.append(layers[0].weight.grad)
    assert torch.equal(*gradients)


# -- branches that chance decides: each micro-batch decides anew, and all stages decide alike ------------------------


def of_torch() -> float:
    return torch.rand(1).item()


def of_torch_as_an_index() -> float:
    return torch.randint(0, 2, ()).item() * 0.6


def of_python() -> float:
    return random.random()


def of_numpy() -> float:
    return float(np.random.beta(1.0, 1.0))


def by_shuffling() -> float:
    order = [0.0, 1.0]
    random.shuffle(order)
    return order[0]


CHANCES = [of_torch, of_torch_as_an_index, of_python, of_numpy, by_shuffling]
Chance = Callable[[], float]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).tanh())


class Deciding(Regression):
    """Three blocks and a head.

    Args:
        chance: a number between 0 and 1.
    """

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="chance")
        self.chance = chance
        self.is_captured = False
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


class Scaling(Deciding):
    """One number for all stages."""

    def scale(self) -> float:
        return 0.5 if self.chance() < 0.5 else 1.0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale()
        for block in self.blocks:
            x = block(x) * scale
        return self.head(x)


class ScalingLate(Scaling):
    """The same, but it draws nothing before training has begun."""

    def scale(self) -> float:
        return super().scale() if self.is_captured else 1.0


class Between(Deciding):
    """A branch of glue between blocks, whose input they use twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.chance() < 0.5:
                x = x * 0.5
        return self.head(x)


class Mixing(Deciding):
    """The inputs are mixed on the first stage, the losses on the last."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share, order = self.chance(), torch.randperm(len(x))
        result = self(share * x + (1 - share) * x[order])
        losses = [(result - target).square().mean() for target in (y, y[order])]
        return share * losses[0] + (1 - share) * losses[1]


@pytest.mark.parametrize(
    ("kind", "chance"),
    [*((Scaling, chance) for chance in CHANCES), (ScalingLate, of_python), (Between, of_python), (Mixing, of_numpy)],
)
def test_all_stages_decide_alike_and_every_micro_batch_anew(kind: type[Deciding], chance: Chance) -> None:
    torch.manual_seed(0)
    model = kind(chance)
    whole, losses = trained(model, 1)
    assert len({round(loss, 4) for loss in losses[::M]}) > 1
    for num_stages, recompute in [(3, False), (2, True), (2, ["blocks.*"])]:
        staged, others = trained(model, num_stages, recompute=recompute)
        assert others == losses
        assert_same_parameters(whole, staged, exact=False)


# -- units that seed torch's random numbers draw from what they have seeded; nobody else does ------------------------


class Fixed(nn.Module):
    """Draws the same in every call: in its own code, in a function and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))

    def seed(self, x: Tensor) -> None:
        torch.manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.seed(x)
        x = self.drop(self.linear(x)) + torch.empty(8).normal_() * 0.1
        return F.dropout(self.inner(x), 0.1, self.training)


class FixedGenerator(Fixed):
    def seed(self, x: Tensor) -> None:
        torch.default_generator.manual_seed(5)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Kept) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            layer.seed = int(x.detach().abs().sum() * 1000)
            torch.manual_seed(layer.seed)
            return layer.drop(layer.linear(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.manual_seed(ctx.layer.seed)
            ctx.layer.drop(ctx.layer.linear(x)).backward(gradients[0])
        return x.grad, None


class Kept(nn.Module):
    """Keeps its seed for the backward, which computes the forward once more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.seed = nn.Linear(8, 8), nn.Dropout(0.3), 0

    def forward(self, x: Tensor) -> Tensor:
        return _Reversible.apply(x, self)  # type: ignore[no-any-return]


class FromEntropy(Fixed):
    def seed(self, x: Tensor) -> None:
        torch.seed()


class Seeding(Regression):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__("adamw")
        self.a, self.b, self.c, self.d = nn.Linear(8, 8), kind(), kind(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "num_stages", "schedule"),
    [(Fixed, 1, "afab"), (Fixed, 3, "1f1b"), (FixedGenerator, 2, "1f1b"), (Kept, 1, "afab"), (Kept, 3, "afab")],
)
def test_a_unit_that_seeds_draws_what_it_draws_in_one_process(
    kind: Callable[[], nn.Module], num_stages: int, schedule: str
) -> None:
    torch.manual_seed(0)
    model = Seeding(kind)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    by_hand(plain, [plain.example(8)] * 3, 4)
    found, _ = trained(model, num_stages, schedule)
    assert_same_gradients(plain, found)
    assert_same_parameters(plain, found)


def test_a_seeding_unit_that_is_repeated_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="recompute repeats 'b', which seeds"):
        Engine(Seeding(Fixed), 2, Seeding.example(4), recompute=True)


def fit(kind: Callable[[], nn.Module], verify: bool | str | int) -> None:
    options = {"num_microbatches": 2, "verify": verify}
    torch.manual_seed(0)
    data = [Seeding.example(4) for _ in range(3)]
    pipeline(2, strategy=options, max_epochs=1).fit(Seeding(kind), torch.utils.data.DataLoader(data, batch_size=None))


def test_verification_says_once_that_it_cannot_compare_seeds_from_entropy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_avgpipe"):
        fit(FromEntropy, verify="auto")
    told = [record.message for record in caplog.records if "not compared" in record.message]
    assert len(told) == 1 and "'b', 'c' may seed random numbers unpredictably" in told[0]
    with pytest.raises(ConfigurationError, match=r"verify compares with a plain run, but 'b', 'c' may seed"):
        fit(FromEntropy, verify=True)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(len(x), 1)


class TwoNames(Regression):
    """Calls a module by two names, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(Noisy(8, 8), nn.ReLU()) for _ in range(3)))
        self.holder = nn.ModuleDict({"model": self.model})

    def loss(self, batch: Any) -> Tensor:
        return (self.holder["model"](batch[0]) - self.model(batch[0])).square().mean()


def print_loss_of_two_names() -> None:
    torch.manual_seed(1)
    runner = pipeline(2, strategy={"num_microbatches": 2}, max_epochs=1)
    runner.fit(TwoNames(), DataLoader(TensorDataset(torch.ones(16, 8)), batch_size=8))
    print("loss", float(runner.callback_metrics["train_loss"]))


@pytest.mark.slow
def test_what_a_module_with_two_names_draws_does_not_depend_on_hashes_of_names(tmp_path: Path) -> None:
    script = f"from {__name__} import print_loss_of_two_names; print_loss_of_two_names()"
    printed = [run(tmp_path, "-c", script, PYTHONHASHSEED=str(seed)) for seed in range(3)]
    losses = {line for text in printed for line in text.splitlines() if line.startswith("loss ")}
    assert len(losses) == 1 and losses != {"loss 0.0"}  # both calls draw numbers of their own


class DrawsInValidation(MLP):
    """As a model of noise, whose loss on the same data is another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noise = torch.randn(())
        self.drawn.append(float(noise))
        self.log("loss", self.loss(batch) + noise)


def test_each_validation_draws_numbers_of_its_own() -> None:
    module = DrawsInValidation()
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    pipeline(1, strategy={"num_microbatches": 2}, **options).fit(module, loader(MLP, 8, 4), loader(MLP, 8, 4))
    assert len(set(module.drawn)) == len(module.drawn) == 3 * 2 * 2
