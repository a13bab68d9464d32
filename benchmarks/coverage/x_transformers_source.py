"""Decoders and encoders of x-transformers, one for each option of its README that is switched on by a name."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper, XTransformer
from x_transformers.x_transformers import AttentionLayers

from benchmarks.coverage.case import Case, Example, example

BATCH, LENGTH, VOCABULARY, WIDTH = 4, 16, 64, 32


class Source:
    """x-transformers."""

    name = "x-transformers"
    version = importlib.metadata.version("x-transformers")

    def cases(self) -> Iterator[Case]:
        """Plain, encoder and decoder, and each switch of the layers that is off by default."""
        yield Case("XTransformer", "sequence to sequence", True, [translation])
        for name, takes in inspect.signature(AttentionLayers).parameters.items():
            if name == "heads":
                yield Case("Decoder", "causal language model", True, [partial(made, {})])
            if takes.default is False and name not in ("causal", "only_cross", "cross_attend"):
                yield Case(f"Decoder, {name}", "causal language model", False, [partial(made, {name: True})])


class Wrapped(nn.Module):
    """A model that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss."""
        return (self.net(*inputs.values()),)


def made(switches: dict[str, Any]) -> Example:
    """A language model."""
    layers = Decoder(dim=WIDTH, depth=4, heads=4, attn_dim_head=8, **switches)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers))
    return example(Wrapped(model), {"x": torch.randint(VOCABULARY, (BATCH, LENGTH))})


def translation() -> Example:
    """Encoder and decoder."""
    sizes = {"num_tokens": VOCABULARY, "depth": 2, "heads": 4, "max_seq_len": LENGTH}
    both = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
    model = XTransformer(dim=WIDTH, tie_token_emb=True, **both)
    tokens = {name: torch.randint(VOCABULARY, (BATCH, LENGTH)) for name in ("source", "target")}
    return example(Wrapped(model), tokens)
