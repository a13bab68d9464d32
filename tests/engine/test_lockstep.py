"""Lockstep: what submodules hold, hide and change is the same in all processes, or refused."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import processes
from tests.comparing import assert_equal, state
from tests.manual_models import Manual
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer


class Plain(Manual):
    """Two submodules, of which each process holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.part(), self.part()

    def part(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.a(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class LeavesBehind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.condition, self.calls = nn.Linear(8, 8), None, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x if self.condition is None else x + self.condition)
        self.left, self.calls = x.abs().mean(), self.calls + 1
        return x


class Attributes(Plain):
    """The step reads what a submodule left in an attribute, and passes something on in one."""

    def part(self) -> nn.Module:
        return LeavesBehind()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        self.b.condition = 2 * h
        return F.mse_loss(self.b(h), y) + self.a.left + self.a.calls * self.b.left


class Regions(Plain):
    """Both kinds of checkpointed regions, and a hook that collects."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.a[0].register_forward_hook(lambda module, args, result: self.collected.append(result))  # type: ignore[index]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.collected.clear()
        h = checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=True)
        return F.mse_loss(h, y) + self.collected[0].square().mean()


class ByHand(Plain):
    """Gradients, weights and optimizers without Lightning; a buffer and a tied weight in the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.b[2].weight = self.a[0].weight  # type: ignore[index]
        self.slow = copy.deepcopy(self.a).requires_grad_(False)

    def part(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        output = self.b(h)
        first, second = F.mse_loss(output, y + self.slow(x)), output.abs().mean()
        gradients = [
            torch.autograd.grad(loss, part[0].weight, retain_graph=True)[0]  # type: ignore[index]
            for loss, part in ((first, self.a), (second, self.b))
        ]
        weight = (gradients[0].norm() / gradients[1].norm()).detach()
        return first + weight * second + self.a[1].running_mean.sum() * self.b[0].weight.mean()  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.loss(*batch).backward()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self.log("norm", torch.stack([p.norm() for p in self.parameters()]).sum())
        optimizer.step()
        self.zero_grad()

    def on_train_batch_end(self, *args: Any) -> None:
        for slow, parameter in zip(self.slow.parameters(), self.a.parameters(), strict=True):
            slow.data.copy_(0.9 * slow.data + 0.1 * parameter.data)

    def on_train_epoch_start(self) -> None:
        self.b[1].requires_grad_(self.current_epoch == 0)  # type: ignore[index]


class Balances(nn.Module):
    """A loss with a part of a discriminator, weighed by the gradients of both parts for a weight of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, output: Tensor, y: Tensor, last: Tensor) -> Tensor:
        of_data = F.mse_loss(output, y) / self.log_variance.exp() + self.log_variance
        of_discriminator = -self.discriminator(output).mean()
        norms = [torch.autograd.grad(part, last, retain_graph=True)[0].norm() for part in (of_data, of_discriminator)]
        return of_data + (norms[0] / (norms[1] + 1e-4)).clamp(0, 1e4).detach() * of_discriminator


class GivenAWeight(Plain):
    """Gives a submodule the weight of another one, which asks for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.balance = Balances()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.balance(self.b(self.a(x)), y, self.b[2].weight)  # type: ignore[index]
        return loss


class Scores(nn.Module):
    """Notes where it runs."""

    ran: ClassVar[list[None]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        self.ran.append(None)
        return self.linear(x) @ codes


class GivenAFrozenWeight(Plain):
    """Gives a submodule the weight of another one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.scores = nn.Linear(8, 8).requires_grad_(False), Scores()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.scores(self.b(self.a(x)), self.codes.weight), y)


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x) @ weight


class GivesScripted(Plain):
    """Gives a TorchScript module, in which nothing can be followed, the weight of another submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.projects = torch.jit.script(Projects())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.projects(self.b(self.a(x)), self.b[2].weight), y)  # type: ignore[index]


class OnOneRank(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.local_rank == 0:
            self.b(batch[0])
        super().training_step(batch, batch_idx)


class Borrows(nn.Linear):
    def __init__(self, other: nn.Module) -> None:
        super().__init__(8, 8)
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.other[0].weight  # type: ignore[operator]


class Borrowing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a = Borrows(self.b[2])  # type: ignore[index]


def fit(rank: int, devices: int, *models: type[Plain]) -> dict[str, Any]:
    found = {}
    for model in models:
        torch.manual_seed(3)
        module = model()
        torch.manual_seed(7 + rank)
        strategy = {"timeout": timedelta(seconds=20)}
        runner = trainer() if devices == 1 else pipeline(devices, devices, strategy=strategy)
        runner.fit(module, loader(MLP, 16, 4, shuffle=True))
        found[model.__name__] = state(module), dict(runner.callback_metrics)
    return found


@pytest.mark.slow
def test_what_submodules_hold_hide_and_change_is_the_same_everywhere(tmp_path: Path) -> None:
    models = (Attributes, Regions, ByHand, GivenAWeight)
    one = fit(0, 1, *models)
    assert_equal(processes.each(2, fit, 2, *models, folder=tmp_path), [one, one])


def fit_and_count(rank: int, devices: int) -> tuple[dict[str, Any], int]:
    """Train, and return also how often a submodule ran in this process."""
    Scores.ran.clear()
    return fit(rank, devices, GivenAFrozenWeight), len(Scores.ran)


@pytest.mark.slow
def test_a_submodule_that_is_given_a_frozen_parameter_of_another_one_runs_in_one_process(tmp_path: Path) -> None:
    one, runs = fit_and_count(0, 1)
    found = processes.each(2, fit_and_count, 2, folder=tmp_path)
    assert_equal([states for states, _ in found], [one, one])
    assert sorted(ran for _, ran in found) == [0, runs]


@pytest.mark.slow
def test_scripted_submodules_end_everywhere_with_their_weights_and_may_be_given_those_of_others(tmp_path: Path) -> None:
    one = fit(0, 1, GivesScripted)
    assert_equal(processes.each(2, fit, 2, GivesScripted, folder=tmp_path), [one, one])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(OnOneRank, "different ways: rank 0 came to unit 'b'.*; rank 1 came to", marks=pytest.mark.slow),
        pytest.param(Borrowing, r"unit 'a', called at .*, uses a tensor of shape \(8, 8\)", marks=pytest.mark.slow),
    ],
)
def test_processes_that_would_part_are_refused(model: type[Plain], message: str, tmp_path: Path) -> None:
    outcomes = processes.run(2, fit, 2, model, folder=tmp_path)
    assert all(outcome.error is not None for outcome in outcomes)
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        raise RuntimeError("".join(outcome.error or "" for outcome in outcomes))
