"""Files and pictures that callbacks write, to any file system to which Lightning saves checkpoints."""

from __future__ import annotations

import os
from typing import Any

from lightning_avgpipe.schedule import picture
from lightning_avgpipe.utils.lightning import TensorBoardLogger, WandbLogger, get_filesystem, pl


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
