"""AWD-LSTM (Merity et al., *Regularizing and Optimizing LSTM Language Models*, ICLR 2018): words, one after another.

    python examples/awd_lstm.py fit --config configs/awd_lstm.yaml                           # Python's own sources
    python examples/corpora.py brown data/brown
    python examples/awd_lstm.py fit --config configs/awd_lstm.yaml --data.dir data/brown     # or the Penn Treebank

An ordinary LightningModule and LightningDataModule. The text runs on from batch to batch: each batch continues the
streams of the one before, and a stream's hidden state waits for it in a buffer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from language_model import standard_library
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_avgpipe  # noqa: F401  makes "strategy: avgpipe" known

UNKNOWN, END = 0, 1  # words that are rare; the end of a sentence


class LockedDropout(nn.Module):
    """Drops the same features of a sample at each time step (variational dropout). Shapes: (batch, time, features)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout1d(x.transpose(1, 2), self.p, self.training).transpose(1, 2)


class WordEmbedding(nn.Embedding):
    """Drops whole words: every place of a word at once."""

    def __init__(self, words: int, width: int, p: float) -> None:
        super().__init__(words, width)
        self.p = p
        nn.init.uniform_(self.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = F.dropout(self.weight.new_ones(len(self.weight), 1), self.p, self.training)
        return F.embedding(tokens, self.weight * kept)


class StreamLSTM(nn.LSTM):
    """A layer that drops hidden-to-hidden weights (DropConnect) and remembers the state of each stream.

    Args:
        streams: how many texts are read side by side.
        p: share of the recurrent weights that a call leaves out.
    """

    def __init__(self, inputs: int, width: int, streams: int, p: float) -> None:
        super().__init__(inputs, width, batch_first=True)
        self.p = p
        self.register_buffer("state", torch.zeros(2, 2, streams, width), persistent=False)

    def forward(self, x: Tensor, streams: Tensor, fresh: Tensor) -> Tensor:
        """Read ``x``, (batch, time, inputs): the next part of ``streams``, which begin anew where ``fresh``."""
        recurrent = F.dropout(self.weight_hh_l0, self.p, self.training)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        memory = self.state[int(self.training)]  # validation does not disturb the streams of training
        hidden, cell = memory[:, streams].unsqueeze(1) * ~fresh[:, None]
        out, hidden, cell = torch.lstm(x, (hidden, cell), weights, True, 1, 0.0, self.training, False, True)
        memory[:, streams] = torch.cat([hidden, cell]).detach()  # back-propagation ends here
        return out


class AWDLSTM(L.LightningModule):
    """Three LSTM layers between a word embedding and its transpose.

    Args:
        vocabulary: number of words.
        streams: as the data's: texts that are read side by side.
        width: size of an embedding.
        hidden: size of the inner layers.
        layers: number of LSTM layers.
        dropout_embedding: share of words left out; so for the others below.
        dropout_input: of features, between embedding and first layer.
        dropout_hidden: of features, between layers.
        dropout_output: of features, behind the last layer.
        dropout_weight: of recurrent weights.
        activation: weight of the outputs' squares in the loss (AR).
        slowness: weight of their changes' squares (TAR).
        learning_rate: of SGD, and of ASGD after it.
        weight_decay: of both.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        streams: int = 32,
        width: int = 128,
        hidden: int = 256,
        layers: int = 3,
        dropout_embedding: float = 0.02,
        dropout_input: float = 0.1,
        dropout_hidden: float = 0.1,
        dropout_output: float = 0.1,
        dropout_weight: float = 0.2,
        activation: float = 2.0,
        slowness: float = 1.0,
        learning_rate: float = 10.0,
        weight_decay: float = 1.2e-6,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = [width, *[hidden] * (layers - 1), width]
        self.embedding = WordEmbedding(vocabulary, width, dropout_embedding)
        self.input_dropout = LockedDropout(dropout_input)
        self.layers = nn.ModuleList(StreamLSTM(a, b, streams, dropout_weight) for a, b in pairwise(sizes))
        self.dropouts = nn.ModuleList(LockedDropout(dropout_hidden) for _ in range(layers - 1))
        self.output_dropout = LockedDropout(dropout_output)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, streams: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the next word, (batch, time, vocabulary); what they are made from, with dropout and without."""
        x = self.input_dropout(self.embedding(tokens))
        *inner, last = self.layers
        for layer, dropout in zip(inner, self.dropouts, strict=True):
            x = dropout(layer(x, streams, fresh))
        raw = last(x, streams, fresh)
        out = self.output_dropout(raw)
        return self.head(out), out, raw

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores, out, raw = self(batch["tokens"], batch["streams"], batch["fresh"])
        loss = F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        slowness = (raw[:, 1:] - raw[:, :-1]).square().mean()
        return loss + self.hparams.activation * out.square().mean() + self.hparams.slowness * slowness

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        scores, _, _ = self(batch["tokens"], batch["streams"], batch["fresh"])
        self.log("val_loss", F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten()), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Without decay (lambd) and before t0, ASGD is SGD. `NonMonotonic` sets t0.
        return torch.optim.ASGD(
            self.parameters(), self.hparams.learning_rate, lambd=0.0, t0=math.inf,
            weight_decay=self.hparams.weight_decay,
        )  # fmt: skip


class NonMonotonic(L.Callback):
    """Begins to average the weights when validation no longer improves (NT-ASGD).

    From then on the averages are validated, and saved in checkpoints; training itself goes on with the weights.

    Args:
        patience: the loss must be worse than the best one up to so many validations before.
    """

    def __init__(self, patience: int = 5) -> None:
        self.patience = patience
        self.losses: list[float] = []
        self.weights: dict[Tensor, Tensor] = {}

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if group["t0"] < math.inf and "ax" in optimizer.state[weight]:
                    self.weights[weight] = weight.detach().clone()
                    weight.data.copy_(optimizer.state[weight]["ax"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        loss = trainer.callback_metrics["val_loss"].item()
        earlier = self.losses[: max(0, len(self.losses) - self.patience)]
        self.losses.append(loss)
        if earlier and loss > min(earlier):
            for group in trainer.optimizers[0].param_groups:
                group["t0"] = min(group["t0"], trainer.global_step)

    def on_train_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        for weight, value in self.weights.items():
            weight.data.copy_(value)
        self.weights.clear()


class Streams(IterableDataset):
    """Parts of a text that is cut into streams, side by side: each batch continues the one before.

    Args:
        words: the text, as numbers.
        batch_size: streams in a batch.
        groups: batches take turns in so many groups of streams. As many as there are parallel pipelines, so that each
            of them follows streams of its own.
        steps: words of a stream in a batch.
    """

    def __init__(self, words: Tensor, batch_size: int, groups: int, steps: int) -> None:
        length = (len(words) - 1) // (batch_size * groups)
        self.tokens = words[: length * batch_size * groups].view(groups, batch_size, length)
        self.targets = words[1 : length * batch_size * groups + 1].view(groups, batch_size, length)
        self.numbers = torch.arange(batch_size * groups).view(groups, batch_size)
        self.steps = steps

    def __len__(self) -> int:
        groups, _, length = self.tokens.shape
        return length // self.steps * groups

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(len(self)):
            turn, group = divmod(index, len(self.tokens))
            part = slice(turn * self.steps, (turn + 1) * self.steps)
            yield {
                "tokens": self.tokens[group, :, part],
                "targets": self.targets[group, :, part],
                "streams": self.numbers[group],
                "fresh": torch.full_like(self.numbers[group], turn == 0, dtype=torch.bool),
            }


class Words(L.LightningDataModule):
    """A text as words: ``train.txt`` and ``valid.txt`` of a folder, such as the Penn Treebank's.

    Args:
        dir: the folder; null: Python's standard library, its names and signs as words.
        vocabulary: number of words; the rarer ones are unknown.
        batch_size: streams in a batch.
        groups: groups of streams that batches take turns in; give the number of parallel pipelines.
        steps: words of a stream in a batch, through which gradients flow back.
        limit: words of the training text, at most.
    """

    def __init__(
        self,
        dir: Path | None = None,
        vocabulary: int = 8192,
        batch_size: int = 32,
        groups: int = 1,
        steps: int = 32,
        limit: int = 1_000_000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        if self.hparams.dir is None:
            train, val = ([*self._signs(standard_library(part))] for part in (False, True))
        else:
            train, val = ([*self._words(Path(self.hparams.dir, f"{name}.txt"))] for name in ("train", "valid"))
        train, val = train[: self.hparams.limit], val[: self.hparams.limit // 10]
        common = Counter(train).most_common(self.hparams.vocabulary - 2)
        numbers = {word: index for index, (word, _) in enumerate(common, 2)} | {"<eos>": END}
        self.train, self.val = (torch.tensor([numbers.get(word, UNKNOWN) for word in text]) for text in (train, val))

    @staticmethod
    def _signs(files: Iterator[Path]) -> Iterator[str]:
        for path in files:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                yield from (*re.findall(r"\w+|\S", line), "<eos>")

    @staticmethod
    def _words(path: Path) -> Iterator[str]:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield from (*line.split(), "<eos>")

    def _loader(self, words: Tensor) -> DataLoader:
        streams = Streams(words, self.hparams.batch_size, self.hparams.groups, self.hparams.steps)
        return DataLoader(streams, batch_size=None)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val)


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.vocabulary", "model.vocabulary")
        parser.link_arguments(("data.batch_size", "data.groups"), "model.streams", compute_fn=int.__mul__)


if __name__ == "__main__":
    CLI(AWDLSTM, Words)
