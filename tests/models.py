"""Small LightningModules as anybody would write them. None of them knows of pipelines."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Regression(L.LightningModule):
    """Base: a loss, logging and an optimizer; subclasses give layers, and their ``example`` if it is another one."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.save_hyperparameters()

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 8), torch.randn(size, 8)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["image"] if isinstance(batch, dict) else batch[0])

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] in ("adam", "adamw"):
            kind = torch.optim.Adam if self.hparams["optimizer"] == "adam" else torch.optim.AdamW
            return kind(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class MLP(Regression):
    def __init__(self, optimizer: str = "sgd", depth: int = 5) -> None:
        super().__init__(optimizer)
        self.layers = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class MadeOnMeta(MLP):
    """Has weights without contents until training begins; each process then has those of its stages."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.layers = MLP().layers


class Normed(Regression):
    """Buffers that its stages change, and random numbers."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        parts = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.layers = nn.Sequential(*parts, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CountingLinear(nn.Linear):
    """Counts its calls, and computes with their number."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class ConvNet(Regression):
    """Functional glue between the layers, and a dict batch that the step changes."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * 4, 16)
        self.fc2 = nn.Linear(16, 5)

    @staticmethod
    def example(size: int) -> Any:
        return {"image": torch.randn(size, 3, 8, 8), "label": torch.randint(0, 5, (size,))}

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.silu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))

    def loss(self, batch: Any) -> Tensor:
        label = batch.pop("label")
        return F.cross_entropy(self(batch["image"]), label)


class LSTMStack(Regression):
    """Tuples, among them states that cross stages."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.first = nn.LSTM(6, 8, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.third = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 6)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 4, 6), torch.randn(size, 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.first(x)
        h, (hidden, _) = self.second(h, state)
        h, _ = self.third(h, (hidden, torch.zeros_like(hidden)))
        return self.head(h)


class UNet(Regression):
    """Skip connections over several stages, in-place activations and in-place glue."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.down1 = nn.Conv2d(2, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 2, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 2, 8, 8), torch.randn(size, 2, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(F.max_pool2d(a, 2)))
        c = self.activation(self.middle(F.max_pool2d(b, 2)))
        c = F.interpolate(c, scale_factor=2)
        c += b
        d = self.activation(self.up2(torch.cat([c, b], dim=1)))
        d = F.interpolate(d, scale_factor=2)
        return self.up1(torch.cat([d, a], dim=1))


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.dropout(self.attention(h, h, h, attn_mask=mask, need_weights=False)[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyTransformer(Regression):
    """A parameter outside of any unit, a mask made from the batch's shape, several calls in one expression."""

    def __init__(self, optimizer: str = "sgd", dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__(optimizer)
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(1, 6, 8) * 0.1)
        self.blocks = nn.ModuleList(_Block(8, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    @staticmethod
    def example(size: int) -> Any:
        tokens = torch.randint(0, 11, (size, 7))
        return tokens[:, :-1], tokens[:, 1:]

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.embed(tokens) + self.position[:, :length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class TiedTransformer(TinyTransformer):
    """Its first and its last layer use the same parameter."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.head.weight = self.embed.weight


class Transposing(Regression):
    """Values lie in memory in another order than their dimensions: recurrence, attention, channels in the middle."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 20)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randint(0, 20, (size, 7)), torch.randint(0, 20, (size, 7))

    def forward(self, tokens: Tensor) -> Tensor:
        h, _ = self.lstm(self.embed(tokens))
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.head(self.norm(h.transpose(1, 2)).transpose(1, 2))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


class Blocks(Regression):
    """Batch norm, dropout and logged values in the middle, and a layer that the first and the last block share."""

    def __init__(self, optimizer: str = "adamw", width: int = 8) -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.layers.append(self.layers[0])
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(6))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = x + self.dropout(F.silu(norm(layer(x))))
            self.log(f"size_{i}", x.abs().mean())
        return x


MODELS = (MLP, ConvNet, LSTMStack, UNet, TinyTransformer)


class _Examples(Dataset[Any]):
    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, i: int) -> Any:
        return {name: values[i] for name, values in self.batch.items()}


def loader(
    model: type[Regression], samples: int, batch_size: int, seed: int = 0, shuffle: bool = False
) -> DataLoader[Any]:
    """A dataloader of random samples, the same for the same seed."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    batch = model.example(samples)
    torch.set_rng_state(state)
    data: Dataset[Any] = _Examples(batch) if isinstance(batch, dict) else TensorDataset(*batch)
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle)
