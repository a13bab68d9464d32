"""Saving of pretrained models whose parts are on several processes, as transformers and peft save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_avgpipe.loading.saving import save
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.utils.lightning import pl


def save_pretrained(
    model: Any,
    folder: str | Path,
    trainer: pl.Trainer | None = None,
    merge: bool = False,
    max_shard_size: int | str = "5GB",
    **kwargs: Any,
) -> None:
    """Write a model of transformers or peft, of which each process holds a part, as ``model.save_pretrained`` would.

    Every process calls it, after training or in a hook. Rank 0 writes safetensors files, a shard at a time, and gets
    the weights of other stages from their processes: no process holds more than its part and a shard. Plain
    ``from_pretrained`` reads the files. Of a model of peft it writes the adapters.

    Without a trainer this process writes alone what it has, and copies the rest from the files that
    :func:`from_pretrained` has found. So adapters that lie in files can be merged where the model does not fit.

    Args:
        model: model with ``save_pretrained``, such as the attribute of your LightningModule; it stays as it is.
        folder: folder to write.
        trainer: trainer whose processes hold the model together; None: this process alone.
        merge: whether to write the whole model with the adapters of peft merged into its weights, as after
            ``merge_and_unload()``; a layer is merged when its shard is written.
        max_shard_size: most bytes of a file, as a number or a size such as ``"500MB"``.
        kwargs: further ones of ``model.save_pretrained``.
    Raises:
        ConfigurationError: the model cannot be written, or an option says who writes what.
        AvgPipeError: rank 0 could not write the files; the other ranks raise it too.
    """
    if not merge and hasattr(model, "get_base_model"):  # peft knows no shards of adapters
        options = kwargs
    else:
        options = {"max_shard_size": max_shard_size, **kwargs}
    if trainer is None:
        save(model, folder, merge=merge, **options)
        return
    strategy = trainer.strategy
    if isinstance(strategy, AvgPipeStrategy):
        strategy.save_pretrained(model, folder, merge=merge, **options)
    else:
        if trainer.is_global_zero:
            save(model, folder, merge=merge, **options)
        strategy.barrier("save_pretrained")
