"""Updates of progress bars when the number of iterations of an epoch has changed."""

from __future__ import annotations

from lightning_avgpipe.utils.lightning import ProgressBar, RichProgressBar, TQDMProgressBar, convert_inf, pl


def retotal(trainer: pl.Trainer) -> None:
    """Show the trainer's number of batches of the running epoch; a bar of another kind reads it by itself."""
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
