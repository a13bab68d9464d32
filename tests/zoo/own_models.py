"""LightningModules of all sorts, as anybody would write them. None of them knows of pipelines.

``example(size, length)`` makes a batch; where there is no sequence, the length is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from transformers.utils import ModelOutput

from tests.models import ConvNet, LSTMStack, Regression, TinyTransformer, UNet

WIDTH = 8


def mlp(depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())))


class Own(Regression):
    """Vectors in, vectors out."""

    @staticmethod
    def example(size: int, length: int) -> Any:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


# -- several paths through the network -------------------------------------------------------------------------------


class Siamese(Own):
    """One encoder is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(1)
        self.head = mlp(4)

    def loss(self, batch: Any) -> Tensor:
        left, right = (self.encoder(x) for x in batch)
        return self.head((left - right).abs()).square().mean()


# -- structures ------------------------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor
    step: int
    history: list[Tensor]


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None
    logits: Tensor | None = None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        hidden = torch.tanh(self.layer(state.hidden)) + state.hidden
        return State(hidden, state.step + 1, [*state.history, hidden])


class Dataclasses(Own):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Recurrent() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        state = State(batch[0], 0, [])
        for cell in self.cells:
            state = cell(state)
        assert state.step == len(state.history) == 4
        return F.mse_loss(state.hidden, batch[1]) + state.history[0].square().mean()


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, extra: dict[str, Any]) -> Output:
        hidden = self.layer(hidden) * extra["scales"]["hidden"]
        return Output(hidden=hidden, logits=self.head(hidden))


class Structures(Own):
    """ModelOutputs and nested dicts between the units, and as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Headed(), Headed(), Headed()

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        extra = {"scales": {"hidden": 0.5}, "nothing": None}
        one = self.first(inputs, extra)
        two = self.second(hidden=one.hidden, extra=extra)
        three = self.third(two["hidden"], {**extra, "scales": {"hidden": two.logits.sigmoid()}})
        return {"outputs": [one, two, three], "logits": three.logits + one[1]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        return {"loss": F.mse_loss(output["logits"], batch[1]), "logits": output["logits"].detach()}

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0])["logits"], batch[1])


class Packed(Own):
    """Packed by the collate function: the batch itself is a PackedSequence, which only its owner can split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = mlp(2)

    @staticmethod
    def example(size: int, length: int) -> Any:
        lengths = (length - torch.arange(size)).clamp(min=1)
        return pack_padded_sequence(torch.randn(length, size, WIDTH), lengths)

    @staticmethod
    def split_batch(batch: PackedSequence, num_microbatches: int) -> list[PackedSequence]:
        padded, lengths = pad_packed_sequence(batch)
        count = min(num_microbatches, len(lengths))
        pairs = zip(padded.tensor_split(count, 1), lengths.tensor_split(count), strict=True)
        return [pack_padded_sequence(part, sizes) for part, sizes in pairs]

    def loss(self, batch: PackedSequence) -> Tensor:
        hidden, state = self.first(batch)
        hidden, _ = self.second(hidden, state)
        padded, lengths = pad_packed_sequence(hidden)
        return self.head(padded).square().sum() / lengths.sum()


class PackedInside(Packed):
    """Packed within the step, from lengths in the batch; the lengths differ from batch to batch."""

    split_batch = None  # type: ignore[assignment]

    @staticmethod
    def example(size: int, length: int) -> Any:
        return {"x": torch.randn(size, length, WIDTH), "lengths": torch.randint(1, length + 1, (size,))}

    def loss(self, batch: Any) -> Tensor:
        packed = pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        return super().loss(packed)


# -- what happens inside of units and around them --------------------------------------------------------------------


