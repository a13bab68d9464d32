"""Replay: models whose glue is difficult, cut at every place where they may be cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.engine.microbatch import split
from lightning_avgpipe.engine.pipeline import Pipeline, run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning.balance import gaps
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.schedule import build
from lightning_avgpipe.weights.tied import copied_parameters
from tests.threads import alone


class Layers(nn.Module):
    """Four layers; subclasses say what happens between them."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(self.width, self.width))

    def example(self) -> Any:
        return torch.randn(6, self.width)

    def training_step(self, x: Any) -> Tensor:
        raise NotImplementedError


class Skips(Layers):
    def training_step(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = F.gelu(self.b(a))
        c = self.c(b + a)
        return (self.d(c * b) - a * x).square().mean()


class InPlace(Layers):
    def training_step(self, x: Tensor) -> Tensor:
        h = self.a(x)
        residual = h * 2
        h += residual
        h = self.b(h)
        h.mul_(0.5).add_(residual)
        h = self.c(h)
        h[:, 0] = residual[:, 1]
        return self.d(h).square().mean()


class WritesIntoFreeTensors(Layers):
    def training_step(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 3, self.width)
        out[:, 0] = self.a(x)
        out[:, 1] = self.b(out[:, 0].clone())
        middle = self.c(out[:, 1].clone())
        out[:, 2] = middle
        return self.d(out.sum(1)).square().mean()


class Aliases(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.same, self.off = nn.Identity(), nn.Dropout(0.0)

    def training_step(self, x: Tensor) -> Tensor:
        h = self.same(self.a(x))
        g = self.off(self.b(h)).contiguous()
        h = self.same(self.c(g)) + h.view(-1, self.width)
        return self.d(self.same(h)).square().mean()


class Twice(Layers):
    """Units without parameters are called everywhere, one with parameters twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def training_step(self, x: Tensor) -> Tensor:
        h = self.act(self.b(self.act(self.b(self.act(self.a(x))))))
        return self.act(self.d(self.act(self.c(h)))).square().mean()


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclass
class Output:
    hidden: Tensor
    size: int
    extra: Any = None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, pair: Pair | None = None) -> tuple[Output, Pair]:
        h = self.layer(x if pair is None else x + pair.left)
        return Output(h, len(h), {"scale": 0.5, "none": None}), Pair(h.detach() * 2, None)


class Structures(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = Nested(), Nested()

    def training_step(self, x: Tensor) -> Tensor:
        first, pair = self.b(self.a(x))
        assert pair.right is None and first.size == len(x)
        second, _ = self.c(first.hidden * first.extra["scale"], pair=pair)
        return self.d(second.hidden).square().sum() / second.size


class DictBatch(Layers):
    def example(self) -> Any:
        return {"x": torch.randn(6, 4), "y": torch.randn(6, 4), "name": list("abcdef"), "scale": 2.0}

    def training_step(self, batch: Any) -> Tensor:
        y, name = batch.pop("y"), batch.pop("name")
        assert len(name) == len(y)
        batch["x"] *= batch["scale"]
        return F.mse_loss(self.d(self.c(self.b(self.a(batch["x"])))), y)


class Branches(Layers):
    """Branches on values, and numbers read from them, on whatever stage."""

    def training_step(self, x: Tensor) -> Tensor:
        a = self.a(x)
        scale = a.abs().max().item()
        b = self.b(a / scale)
        if bool(b.isfinite().all()):
            b = b * 2
        c = self.c(b)
        assert float(a.abs().max()) == scale
        return self.d(c).square().mean() * scale


class Splits(Layers):
    def training_step(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, dim=1)
        h = self.b(torch.cat([right, left], 1))
        values, indices = h.topk(2, dim=1)
        h = self.c(h.scatter(1, indices, values * 2))
        return self.d(h + torch.cat([left, right], 1)).square().mean()


class FreeParameter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x * self.scale))
        self.steps += 1
        return self.d(self.c(h) + self.shift).square().mean() * self.steps.clamp(max=1)


class Frozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def training_step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.b(self.a(x))
        return self.d(self.c(h)).square().mean()


class Caches(Layers):
    """Keeps a mask from the first batch on, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def training_step(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril().mean(0)
        return self.d(self.c(h * self.mask)).square().mean()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3  # on purpose not its derivative


class CustomFunction(Layers):
    def training_step(self, x: Tensor) -> Tensor:
        h = Double.apply(self.a(x))
        h = Double.apply(self.c(self.b(h)) + h)
        return self.d(h).square().mean()


class Contexts(Layers):
    def training_step(self, x: Tensor) -> Tensor:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            h = self.b(self.a(x) + torch.ones(4))
        with torch.no_grad():
            scale = h.abs().mean()
        return self.d(self.c(h / scale)).square().mean()


class Hooks(Layers):
    """Hooks that collect outputs, as models do for router logits and attention maps, and one that changes them."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            getattr(self, name).register_forward_hook(self.collect)
        self.b.register_forward_hook(lambda module, args, output: output * 2)
        self.collected: list[Tensor] = []

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.collected.append(output)

    def training_step(self, x: Tensor) -> Tensor:
        self.collected.clear()
        loss = self.d(self.c(self.b(self.a(x)))).square().mean()
        return loss + torch.stack(self.collected).square().mean()


class AttentionMaps(Layers):
    """A unit that leaves a tensor in an attribute, which the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Leaves()

    def training_step(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        h = h + self.b.left.mean()
        return self.d(self.c(h)).square().mean()


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.layer(x).sigmoid()
        return self.left * x


MODELS = [
    Hooks, AttentionMaps, Skips, InPlace, WritesIntoFreeTensors, Aliases, Twice, Structures,
    DictBatch, Branches, Splits, FreeParameter, Frozen, Caches, CustomFunction, Contexts,
]  # fmt: skip


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_legal_cut_gives_the_same_gradients(model: Callable[[], Layers], num_microbatches: int) -> None:
    torch.manual_seed(0)
    plain = model()
    piped = copy.deepcopy(plain)
    batch = plain.example()
    for part in split(copy.deepcopy(batch), num_microbatches):
        (plain.training_step(part.data) * part.weight).backward()
    graph = capture(
        "training_step", piped.training_step, (split(copy.deepcopy(batch), num_microbatches)[0].data,), piped,
        Divisible(piped).units(),
    )  # fmt: skip
    cuts = [gap.position for gap in gaps(graph) if gap.obstacle is None]
    assert cuts, graph.obstacles
    everywhere = [p for p, obstacle in enumerate(graph.obstacles) if obstacle is None and 0 < p < len(graph.nodes)]
    buffers = copy.deepcopy(dict(piped.named_buffers()))
    for chosen in [(cut,) for cut in everywhere] + [tuple(cuts)]:
        piped.zero_grad()
        piped.load_state_dict({**piped.state_dict(), **buffers})
        cluster = alone(len(chosen) + 1)
        cluster.open()
        pipeline = Pipeline(cluster, piped)
        pipeline.load(graph, chosen)
        parts = split(copy.deepcopy(batch), num_microbatches)
        task = Task(
            lambda i, x: piped.training_step(x),
            [(part.data,) for part in parts],
            lambda i, loss, parts=parts: loss * parts[i].weight,
        )
        run_together([pipeline], "training_step", [build("1f1b", cluster.stage_map.num_stages, len(parts))], [task])
        pipeline.steps["training_step"].copies.sum_gradients()
        copied = copied_parameters(stage_programs(graph, chosen))
        for (name, a), b in zip(plain.named_parameters(), piped.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), (chosen, name)
            if a.grad is not None and name in copied:  # each stage sums over micro-batches before the stages are summed
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)
            elif a.grad is not None:
                assert torch.equal(a.grad, b.grad), (chosen, name)
        for (name, a), b in zip(plain.named_buffers(), piped.buffers(), strict=True):
            assert torch.equal(a, b), (chosen, name)
