"""Train a small GPT on the Python standard library, pipelined over two processes.

    python examples/language_model.py                       # two pipeline stages on the CPU
    python examples/language_model.py --strategy auto       # the same training in one process
    python examples/language_model.py --sample PATH.ckpt    # write some Python with a trained checkpoint

`LanguageModel` and `PythonSources` are ordinary Lightning: nothing in them knows that there is a pipeline.
"""

import argparse
import subprocess
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256  # a token is a byte


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class LanguageModel(L.LightningModule):
    """A pre-norm GPT over bytes.

    Args:
        layers: number of blocks.
        width: size of a token's vector.
        heads: attention heads per block; divides ``width``.
        block_size: the longest context, in bytes.
        dropout: probability, after the embeddings and in every residual branch.
        learning_rate: the peak, reached after a tenth of the training.
        weight_decay: AdamW's.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        block_size: int = 64,
        dropout: float = 0.1,
        learning_rate: float = 4e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.hparams.learning_rate, weight_decay=self.hparams.weight_decay
        )
        # Warm-up, then a cosine to almost zero; the rate changes at every step, not every epoch.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.hparams.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=0.1,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.inference_mode()
    def generate(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """Continue ``prompt`` by ``length`` bytes."""
        self.eval()
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.hparams.block_size :])[:, -1]
            tokens = torch.cat([tokens, torch.multinomial((logits / temperature).softmax(-1), 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def standard_library(held_out: bool) -> Iterator[Path]:
    """Python's own source files: one in ten is held out for validation, the others are for training."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    # A hash of the path orders the files and splits them: the same on every machine, unlike the directory's order.
    order = {path: zlib.crc32(path.as_posix().encode()) for path in paths if skipped.isdisjoint(path.parts)}
    return (root / path for path in sorted(order, key=order.__getitem__) if (order[path] % 10 == 0) == held_out)


class Windows(Dataset):
    """Consecutive windows of a text, each with its next bytes as targets."""

    def __init__(self, text: bytes, block_size: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block_size
        window = self.tokens[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


class PythonSources(L.LightningDataModule):
    """The standard library's own sources: a text that every Python has at hand, so nothing is downloaded.

    Args:
        block_size: bytes per window.
        batch_size: windows per batch.
        train_bytes: size of the training text, at most.
        val_bytes: size of the validation text, at most.
    """

    def __init__(
        self, block_size: int = 64, batch_size: int = 16, train_bytes: int = 4_000_000, val_bytes: int = 32_000
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.train = self._windows(standard_library(held_out=False), self.hparams.train_bytes)
        self.val = self._windows(standard_library(held_out=True), self.hparams.val_bytes)

    def _windows(self, paths: Iterable[Path], limit: int) -> Windows:
        text = bytearray()
        for path in paths:
            text += path.read_bytes()
            if len(text) >= limit:
                break
        return Windows(bytes(text[:limit]), self.hparams.block_size)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)


class ValidationHistory(Callback):
    """Remembers every validation loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())


def make_strategy(args: argparse.Namespace) -> str | Strategy:
    if args.strategy != "avgpipe":
        return args.strategy
    # Imported for training only: --sample shows that a checkpoint opens without the package.
    from lightning_avgpipe import AvgPipeStrategy

    return AvgPipeStrategy(num_stages=args.num_stages, num_microbatches=args.num_microbatches, schedule=args.schedule)


def train(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory
    L.seed_everything(args.seed)
    history = ValidationHistory()
    checkpoint = ModelCheckpoint(monitor="val_loss")
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=1 if args.strategy == "auto" else args.devices,
        strategy=make_strategy(args),
        precision=args.precision,
        max_steps=args.max_steps,
        val_check_interval=max(1, args.max_steps // 5),
        check_val_every_n_epoch=None,  # count steps across epochs
        num_sanity_val_steps=-1,  # validate everything before the first step too: the loss of the untrained model
        log_every_n_steps=10,
        callbacks=[history, checkpoint, LearningRateMonitor()],
    )
    trainer.fit(LanguageModel(layers=args.layers, width=args.width), PythonSources(batch_size=args.batch_size))

    # Lightning starts one process per device with this same script: only the first one reports.
    if trainer.is_global_zero:
        print("val_loss:", " -> ".join(f"{loss:.2f}" for loss in history.losses))
        print("checkpoint:", checkpoint.best_model_path, flush=True)
        subprocess.run([sys.executable, __file__, "--sample", checkpoint.best_model_path], check=True)


def sample(path: str) -> None:
    """Open a checkpoint as any Lightning checkpoint, in one process, and let the model write."""
    L.seed_everything(0, verbose=False)
    model = LanguageModel.load_from_checkpoint(path, map_location="cpu")
    assert "lightning_avgpipe" not in sys.modules
    print(model.generate("def ", length=300))


def int_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="avgpipe", help="avgpipe, auto (one process), or any other")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num_stages", type=int_or_auto, default="auto")
    parser.add_argument("--num_microbatches", type=int_or_auto, default="auto")
    parser.add_argument("--schedule", default="advance_forward", choices=["advance_forward", "1f1b", "afab"])
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", metavar="PATH", help="do not train: write some Python with this checkpoint")
    args = parser.parse_args()
    if args.sample:
        sample(args.sample)
    else:
        train(args)


if __name__ == "__main__":
    main()
