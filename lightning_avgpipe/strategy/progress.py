"""Progress bars that were begun learn how many iterations their epoch has by now."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf


def retotal(trainer: pl.Trainer) -> None:
    """Show the trainer's number of batches of the epoch that runs; a bar of another kind asks when it likes."""
    for bar in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(bar, ProgressBar) and bar._trainer is not None:
            _show(bar)


def _show(bar: ProgressBar) -> None:
    total = bar.total_train_batches
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        bar.train_progress_bar.total = convert_inf(total)
        bar.train_progress_bar.refresh()
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, total=total)
