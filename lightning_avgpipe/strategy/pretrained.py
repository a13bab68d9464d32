"""Save pretrained models whose parts are on several processes, in the format of transformers and peft."""

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
    """Write a model of transformers or peft that is divided among processes, as ``model.save_pretrained`` would.

    Every process calls it, after training or in a hook. Rank 0 writes safetensors files, a shard at a time, and gets
    the weights of other stages from their processes, so no process holds more than its part and a shard. The usual
    ``from_pretrained`` reads the files. For a model of peft, the adapters are written.

    Without a trainer, this process writes the weights that it has, and copies the others from the files that
    :func:`from_pretrained` has found. So saved adapters can be merged into a model that does not fit in memory.

    Args:
        model: model with ``save_pretrained``, such as an attribute of your LightningModule; it is not changed.
        folder: folder to write to.
        trainer: trainer whose processes hold the model together; None: this process alone.
        merge: whether to write the whole model with the adapters of peft merged into its weights, as after
            ``merge_and_unload()``; a layer is merged when its shard is written.
        max_shard_size: largest size of a file, as a number of bytes or a size such as ``"500MB"``.
        kwargs: further arguments of ``model.save_pretrained``.
    Raises:
        ConfigurationError: the model cannot be written, or ``kwargs`` chooses what is written and by which process
            (``state_dict``, ``is_main_process``).
        AvgPipeError: rank 0 could not write the files; raised on the other ranks.
    """
    if not merge and hasattr(model, "get_base_model"):  # peft does not divide adapters into shards
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
