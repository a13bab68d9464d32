"""A pipeline under a weight policy, played micro-batch by micro-batch with all versions kept, and parts for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from lightning_avgpipe.systems.asynchronous import versions
from lightning_avgpipe.systems.asynchronous.store import predicted, sources
from lightning_avgpipe.systems.asynchronous.versions import Place, Use, VersionPolicy

Weights = dict[str, Tensor]
# Also the order of 1F1B with weights as if each batch came after a drain.
POLICIES = {"flush": VersionPolicy("flush", drains=True), **versions.POLICIES}


class Recurrent(nn.Module):
    """An LSTM around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Attention(nn.Module):
    """A transformer's layer, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@dataclass
class Stage:
    """A stage with the weights, and the optimizer, of every version."""

    module: nn.Module
    optimizer: Optimizer
    place: Place
    versions: list[tuple[Weights, Optimizer]] = field(default_factory=list)

    def keep(self) -> None:
        """A version is made."""
        parameters = dict(self.module.named_parameters())
        memo: dict[int, object] = {}
        weights = copy.deepcopy(parameters, memo)
        self.versions.append((weights, copy.deepcopy(self.optimizer, memo)))

    def weights(self, use: Use, delta: str) -> Weights:
        """Leaves of their own."""
        weights, optimizer = self.versions[use.version]
        trained_by = sources([optimizer])
        before = self.versions[use.version - 1][0] if use.version else weights
        made = {
            name: predicted(trained_by[id(p)], p, use.ahead, before[name] if delta == "increment" else None)
            if use.ahead
            else p.detach().clone()
            for name, p in weights.items()
        }
        return {name: tensor.requires_grad_() for name, tensor in made.items()}


def play(
    modules: Sequence[nn.Module],
    optimizers: Callable[[Iterable[Tensor]], Optimizer],
    policy: VersionPolicy,
    samples: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int = 1,
) -> list[Stage]:
    """Train a chain of stages on micro-batches, from one drain to the next; each backward repeats its forward."""
    places = [Place(k, len(modules), num_microbatches) for k in range(len(modules))]
    stages = [Stage(m, optimizers(m.parameters()), place) for m, place in zip(modules, places, strict=True)]
    go_on(stages, policy, samples, loss, num_microbatches)
    return stages


def go_on(
    stages: Sequence[Stage],
    policy: VersionPolicy,
    samples: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int = 1,
) -> None:
    """The same with stages that have been trained, after a drain."""
    for stage in stages:
        stage.versions.clear()
        stage.keep()
    for i, (x, target) in enumerate(samples):
        inputs = [x]
        for stage in stages:
            weights = stage.weights(policy.uses(stage.place, i)[0], policy.delta)
            inputs.append(functional_call(stage.module, weights, inputs[-1]).detach())
        gradient = None
        for stage, given in zip(reversed(stages), reversed(inputs[:-1]), strict=True):
            weights = stage.weights(policy.uses(stage.place, i)[1], policy.delta)
            entered = given.clone().requires_grad_(given.is_floating_point())
            out = functional_call(stage.module, weights, entered)
            if gradient is None:
                out = loss(out, target) / num_microbatches
            torch.autograd.backward([out], [gradient])
            gradient = entered.grad
            for name, parameter in stage.module.named_parameters():
                found = weights[name].grad if parameter.requires_grad else None
                if found is not None:
                    parameter.grad = found if parameter.grad is None else parameter.grad + found
        if (i + 1) % num_microbatches == 0:
            for stage in stages:
                stage.optimizer.step()
                stage.optimizer.zero_grad()
                stage.keep()
