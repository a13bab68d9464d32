"""Fine-tune a small vision transformer in two stages, whose layers freeze from epoch to epoch.

    python examples/finetune.py fit --config configs/finetune.yaml

`FineTuning` and `Stripes` are ordinary Lightning: nothing in them knows that there is a pipeline, or what is frozen.
"""

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import lightning_avgpipe  # noqa: F401  makes "strategy: avgpipe" known

ANGLES, WIDTHS, SIZE = 8, 4, 32


def stripes(count: int, seed: int, noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy pictures of stripes, with the numbers of their angles and of their widths."""
    numbers = torch.Generator().manual_seed(seed)
    angles, widths = (torch.randint(n, (count,), generator=numbers) for n in (ANGLES, WIDTHS))
    phases = 2 * math.pi * torch.rand(count, generator=numbers)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    turn = (math.pi * angles / ANGLES)[:, None, None]
    waves = torch.sin((x * turn.cos() + y * turn.sin()) * (0.5 + 0.3 * widths)[:, None, None] + phases[:, None, None])
    pictures = waves[:, None] + noise * torch.randn(count, 3, SIZE, SIZE, generator=numbers)
    return pictures, angles, widths


class FineTuning(L.LightningModule):
    """A ViT that has learnt to tell angles of stripes, and narrow ones from wide ones, and is to tell four widths.

    Args:
        layers: number of blocks.
        width: of a patch's vector.
        learning_rate: AdamW's.
        pretraining_steps: with 32 pictures each, before the fine-tuning, wherever the module is built.
    """

    def __init__(
        self, layers: int = 8, width: int = 96, learning_rate: float = 5e-4, pretraining_steps: int = 200
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = ViTConfig(
            image_size=SIZE, patch_size=4, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=4 * width, num_labels=2 * ANGLES,
        )  # fmt: skip
        self.net = ViTForImageClassification(config)
        pictures, angles, widths = stripes(32 * pretraining_steps, seed=1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=learning_rate)
        for batch, targets in zip(pictures.split(32), (2 * angles + widths // 2).split(32), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(self(batch), targets).backward()
            optimizer.step()
        self.zero_grad()
        self.net.classifier = torch.nn.Linear(width, WIDTHS)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.net(pictures).logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, targets = batch
        loss = F.cross_entropy(self(pictures), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pictures, targets = batch
        self.log("val_accuracy", (self(pictures).argmax(1) == targets).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


class Stripes(L.LightningDataModule):
    """Pictures made on the spot.

    Args:
        train: number of pictures.
        val: number of others.
        batch_size: pictures per batch.
    """

    def __init__(self, train: int = 512, val: int = 256, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def _dataset(self, count: int, seed: int) -> TensorDataset:
        pictures, _, widths = stripes(count, seed)
        return TensorDataset(pictures, widths)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._dataset(self.hparams.train, 2), batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._dataset(self.hparams.val, 3), batch_size=self.hparams.batch_size)


if __name__ == "__main__":
    LightningCLI(FineTuning, Stripes)
