"""Count the samples that a training needs to reach a goal when its values travel as bf16 or int8, over full precision.

Three small workloads train on real data, each in one process. Where a hop between two stages would be, the package's
own code compresses and decompresses a layer's outputs and their gradients. Evaluation is in full precision.

    python benchmarks/wire_samples.py                    # ten minutes on two cores
    python benchmarks/wire_samples.py --workloads digits --seeds 1
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.results import Key, Results
from benchmarks.statistical_efficiency import OPTIMIZERS, batches, judge, optimizer, samples_to_goal
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


def train(name: str, steps_by: str, wire: Format | None, seed: int) -> dict[str, int | None]:
    """Train until the goal; ``samples`` are interpolated between evaluations, None if the limit is passed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    workload = WORKLOADS[name]
    (samples, held_out), model = workload.data(), workload.model()
    steps = optimizer(steps_by, model, workload.rates[steps_by])
    source = batches(samples, workload.batch_size, seed)

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

    needed = samples_to_goal(workload, iterate, lambda: judge(workload, model, held_out), len(samples[-1]), _LIMIT)
    return {"samples": needed}


def compared(results: Results, trainings: Sequence[str], seeds: int) -> str:
    """One line per workload and optimizer."""
    rows = []
    for training in trainings:
        full = results.samples(training, "None", seeds)
        cells = []
        for wire in FORMATS:
            ratios = [n / of_full for n, of_full in zip(results.samples(training, wire, seeds), full, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        rows.append((training, f"{statistics.median(full):.0f}", *cells))
    return harness.table(["", "samples in full precision", *FORMATS], rows)


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    arguments.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adam"])
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args()
    trials: dict[Key, tuple[Any, ...]] = {
        (f"{workload}, {steps_by}", None, str(wire), seed): (workload, steps_by, wire, seed)
        for workload in options.workloads for steps_by in options.optimizers for seed in range(options.seeds)
        for wire in (None, *FORMATS)
    }  # fmt: skip
    results = Results(options.json, resume=False)
    results.complete(train, trials)
    print(compared(results, list(dict.fromkeys(training for training, *_ in trials)), options.seeds))


if __name__ == "__main__":
    main()
