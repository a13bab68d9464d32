"""Three small trainings on real data, for questions about how well something trains rather than how fast it runs.

- ``language``: the next byte of the Python standard library's sources; a transformer;
- ``digits``: handwritten digits of scikit-learn (``pip install scikit-learn``); a convolutional network;
- ``pairs``: does a docstring belong to a function? Pairs of texts from the standard library, half of them with the
  docstring of another function; averaged embeddings of both.

Nothing is downloaded. All data are tensors in memory, so that a step is the model's work and nothing else.
"""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Samples", "Workload"]

Samples = tuple[Tensor, ...]  # the first dimension counts samples; the last tensor holds the targets


@dataclass(frozen=True)
class Workload:
    """A training with a goal.

    Attributes:
        model: makes the module, with weights from torch's generator.
        data: gives samples for training and for validation; read once.
        loss: of outputs and targets, a mean over samples.
        goal: loss on the validation samples at which the training is done.
        batch_size: B.
        rates: optimizer -> learning rate that does well for a single model, see ``--tune`` of the benchmark.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Samples, Samples]]
    loss: Callable[[Tensor, Tensor], Tensor]
    goal: float
    batch_size: int
    rates: dict[str, float]


def sources() -> Iterator[bytes]:
    """The standard library's files, in an order that is the same on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(paths, key=lambda path: zlib.crc32(path.as_posix().encode())):
        if skipped.isdisjoint(path.parts):
            yield (root / path).read_bytes()


# -- language ----------------------------------------------------------------------------------------------------------

CONTEXT = 32


class ByteTransformer(nn.Module):
    """Two blocks over bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = functools.partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.ModuleList(block(norm_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x)).transpose(1, 2)


@functools.cache
def _language() -> tuple[Samples, Samples]:
    text = bytearray()
    for file in sources():
        text += file
        if len(text) > 2_200_000:
            break
    windows = torch.frombuffer(text, dtype=torch.uint8).long()
    windows = windows[: len(windows) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    train, val = windows[:60_000], windows[60_000:61_024]
    return (train[:, :-1], train[:, 1:]), (val[:, :-1], val[:, 1:])


# -- digits ------------------------------------------------------------------------------------------------------------


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


@functools.cache
def _digits() -> tuple[Samples, Samples]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(digits.target)[order]
    return (images[:1280], labels[:1280]), (images[1280:], labels[1280:])


# -- pairs -------------------------------------------------------------------------------------------------------------

WORDS = 4096
LENGTH = 48


class PairClassifier(nn.Module):
    """Do two texts belong together?"""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean", padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(3 * width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, 2)

    def forward(self, texts: Tensor) -> Tensor:
        a, b = self.words(texts.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return self.head(self.layers(torch.cat([a * b * 8, (a - b).abs(), a + b], dim=1)))


def _words(text: str) -> list[int]:
    found = re.findall(r"[A-Z]?[a-z]{2,}", text)[:LENGTH]
    numbers = [1 + zlib.crc32(word.lower().encode()) % (WORDS - 1) for word in found]
    return numbers + [0] * (LENGTH - len(numbers))


def _documented(source: bytes) -> Iterator[tuple[list[int], list[int]]]:
    """Body and docstring of each function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (documentation := ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
            code, text = _words(ast.unparse(node)), _words(documentation)
            if min(sum(map(bool, code)), sum(map(bool, text))) >= 4:
                yield code, text


@functools.cache
def _pairs() -> tuple[Samples, Samples]:
    pairs = torch.tensor([pair for source in sources() for pair in _documented(source)])
    held_out = len(pairs) // 10  # files in the order of their hash, so hardly a file is on both sides

    def mixed(pairs: Tensor, seed: int) -> Samples:
        random = torch.Generator().manual_seed(seed)
        other = pairs[torch.randperm(len(pairs), generator=random), 1]
        false = torch.stack([pairs[:, 0], other], dim=1)
        labels = torch.cat([torch.ones(len(pairs)), torch.zeros(len(pairs))]).long()
        return torch.cat([pairs, false]), labels

    return mixed(pairs[held_out:], 0), mixed(pairs[:held_out], 1)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "language", ByteTransformer, _language, F.cross_entropy, 2.4, 16,
            {"sgd": 1.0, "momentum": 0.25, "adam": 0.008},
        ),
        Workload(
            "digits", _convolutions, _digits, F.cross_entropy, 0.07, 16,
            {"sgd": 0.125, "momentum": 0.0156, "adam": 0.008},
        ),
        Workload(
            "pairs", PairClassifier, _pairs, F.cross_entropy, 0.5, 16,
            {"sgd": 0.25, "momentum": 0.0156, "adam": 0.016},
        ),
    )
}  # fmt: skip
