"""The workloads' models in two stages written by hand, for engines that want modules in a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.workloads import gnmt

__all__ = ["FIRST_INPUTS", "by_hand", "tensors", "tied"]

_LONGEST = 50  # tokens of a sentence: such engines want one shape

# Names of the tensors of a batch that the first stage takes; the last one takes all, by name.
FIRST_INPUTS = {
    "gnmt": ("source", "lengths"),
    "bert": ("tokens", "kinds"),
    "awd_lstm": ("tokens", "streams", "fresh"),
}


def tensors(workload: str, batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name; sentences for translation padded to one length."""
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
    """What is sent, value and gradient, must be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous().view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous()


class _GnmtFirst(nn.Module):
    """The encoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.source_embedding, self.encoder_first, self.encoder = (
            model.source_embedding, model.encoder_first, model.encoder,
        )  # fmt: skip

    def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
        x = self.encoder_first(self.source_embedding(source), lengths)
        for layer in self.encoder:
            x = layer(x)
        return _Contiguous.apply(x)


class _GnmtLast(nn.Module):
    """The decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.target_embedding, self.decoder_first, self.attention = (
            model.target_embedding, model.decoder_first, model.attention,
        )  # fmt: skip
        self.decoder, self.head, self.smoothing = model.decoder, model.head, model.hparams.smoothing

    def forward(self, encoded: Tensor, lengths: Tensor, words: Tensor, labels: Tensor, **others: Tensor) -> Tensor:
        x = self.decoder_first(self.target_embedding(words))
        context = self.attention(x, _Contiguous.apply(encoded), lengths)
        for layer in self.decoder:
            x = layer(x, context)
        scores = self.head(x).transpose(1, 2)
        return F.cross_entropy(scores, labels, ignore_index=gnmt.IGNORED, label_smoothing=self.smoothing)


class _BertFirst(nn.Module):
    """Embeddings and half of the layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        layers = model.bert.bert.encoder.layer
        self.embeddings, self.layers = model.bert.bert.embeddings, layers[: len(layers) // 2]

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        x, mask = self.embeddings(input_ids=tokens, token_type_ids=kinds), (tokens != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return _Contiguous.apply(x)


class _BertLast(nn.Module):
    """The other half, and the classifier."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        layers = model.bert.bert.encoder.layer
        self.layers, self.pooler = layers[len(layers) // 2 :], model.bert.bert.pooler
        self.dropout, self.classifier = model.bert.dropout, model.bert.classifier

    def forward(self, x: Tensor, tokens: Tensor, labels: Tensor, **others: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.classifier(self.dropout(self.pooler(x))), labels)


class _AwdFirst(nn.Module):
    """All layers but the last one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.input_dropout = model.embedding, model.input_dropout
        self.layers, self.dropouts = model.layers[:-1], model.dropouts

    def forward(self, tokens: Tensor, streams: Tensor, fresh: Tensor) -> Tensor:
        x = self.input_dropout(self.embedding(tokens))
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            x = dropout(layer(x, streams, fresh))
        return _Contiguous.apply(x)


class _AwdLast(nn.Module):
    """The last layer, and the words."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer, self.output_dropout, self.head = model.layers[-1], model.output_dropout, model.head
        self.activation, self.slowness = model.hparams.activation, model.hparams.slowness

    def forward(self, x: Tensor, streams: Tensor, fresh: Tensor, targets: Tensor, **others: Tensor) -> Tensor:
        raw = self.layer(_Contiguous.apply(x), streams, fresh)
        out = self.output_dropout(raw)
        loss = F.cross_entropy(self.head(out).flatten(0, 1), targets.flatten())
        slowness = (raw[:, 1:] - raw[:, :-1]).square().mean()
        return loss + self.activation * out.square().mean() + self.slowness * slowness


_STAGES = {"gnmt": (_GnmtFirst, _GnmtLast), "bert": (_BertFirst, _BertLast), "awd_lstm": (_AwdFirst, _AwdLast)}


def by_hand(workload: str, model: nn.Module, stage: int) -> nn.Module:
    """A stage, 0 or 1, with the parameters of a model."""
    return _STAGES[workload][stage](model)


def tied(workload: str, model: Any) -> Tensor | None:
    """The parameter that both stages use, whose gradients somebody must add."""
    return model.head.weight if workload == "awd_lstm" else None
