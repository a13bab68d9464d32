"""Gradients that a function of the user's own computes anew, for parameters that a submodule has handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.trainers import assert_defaults_equal_accumulation


class Adjoint(torch.autograd.Function):
    """As adjoint methods do it: the forward keeps no graph, and the backward makes one, of the same parameters."""

    @staticmethod
    def forward(ctx: Any, f: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.f(x)
        found = torch.autograd.grad(y, (x, *parameters), gradient, allow_unused=True)
        return None, *(torch.zeros_like(t) if g is None else g for g, t in zip(found, (x, *parameters), strict=True))


class Flow:
    """What the submodule returns: a function, and the parameters that it uses."""

    def __init__(self, f: nn.Module) -> None:
        self.f = f
        self.parameters = tuple(f.parameters())


class LazyFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self) -> Flow:
        return Flow(self.f)


class WithAdjoint(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.flow = LazyFlow()
        self.before = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        self.after = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        flow = self.flow()
        y = Adjoint.apply(flow.f, self.before(batch), *flow.parameters)
        return self.after(y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_function_that_differentiates_by_parameters_a_unit_returned_gets_them_as_they_are() -> None:
    torch.manual_seed(0)
    assert assert_defaults_equal_accumulation(WithAdjoint(), torch.randn(8, 8), 3).num_stages == 3
