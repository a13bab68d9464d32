"""How many samples a training needs to reach a goal when its values travel as bf16 or as int8, over as they are.

Three small workloads on real data, each in one process with what a hop between two stages does: a
layer's outputs, and their gradients, are compressed and decompressed by the package's own code. Judged in full
precision, as evaluation is.

    python benchmarks/wire_samples.py                    # ten minutes on two cores
    python benchmarks/wire_samples.py --workloads digits --seeds 1
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import write
from benchmarks.statistical_efficiency import batches, judge, optimizer, samples_to_goal
from benchmarks.workloads import WORKLOADS
from lightning_avgpipe.capture.wire_format import FORMATS, Format
from lightning_avgpipe.comm.message import Message, compressed, decompressed
from lightning_avgpipe.utils.random_streams import RandomKey

CUTS = {"language": "blocks.0", "digits": "3", "pairs": "layers.1"}  # the layer whose outputs travel
_LIMIT = 400_000  # samples, after which a training is given up


class _Hop(torch.autograd.Function):
    """What a hop does to values on their way forth, and to gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Format | None, key: RandomKey) -> Tensor:
        ctx.wire, ctx.key = wire, key
        return _travelled(x, wire, key, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _travelled(gradients[0], ctx.wire, ctx.key, "backward"), None, None


def _travelled(tensor: Tensor, wire: Format | None, key: RandomKey, name: str) -> Tensor:
    arrived = decompressed(compressed(Message(0, (tensor.clone(),)), wire, key, name)).tensors[0]
    assert arrived is not None
    return arrived


def samples(trial: tuple[str, str, Format | None, int]) -> int | None:
    """Samples until the goal is reached, interpolated between evaluations; None if that takes more than the limit."""
    name, steps_by, wire, seed = trial
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    workload = WORKLOADS[name]
    (train, held_out), model = workload.data(), workload.model()
    steps = optimizer(steps_by, model, workload.rates[steps_by])
    source = batches(train, workload.batch_size, seed)

    def iterate(seen: int) -> int:
        def hop(layer: nn.Module, given: Any, x: Tensor) -> Tensor:
            hopped: Tensor = _Hop.apply(x, wire, RandomKey(seed, seen))
            return hopped

        *inputs, targets = next(source)
        model.train()
        steps.zero_grad()
        handle = model.get_submodule(CUTS[name]).register_forward_hook(hop)
        workload.loss(model(*inputs), targets).backward()
        handle.remove()
        steps.step()
        return workload.batch_size

    return samples_to_goal(workload, iterate, lambda: judge(workload, model, held_out), len(train[-1]), _LIMIT)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per workload and optimizer."""
    lines = ["workload  optimizer        None" + "".join(f"  {wire:>22s}" for wire in FORMATS)]
    found = {(r["workload"], r["optimizer"], r["wire"], r["seed"]): r["samples"] for r in rows}
    seeds = sorted({row["seed"] for row in rows})
    for key in dict.fromkeys((row["workload"], row["optimizer"]) for row in rows):
        full = [found[*key, None, seed] or math.inf for seed in seeds]
        line = f"{key[0]:9s} {key[1]:9s} {statistics.median(full):11.0f}"
        for wire in FORMATS:
            ratios = [(found[*key, wire, seed] or math.inf) / n for n, seed in zip(full, seeds, strict=True)]
            line += f"  {statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--optimizers", nargs="+", choices=["sgd", "momentum", "adam"], default=["adam"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trials = [
        (workload, steps_by, wire, seed)
        for workload in options.workloads for steps_by in options.optimizers for seed in range(options.seeds)
        for wire in (None, *FORMATS)
    ]  # fmt: skip
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = list(pool.map(samples, trials))
    names = ("workload", "optimizer", "wire", "seed")
    rows = [dict(zip(names, trial, strict=True)) | {"samples": n} for trial, n in zip(trials, found, strict=True)]
    print(table(rows))
    write(options, rows)


if __name__ == "__main__":
    main()
