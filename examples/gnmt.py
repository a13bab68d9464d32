"""GNMT: a recurrent encoder and decoder with attention (Wu et al., arXiv:1609.08144), English to German.

    python examples/gnmt.py fit --config configs/gnmt.yaml          # Debian's package descriptions; needs apt
    python examples/gnmt.py test --config configs/gnmt.yaml --ckpt_path PATH.ckpt   # BLEU of greedy translations

An ordinary LightningModule and LightningDataModule. Any folder of `train.en`, `train.de`, `valid.en`,
`valid.de` does.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.text import BLEUScore

import lightning_avgpipe  # noqa: F401  makes "strategy: avgpipe" known

PAD, BEGIN, END = 0, 1, 2
IGNORED = -100  # the label of what is padded


class Bidirectional(nn.Module):
    """The encoder's first layer: reads a sentence forwards and backwards. (batch, time, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]


class Layer(nn.Module):
    """Dropout, an LSTM, and the input added to its output, where ``residual``."""

    def __init__(self, inputs: int, width: int, dropout: float, residual: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.residual = residual

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        inputs = x if context is None else torch.cat([x, context], dim=-1)
        out, _ = self.lstm(self.dropout(inputs))
        return out + x if self.residual else out


class Attention(nn.Module):
    """Normalised additive attention (Bahdanau et al., arXiv:1409.0473).

    Queries (batch, T, width), keys (batch, S, width), lengths of the keys (batch,) -> contexts (batch, T, width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.direction = nn.Parameter(torch.randn(width))
        self.scale = nn.Parameter(torch.tensor(width**-0.5))

    def forward(self, queries: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
        both = torch.tanh(self.query(queries).unsqueeze(2) + self.key(keys).unsqueeze(1))
        scores = both @ (self.scale * F.normalize(self.direction, dim=0))
        padded = torch.arange(keys.shape[1], device=keys.device) >= lengths[:, None]
        return scores.masked_fill(padded[:, None], float("-inf")).softmax(-1) @ keys


class GNMT(L.LightningModule):
    """Encoder and decoder of stacked LSTMs.

    Args:
        vocabulary: number of tokens of both languages together.
        width: size of a token's vector, and of the layers.
        layers: of the encoder, and of the decoder.
        dropout: before every layer.
        smoothing: share of a label that is spread over all tokens.
        learning_rate: of Adam, after warm-up.
        warmup: optimizer steps in which the rate rises.
        longest: tokens of a translation, at most.
    """

    def __init__(
        self,
        vocabulary: int = 4096,
        width: int = 128,
        layers: int = 4,
        dropout: float = 0.2,
        smoothing: float = 0.1,
        learning_rate: float = 2e-3,
        warmup: int = 200,
        longest: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.source_embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.encoder_first = Bidirectional(width)
        self.encoder = nn.ModuleList(Layer(width, width, dropout, residual=i > 0) for i in range(layers - 1))
        self.target_embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.decoder_first = Layer(width, width, dropout, residual=False)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(Layer(2 * width, width, dropout, residual=i > 0) for i in range(layers - 1))
        self.head = nn.Linear(width, vocabulary)
        self.bleu = BLEUScore(smooth=True)

    def encode(self, source: Tensor, lengths: Tensor) -> Tensor:
        x = self.encoder_first(self.source_embedding(source), lengths)
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, target: Tensor, encoded: Tensor, lengths: Tensor) -> Tensor:
        """Scores of the token behind each one of ``target``: (batch, T, vocabulary)."""
        x = self.decoder_first(self.target_embedding(target))
        context = self.attention(x, encoded, lengths)
        for layer in self.decoder:
            x = layer(x, context)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor], smoothing: float) -> Tensor:
        encoded = self.encode(batch["source"], batch["lengths"])
        scores = self.decode(batch["target"], encoded, batch["lengths"])
        return F.cross_entropy(scores.transpose(1, 2), batch["labels"], ignore_index=IGNORED, label_smoothing=smoothing)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch, self.hparams.smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, 0.0), prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        text = self.trainer.datamodule.text
        references = [[text(row[row != IGNORED])] for row in batch["labels"]]
        self.bleu.update([text(row) for row in self.translate(batch["source"], batch["lengths"])], references)
        self.log("bleu", self.bleu)

    def translate(self, source: Tensor, lengths: Tensor) -> Tensor:
        """The likeliest token each time, until all sentences end: (batch, at most ``longest``)."""
        encoded = self.encode(source, lengths)
        target = torch.full((len(source), 1), BEGIN, device=source.device)
        for _ in range(self.hparams.longest):
            target = torch.cat([target, self.decode(target, encoded, lengths)[:, -1:].argmax(-1)], dim=1)
            if (target == END).any(1).all():
                break
        return target[:, 1:]

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)

        def rate(step: int) -> float:  # warm-up; halved four times in the last third
            halvings = max(0, 4 * (3 * step - 2 * steps) // steps + 1) if 3 * step >= 2 * steps else 0
            return min(1.0, (step + 1) / self.hparams.warmup) * 0.5**halvings

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sentences(L.LightningDataModule):
    """Pairs of sentences from two files, line by line.

    Args:
        dir: folder of the files. Where it does not exist, Debian's descriptions are written there.
        source: suffix of the files to translate from.
        target: suffix of the files to translate to.
        train: name of the training files without suffix, such as ``train.tok.clean`` of WMT16.
        valid: name of the validation files without suffix, such as ``newstest2014.tok.clean``.
        vocabulary: number of tokens that byte-pair encoding finds in both languages.
        batch_size: pairs in a batch.
        longest: longer pairs are left out, in tokens.
    """

    def __init__(
        self,
        dir: Path = Path("data/debian"),
        source: str = "en",
        target: str = "de",
        train: str = "train",
        valid: str = "valid",
        vocabulary: int = 4096,
        batch_size: int = 64,
        longest: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def _files(self, name: str) -> list[Path]:
        return [Path(self.hparams.dir, f"{name}.{suffix}") for suffix in (self.hparams.source, self.hparams.target)]

    @property
    def _encoding(self) -> Path:
        return Path(self.hparams.dir, f"bpe{self.hparams.vocabulary}.json")

    def prepare_data(self) -> None:
        if not Path(self.hparams.dir).exists():
            from corpora import debian

            debian(Path(self.hparams.dir))
        if not self._encoding.exists():
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=self.hparams.vocabulary, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            )  # fmt: skip
            tokenizer.train([str(path) for path in self._files(self.hparams.train)], trainer)
            tokenizer.save(str(self._encoding))

    def setup(self, stage: str) -> None:
        self.tokenizer = Tokenizer.from_file(str(self._encoding))
        self.pairs = {name: self._read(name) for name in (self.hparams.train, self.hparams.valid)}

    def _read(self, name: str) -> list[tuple[Tensor, Tensor]]:
        sides = (path.read_text(encoding="utf-8").splitlines() for path in self._files(name))
        tokens = ([x.ids for x in self.tokenizer.encode_batch(lines)] for lines in sides)
        pairs = zip(*tokens, strict=True)
        fits = range(1, self.hparams.longest)
        return [(torch.tensor(a), torch.tensor(b)) for a, b in pairs if len(a) in fits and len(b) in fits]

    def text(self, tokens: Tensor) -> str:
        """The text up to the end of the sentence."""
        ids = tokens.tolist()
        return self.tokenizer.decode(ids[: ids.index(END)] if END in ids else ids)

    @staticmethod
    def collate(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        sources, targets = zip(*pairs, strict=True)
        return {
            "source": pad_sequence(sources, batch_first=True, padding_value=PAD),
            "lengths": torch.tensor([len(source) for source in sources]),
            "target": pad_sequence([F.pad(t, (1, 0), value=BEGIN) for t in targets], True, PAD),
            "labels": pad_sequence([F.pad(t, (0, 1), value=END) for t in targets], True, IGNORED),
        }

    def _loader(self, name: str, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            self.pairs[name], self.hparams.batch_size, shuffle, collate_fn=self.collate, drop_last=shuffle
        )

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.hparams.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.hparams.valid)

    test_dataloader = val_dataloader


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.vocabulary", "model.vocabulary")
        parser.link_arguments("data.longest", "model.longest")


if __name__ == "__main__":
    CLI(GNMT, Sentences)
