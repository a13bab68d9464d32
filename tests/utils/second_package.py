"""A user's script for ``pytorch_lightning``, which test_lightning.py starts: ``second_package.py STRATEGY``."""

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner, PipelineTimeline

BATCH = 8


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def loader(batch_size: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=batch_size)


def trained(folder: str, batch_size: int = BATCH, **options: Any) -> pl.Trainer:
    """Train, and leave the weights of the best epoch in a folder as best.ckpt."""
    saving = ModelCheckpoint(folder, "best", monitor="val_loss")
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=CSVLogger(folder), log_every_n_steps=1, gradient_clip_val=0.5,
        callbacks=[saving, EarlyStopping("val_loss", patience=5), *options.pop("callbacks", [])], **options,
    )  # fmt: skip
    trainer.fit(Net(), loader(batch_size), loader(BATCH))
    return trainer


def check_callbacks() -> None:
    """Callbacks of the package do their work."""
    tuner = AvgPipeTuner(max_num_pipelines=1)
    callbacks = [PipelineTimeline(every_n_steps=2, dirpath="timelines"), tuner]
    trained("tuned", strategy=AvgPipeStrategy(num_stages=2), devices=1, callbacks=callbacks)
    assert tuner.result is not None


def check_command_line() -> None:
    """LightningCLI takes the strategy by name and by class, and callbacks by class."""
    by_class = {"class_path": "lightning_avgpipe.AvgPipeStrategy", "init_args": {"num_stages": 2}}
    callbacks = [{"class_path": "lightning_avgpipe.AvgPipeTuner"}]
    for strategy in ("avgpipe", by_class):
        options = {"strategy": strategy, "callbacks": callbacks, "accelerator": "cpu", "devices": 1, "logger": False}
        cli = LightningCLI(Net, run=False, save_config_callback=None, args={"trainer": options})
        assert isinstance(cli.trainer.strategy, AvgPipeStrategy)


if __name__ == "__main__":
    if sys.argv[1] == "stages":
        check_callbacks()
        check_command_line()
        used = trained(".", strategy=AvgPipeStrategy(num_stages=2), devices=1)
    else:
        used = trained(".", strategy=sys.argv[1], devices=2)
    assert isinstance(used.strategy, AvgPipeStrategy) and used.strategy.num_stages == 2
    assert not [name for name in sys.modules if name.startswith("lightning.")]
