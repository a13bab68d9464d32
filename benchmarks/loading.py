"""Measure the memory and time that a process takes to load its stages of a model from files.

Writes a random Llama to files in bfloat16, and validates it on the CPU in two processes or more, in the given dtype.
It is read in two ways: by transformers, where every process begins with the whole model, and by
``lightning_avgpipe.from_pretrained``.

Prints MiB above what the process held before the model was built, without pages of mapped files. ``share`` is what the
process holds in the end, ``largest`` its largest tensor. ``build`` and ``fill`` are seconds. ``once`` are the seconds
in which one process reads and keeps all of the files.

    python benchmarks/loading.py --megabytes 1000 --processes 2 --dtype float32
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import harness
from benchmarks.harness import MIB, Resident, launch, quiet_trainer, table

LAYER_MIB = 24.0  # of the weights of a layer in bfloat16
COLUMNS = ("share", "largest", "peak", "build", "fill", "once")


def write(folder: str, megabytes: int) -> None:
    """Write a model of so many MiB to files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_attention_heads=8,
        num_hidden_layers=max(2, round(megabytes / LAYER_MIB)),
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="200MB")


class Loaded(L.LightningModule):
    """A language model that is read from files."""

    def __init__(self, folder: str, stagewise: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.folder, self.stagewise, self.asked, self.build_s = folder, stagewise, dtype, 0.0
        self.model: Any = None

    def configure_model(self) -> None:
        """Read, or left to be read by stages."""
        from transformers import LlamaForCausalLM

        from lightning_avgpipe import from_pretrained

        if self.model is not None:
            return
        began = time.perf_counter()
        if self.stagewise:
            self.model = from_pretrained(LlamaForCausalLM, self.folder, dtype=self.asked)
        else:
            self.model = LlamaForCausalLM.from_pretrained(self.folder, dtype=self.asked)
        self.build_s = time.perf_counter() - began

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """One loss."""
        self.log("loss", self.model(input_ids=batch, labels=batch).loss)


class Look(L.Callback):
    """Sees the tensors that a process has, in MiB."""

    held: tuple[float, ...] = ()

    def on_validation_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """After each batch."""
        self.held = tuple(p.nbytes / MIB for p in module.parameters() if not p.is_meta)


def measure(processes: int, folder: str, stagewise: bool, dtype: torch.dtype) -> dict[str, float]:
    """Run one process, and return its figures."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_avgpipe import AvgPipeStrategy
    from lightning_avgpipe.weights.on_demand import OnDemandGather

    small = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(small)(torch.zeros(1, 4, dtype=torch.long))  # libraries are loaded before the first reading
    fill, seconds = OnDemandGather.fill, [0.0]

    def timed(gather: OnDemandGather, wanted: Any) -> None:
        began = time.perf_counter()
        fill(gather, wanted)
        seconds[0] += time.perf_counter() - began

    OnDemandGather.fill = timed  # type: ignore[method-assign]
    resident = Resident()
    look = Look()
    trainer = quiet_trainer(devices=processes, strategy=AvgPipeStrategy(num_microbatches=2), callbacks=[look])
    model = Loaded(folder, stagewise, dtype)
    trainer.validate(model, DataLoader(torch.randint(0, 64, (4, 16)), batch_size=2), verbose=False)
    return {
        "share": sum(look.held), "largest": max(look.held), "peak": resident.peak(), "build": model.build_s,
        "fill": seconds[0],
    }  # fmt: skip


def once(folder: str) -> float:
    """Seconds in which one process reads all files, and keeps what it reads."""
    from safetensors.torch import load_file

    began = time.perf_counter()
    kept = [{k: v.clone() for k, v in load_file(path).items()} for path in sorted(Path(folder).glob("*.safetensors"))]
    assert kept
    return time.perf_counter() - began


def main() -> None:
    """Measure both ways and print a table."""
    arguments = harness.parser(__doc__)
    arguments.add_argument("--megabytes", type=int, default=1000, help="size of the files in MiB")
    arguments.add_argument("--processes", type=int, default=2, help="number of processes, and of stages")
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model")
    options = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(folder, options.megabytes)
        for name, stagewise in (("transformers", False), ("from_pretrained", True)):
            seconds, given = once(folder), (options.processes, folder, stagewise, getattr(torch, options.dtype))
            for rank, found in enumerate(launch(measure, given, options.processes)):
                numbers = {**found, "once": seconds}
                shown = (f"{numbers[column]:.{0 if numbers[column] > 20 else 2}f}" for column in COLUMNS)
                rows.append((name, rank, *shown, f"{found['peak'] / found['share']:.2f}"))
    print(table(["read by", "rank", *COLUMNS, "peak/share"], rows))
    harness.write(options, rows)


if __name__ == "__main__":
    main()