class BatchNorms(Own):
    """Statistics after every layer, one layer called twice, and one that keeps a plain average."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.norms.append(nn.BatchNorm1d(WIDTH, momentum=None, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(norm(x) if norm is self.norms[0] else x)))
        return x


class OwnStatistics(Own):
    """A running mean that the step keeps for itself, in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(2), mlp(2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return self.head(hidden - self.mean)


class Dropouts(Own):
    """Units, functions and attention drop, at several rates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in (0.0, 0.1, 0.5, 0.9))
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = x + drop(F.dropout(F.gelu(layer(x)), 0.1, self.training))
        x = x + torch.randn_like(x) * 0.01
        return self.head(self.attention(x, x, x)[0])


class Checkpointed(Own):
    """Activations are recomputed, in units of its own and around submodules."""

    use_reentrant, rate = False, 0.0

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(*mlp(2), nn.Dropout(self.rate)) for _ in range(3))
        self.inside = Recomputed(self.use_reentrant, self.rate)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(self.with_noise, block, x, use_reentrant=self.use_reentrant)
        return self.head(self.inside(x))

    def with_noise(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + F.dropout(block(x), self.rate, self.training)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool, rate: float) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.Sequential(*mlp(2), nn.Dropout(rate))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class CheckpointedDropout(Checkpointed):
    rate = 0.3


class CheckpointedReentrantDropout(CheckpointedReentrant):
    rate = 0.3


class _CallsAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Reversible) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        block.drop.state = torch.get_rng_state()
        return block.drop(block.linear(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.block.drop.state)
            ctx.block.drop(ctx.block.linear(x)).backward(gradients[0])
        return x.grad, None


class Reversible(nn.Module):
    """Calls its layers in the backward once more, from the random state that it has kept, as reversible networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return _CallsAgain.apply(x, self)  # type: ignore[no-any-return]


class ReversibleDropout(Own):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reversible(), Reversible(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Hooked(Own):
    """Hooks see inputs, change them, change outputs, and collect them for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(4)
        self.activations: list[Tensor] = []
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.layers[2].register_forward_hook(lambda module, args, output: output + args[0])
        for layer in self.layers[1::2]:
            layer.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.activations.append(output)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, batch: Any) -> Tensor:
        self.activations.clear()
        loss = super().loss(batch)
        return loss + 0.1 * torch.stack([a.square().mean() for a in self.activations]).sum()


class Parametrized(Own):
    """Weights that are computed from parameters, before each use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(5)
        for layer in self.layers[:6:2]:
            parametrizations.weight_norm(layer)
        parametrizations.spectral_norm(self.layers[6])
        parametrizations.orthogonal(self.layers[8])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Frozen(Own):
    """A pretrained backbone that is only read, in one model without, in the other with gradients passing through."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = mlp(3).requires_grad_(False)
        self.adapter, self.head = mlp(1), mlp(2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(self.adapter(x))


class FrozenMiddle(Frozen):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.adapter(x)))


class Measured(Own):
    """Metric objects, logged and called, on values from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = mlp(2), mlp(3)
        self.accuracy = MulticlassAccuracy(num_classes=WIDTH, average="micro")
        self.norm = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch[0], batch[1].argmax(-1)
        hidden = self.stem(inputs)
        self.norm.update(hidden.detach().norm(dim=-1))
        self.log("early", hidden.mean())
        logits = self.body(hidden)
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy)
        self.log("largest", logits.max(), reduce_fx="max")
        return F.cross_entropy(logits, targets)


# -- glue ------------------------------------------------------------------------------------------------------------


class GatedExperts(Own):
    """Each sample goes to one expert; how many each gets depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = mlp(1), nn.Linear(WIDTH, 3)
        self.experts, self.head = nn.ModuleList(mlp(1) for _ in range(3)), mlp(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return self.head(out)


class InPlace(Own):
    """Residuals are added in place, rows are overwritten, and activations work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            residual = x
            x = layer(x)
            x += residual
            x = self.activation(x)
        out = x * 2
        out[:, 0] = x[:, 1]
        return out


class Branching(Own):
    """A number is read from a value; a branch and a logged number follow from it, on whatever stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(3), mlp(2)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        hidden = self.body(inputs)
        scale = hidden.detach().abs().max().item()
        output = self.head(hidden / scale if scale > 1e-6 else hidden)
        self.log("scale", scale)
        return F.mse_loss(output, targets) * (1.0 + self.current_epoch)


class Derivative(nn.Module):
    """What its layer says of each sample, and how that changes with the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(torch.func.jacrev(lambda sample: torch.tanh(self.layer(sample))))(x).sum(-1)


class Transformed(Own):
    """Computes with torch.func within its layers, and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Derivative() for _ in range(3)), mlp(2)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weights).mean(0))


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


class WithAdjoint(Own):
    """Gradients that a function computes anew, for parameters that a submodule has handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.flow, self.before, self.after = LazyFlow(), mlp(3), mlp(6)

    def forward(self, x: Tensor) -> Tensor:
        flow = self.flow()
        return self.after(Adjoint.apply(flow.f, self.before(x), *flow.parameters))


class Described(tuple[Any, ...]):
    """A description of what a layer computes, which has no length."""

    def __len__(self) -> int:
        raise NotImplementedError


class OfLibraries(Own):
    """Holds a tuple without a length, and chooses functions by the library that a tensor's class is of."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.described = mlp(4), mlp(3), Described(("even", "odd"))

    def forward(self, x: Tensor) -> Tensor:
        functions = {"torch": torch}[type(y := self.before(x)).__module__.partition(".")[0]]
        return self.after(functions.einsum("sd,sd->sd", y, y))


class MixedBatch(Own):
    """Tensors, texts, numbers and Nones in one batch, which the step takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(26, WIDTH), mlp(4)

    @staticmethod
    def example(size: int, length: int) -> Any:
        words = ["".join(chr(97 + int(c)) for c in torch.randint(0, 26, (length,))) for _ in range(size)]
        return {"words": words, "targets": torch.randn(size, WIDTH), "weight": 0.5, "nothing": None}

    def loss(self, batch: Any) -> Tensor:
        words, weight = batch.pop("words"), batch.pop("weight")
        assert batch.pop("nothing") is None
        tokens = torch.tensor([[ord(c) - 97 for c in word] for word in words])
        return weight * F.mse_loss(self.body(self.embed(tokens).mean(1)), batch["targets"])


def fixed(model: type[Regression]) -> type[Regression]:
    """The same model with ``example(size, length)``, whose length is ignored."""
    return type(model.__name__, (model,), {"example": staticmethod(lambda size, length: model.example(size))})


MODELS: tuple[type[Regression], ...] = (
    Siamese, Dataclasses, Structures, Packed, PackedInside, BatchNorms,
    OwnStatistics, Checkpointed, CheckpointedReentrant, Hooked, Parametrized, Frozen, FrozenMiddle,
    Measured, GatedExperts, InPlace, Branching, Transformed, WithAdjoint, OfLibraries, MixedBatch,
    *map(fixed, (UNet, ConvNet, LSTMStack, TinyTransformer)),
)  # fmt: skip

# Draw random numbers: equal to themselves however they are cut, not to a module alone.
DRAWING: tuple[type[Regression], ...] = (
    Dropouts, CheckpointedDropout, CheckpointedReentrantDropout, ReversibleDropout,
)  # fmt: skip
