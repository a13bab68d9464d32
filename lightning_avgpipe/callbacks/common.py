"""Helpers of callbacks: they find the strategy, and write files and pictures to any file system of Lightning."""

from __future__ import annotations

import os
from typing import Any

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import picture
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.utils.lightning import TensorBoardLogger, WandbLogger, get_filesystem, pl, refuse_other


def pipeline_strategy(trainer: pl.Trainer, does: str) -> AvgPipeStrategy:
    """Return the strategy of a trainer, which a callback needs.

    Args:
        trainer: trainer that has the callback.
        does: name of the callback and a verb whose object is a pipeline, for the message.
    Raises:
        ConfigurationError: the trainer is of Lightning's other package, or has another strategy.
    """
    refuse_other("The Trainer", trainer)
    if not isinstance(trainer.strategy, AvgPipeStrategy):
        raise ConfigurationError(
            f"{does} a pipeline, but the strategy is {type(trainer.strategy).__name__}; use "
            "Trainer(strategy='avgpipe'), or remove the callback"
        )
    return trainer.strategy


def write(folder: str | os.PathLike[str], name: str, content: str | bytes) -> str:
    """Write a file, which may exist already, and return its path.

    Args:
        folder: path of a folder, or a URL such as ``s3://bucket/run``; it is created if it does not exist.
        name: name of the file.
        content: text or bytes.
    """
    folder = os.fspath(folder)
    path, files = f"{folder.rstrip('/')}/{name}", get_filesystem(folder)
    files.makedirs(folder, exist_ok=True)
    with files.open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def publish(trainer: pl.Trainer, folder: str | os.PathLike[str], name: str, figure: Any, tag: str) -> None:
    """Write a figure to a PNG file, and show it in TensorBoard and Weights & Biases under a tag."""
    write(folder, name, picture.png(figure))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, picture.pixels(figure), trainer.global_step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [picture.pixels(figure)], trainer.global_step)
