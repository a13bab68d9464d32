"""Write the workloads' models by hand as blocks in a row, and cut them into stages, for engines that want this."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.workloads import gnmt
from benchmarks.partition import evenest

__all__ = ["HandStage", "blocks", "cut", "tensors", "tied"]

_LONGEST = 50  # tokens of a sentence: such engines want one shape

Values = tuple[Tensor, ...]  # tensors that go from block to block


def tensors(workload: str, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; sentences for translation are padded to one length."""
    if workload == "bert":
        return dict(zip(("tokens", "kinds", "labels"), batch, strict=True))
    if workload == "gnmt":
        padding = {"source": gnmt.PAD, "target": gnmt.PAD, "labels": gnmt.IGNORED}
        made = {
            name: F.pad(t, (0, _LONGEST - t.shape[1]), value=padding[name]) if name in padding else t
            for name, t in batch.items()
        }
        return {{"target": "words"}.get(name, name): t for name, t in made.items()}  # "target" is an engine's own
    return dict(batch)


class _Contiguous(torch.autograd.Function):
    """The identity; engines send values and gradients, which must be contiguous for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous().view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous()


class _Block(nn.Module):
    """A block that has some modules of the model as its own.

    ``run(values, given)`` computes the values for the next block, the last one the loss.
    """

    def __init__(self, *parts: nn.Module, **numbers: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.numbers = numbers

    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        raise NotImplementedError


class _GnmtFirst(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        embedding, layer = self.parts
        return (layer(embedding(given["source"]), given["lengths"]),)


class _GnmtLayer(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        x, *context = values
        return (self.parts[0](x, *context), *context)


class _GnmtMiddle(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        embedding, layer, attention = self.parts
        x = layer(embedding(given["words"]))
        return x, attention(x, values[0], given["lengths"])


class _GnmtLast(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        scores = self.parts[0](values[0]).transpose(1, 2)
        smoothing = self.numbers["smoothing"]
        loss = F.cross_entropy(scores, given["labels"], ignore_index=gnmt.IGNORED, label_smoothing=smoothing)
        return (loss,)


class _BertFirst(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        return (self.parts[0](input_ids=given["tokens"], token_type_ids=given["kinds"]),)


class _BertLayer(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        return (self.parts[0](values[0], (given["tokens"] != 0)[:, None, None, :]),)


class _BertLast(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        pooler, dropout, classifier = self.parts
        return (F.cross_entropy(classifier(dropout(pooler(values[0]))), given["labels"]),)


class _AwdFirst(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        embedding, dropout = self.parts
        return (dropout(embedding(given["tokens"])),)


class _AwdLayer(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        layer, *dropout = self.parts
        x = layer(values[0], given["streams"], given["fresh"])
        return (dropout[0](x),) if dropout else (x,)


class _AwdLast(_Block):
    def run(self, values: Values, given: dict[str, Tensor]) -> Values:
        dropout, head = self.parts
        out = dropout(values[0])
        loss = F.cross_entropy(head(out).flatten(0, 1), given["targets"].flatten())
        slowness = (values[0][:, 1:] - values[0][:, :-1]).square().mean()
        return (loss + self.numbers["activation"] * out.square().mean() + self.numbers["slowness"] * slowness,)


def blocks(workload: str, model: Any) -> list[_Block]:
    """Return a workload's model as blocks that use its modules."""
    if workload == "gnmt":
        return [
            _GnmtFirst(model.source_embedding, model.encoder_first),
            *(_GnmtLayer(layer) for layer in model.encoder),
            _GnmtMiddle(model.target_embedding, model.decoder_first, model.attention),
            *(_GnmtLayer(layer) for layer in model.decoder),
            _GnmtLast(model.head, smoothing=model.hparams.smoothing),
        ]
    if workload == "bert":
        bert = model.bert
        layers = (_BertLayer(layer) for layer in bert.bert.encoder.layer)
        return [
            _BertFirst(bert.bert.embeddings), *layers, _BertLast(bert.bert.pooler, bert.dropout, bert.classifier),
        ]  # fmt: skip
    weights = {name: model.hparams[name] for name in ("activation", "slowness")}
    return [
        _AwdFirst(model.embedding, model.input_dropout),
        *(_AwdLayer(*parts) for parts in zip(model.layers[:-1], model.dropouts, strict=True)),
        _AwdLayer(model.layers[-1]),
        _AwdLast(model.output_dropout, model.head, **weights),
    ]


class HandStage(nn.Module):
    """Some blocks in a row. It takes values as positional arguments, and the tensors of a batch by name.

    The first stage is given some tensor of the batch as well, which engines want and it ignores.
    """

    def __init__(self, parts: Sequence[_Block], is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parts)
        self.is_first, self.is_last = is_first, is_last

    def forward(self, *values: Tensor, **given: Tensor) -> Any:
        x: Values = () if self.is_first else tuple(map(_Contiguous.apply, values))
        for block in self.blocks:
            x = block.run(x, given)
        if self.is_last:
            return x[0]
        x = tuple(map(_Contiguous.apply, x))
        return x if len(x) > 1 else x[0]


def cut(parts: Sequence[_Block], given: dict[str, Tensor], num_stages: int) -> list[HandStage]:
    """Cut blocks into stages of nearly the same time, which rank 0 measures with these tensors of a batch.

    Every process calls it.
    """
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        seconds = _seconds(parts, given)
        found[0] = 0, *evenest(seconds, range(1, len(parts)), num_stages), len(parts)
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    ends = found[0]
    return [
        HandStage(parts[begin:end], begin == 0, end == len(parts)) for begin, end in itertools.pairwise(ends)
    ]  # fmt: skip


def _seconds(parts: Sequence[_Block], given: dict[str, Tensor]) -> list[float]:
    """Return the seconds of a forward and a backward of each block, the smaller of two."""
    found = [float("inf")] * len(parts)
    for _ in range(2):
        values: Values = ()
        for number, block in enumerate(parts):
            begin = time.perf_counter()
            made = block.run(values, given)
            torch.autograd.grad(made, list(block.parameters()), [torch.ones_like(t) for t in made], allow_unused=True)
            found[number] = min(found[number], time.perf_counter() - begin)
            values = tuple(t.detach().requires_grad_() for t in made)
    return found


def tied(workload: str, model: Any) -> Tensor | None:
    """Return the parameter that the first and the last stage use, whose gradients somebody must add."""
    return model.head.weight if workload == "awd_lstm" else None
