"""Units that seed torch's random numbers draw from what they have seeded; nobody else does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.errors import ConfigurationError, SeedingError
from tests.commands import run
from tests.driver import Engine, accumulate, assert_same_gradients, assert_same_parameters
from tests.models import MLP, Regression
from tests.trainers import pipeline


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

    example = staticmethod(MLP.example)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))  # type: ignore[no-any-return]


def trained(model: Seeding, num_stages: int, schedule: str, iterations: int = 3) -> Seeding:
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    batch, optimizer = model.example(8), model.configure_optimizers()
    engine = Engine(model, num_stages, batch, 4)
    for iteration in range(iterations):
        optimizer.zero_grad()
        before = torch.get_rng_state()
        engine.train(batch, schedule, iteration)
        assert torch.equal(torch.get_rng_state(), before)
        optimizer.step()
    return model


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
    batch, optimizer = plain.example(8), plain.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        accumulate(plain, batch, 4)
        optimizer.step()
    found = trained(model, num_stages, schedule)
    assert_same_gradients(plain, found)
    assert_same_parameters(plain, found)


def test_a_step_that_seeds_is_refused_and_so_is_a_seeding_unit_that_is_repeated() -> None:
    class Step(Seeding):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.seed()
            return super().training_step(batch, batch_idx)

    with pytest.raises(SeedingError, match=r"in training_step \(torch\.seed\) between submodules.*seed in the forward"):
        Engine(Step(Fixed), 2, Step.example(4))
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


TWO_NAMES = """
import lightning as L, torch
from torch import nn
import lightning_avgpipe
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x) + torch.randn(len(x), 1)
class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x):
        return (self.model(x) - self.model(x)).square().mean()
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(Noisy(), nn.ReLU()) for _ in range(3)))
        self.loss = Loss(self.model)
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)
L.seed_everything(1)
strategy = lightning_avgpipe.AvgPipeStrategy(num_stages=2, num_microbatches=2, costs="flops")
trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=8))
print("loss", float(trainer.callback_metrics["loss"]))
"""


@pytest.mark.slow
def test_what_a_module_with_two_names_draws_does_not_depend_on_hashes_of_names(tmp_path: Path) -> None:
    printed = [run(tmp_path, "-c", TWO_NAMES, PYTHONHASHSEED=str(seed)) for seed in range(3)]
    losses = {line for text in printed for line in text.splitlines() if line.startswith("loss ")}
    assert len(losses) == 1 and losses != {"loss 0.0"}  # both calls draw numbers of their own
