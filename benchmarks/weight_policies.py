"""Measure what old gradients cost in samples and gain in time: weight policies and rolling pipelines, and a drain.

    python benchmarks/weight_policies.py --json policies.json --picture docs/weight_policies.png --resume   # goes on
    python benchmarks/weight_policies.py --quick                                  # where it was: some twelve minutes
    python benchmarks/weight_policies.py --parts samples --microbatches 1 --optimizer adamw   # gradients 3 updates old

Time to the goal is the product of two measurements of a Trainer's run. Both have four stages, and as many micro-batches
in a batch, or ``--microbatches``:

- time: seconds per batch with a process for each stage, links of a limited rate and sleeps in place of compute, as in
  ``trained.py``; the simulator's time is printed as well;
- samples: how many a training needs until its loss on validation data is down to a goal, with the optimizer and its
  best learning rate of ``workloads.py``; medians of the seeds, as multiples of ``flush``. All stages are in one
  process, since what a run computes does not depend on processes and timing.

The sides are

- ``flush``: 1F1B with a drain after each batch;
- ``advance``: the same weights in the order of advance forward propagation;
- ``pipeoptim, no repeat``: ``PipeOptim(exact_backward=False)``;
- ``nesterov``: ``stash`` with the optimizer of AsyncPP, which looks ahead (``optimizer`` of
  ``statistical_efficiency.py``);
- ``rolling``: two models are trained, and their reference is judged.

Each measurement is in the results file as soon as it is made.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, trained
from benchmarks.goal import UntilGoal, reached
from benchmarks.harness import quiet_trainer
from benchmarks.results import Key, Results
from benchmarks.statistical_efficiency import LIMIT, batches, judge, optimizer
from benchmarks.workloads import WORKLOADS, Samples, Workload
from lightning_avgpipe import Averaging, AvgPipeStrategy, PipeOptim

STAGES = 4
PATIENCE = 6  # times the samples of flush, after which a training is given up
EVERY = 160  # samples between evaluations
PARTS = ["time", "samples"]

SIDES: dict[str, dict[str, Any]] = {
    "flush": {"schedule": "1f1b"},
    "advance": {"advance": 1},
    "stash": {"weight_policy": "stash"},
    "nesterov": {"weight_policy": "stash"},
    "none": {"weight_policy": "none"},
    "2bw": {"weight_policy": "2bw"},
    "spectrain": {"weight_policy": "spectrain"},
    "pipeoptim": {"weight_policy": "pipeoptim"},
    "pipeoptim, no repeat": {"weight_policy": PipeOptim(exact_backward=False)},
    "rolling N=2": {"num_pipelines": 2, "averaging": Averaging(rolling=True), "advance": 1},
}


# -- samples to the goal -----------------------------------------------------------------------------------------------


class _Model(L.LightningModule):
    """A workload's."""

    def __init__(self, workload: Workload, kind: str, looks_ahead: bool) -> None:
        super().__init__()
        self.net = workload.model()
        self.workload, self.kind, self.looks_ahead = workload, kind, looks_ahead

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, targets = batch
        return self.workload.loss(self.net(*inputs), targets)

    def configure_optimizers(self) -> Any:
        return optimizer(self.kind, self, self.workload.rates[self.kind.removesuffix("w")], self.looks_ahead)


class _Batches(IterableDataset):  # type: ignore[type-arg]
    """Without end."""

    def __init__(self, samples: Samples, size: int, seed: int) -> None:
        self.made = functools.partial(batches, samples, size, seed)

    def __iter__(self) -> Iterator[Any]:
        return self.made()


def train(side: str, workload: str, kind: str, microbatches: int, seed: int, limit: int) -> dict[str, Any]:
    """Train until the goal; ``samples`` are those that it took, None if more than the limit are needed."""
    harness.be_quiet()
    torch.manual_seed(seed)
    goal = WORKLOADS[workload]
    samples, held_out = goal.data()
    size = goal.batch_size * SIDES[side].get("num_pipelines", 1)  # of an iteration

    def loss(module: Any) -> float:
        found = judge(goal, module.net, held_out)
        module.net.train()
        return found

    until = UntilGoal(goal.goal, loss, EVERY // size, limit / size)
    strategy = AvgPipeStrategy(num_stages=STAGES, num_microbatches=microbatches, costs="flops", **SIDES[side])
    trainer = quiet_trainer(strategy=strategy, devices=1, callbacks=[until])
    data = DataLoader(_Batches(samples, goal.batch_size, seed), batch_size=None)
    trainer.fit(_Model(goal, kind, side == "nesterov"), data)
    batches_needed = reached(until.curve, goal.goal)
    needed = None if batches_needed is None else round(size * batches_needed)
    return {"samples": needed, "limit": limit, "torch": torch.__version__}


def measure_samples(results: Results, sides: Sequence[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Of each side, by seed."""
    what = f"{options.workload}, {options.optimizer}, {options.microbatches} micro-batches"
    common = options.workload, options.optimizer, options.microbatches

    def complete(sides: Sequence[str], limit: int) -> None:
        trials: dict[Key, tuple[Any, ...]] = {
            (what, None, side, seed): (side, *common, seed, limit) for side in sides for seed in range(options.seeds)
        }
        results.complete(train, trials)

    complete(["flush"], LIMIT)
    limit = round(PATIENCE * statistics.median(results.samples(what, "flush", options.seeds)))
    complete([side for side in sides if side not in ("flush", "advance")], limit)
    # advance has the same weights, bit for bit
    same = {side: "flush" if side == "advance" else side for side in sides}
    return {side: results.samples(what, system, options.seeds) for side, system in same.items()}


def main() -> None:
    arguments = harness.parser(__doc__, quick="one seed, one link, one short round")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--workload", choices=WORKLOADS, default="digits")
    arguments.add_argument("--optimizer", choices=("momentum", "adam", "adamw"), default="momentum")
    arguments.add_argument("--microbatches", type=int, default=STAGES, help="M; 2bw needs as many as there are stages")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--resume", action="store_true", help="measure what the results file does not have")
    arguments.add_argument("--picture", type=Path)
    options = arguments.parse_args()
    costs = trained.Costs(STAGES, options.microbatches, 20.0, 40.0, 250_000, 28)
    links, rounds = [100, 1000], 3
    if options.quick:
        options.seeds, links, rounds = 1, [100], 1
        costs = trained.Costs(STAGES, options.microbatches, 10.0, 20.0, 60_000, 12)
    # with fewer micro-batches 2bw would need more versions
    sides = [side for side in SIDES if side != "2bw" or options.microbatches >= STAGES]
    results = Results(options.json, options.resume)
    strategies = {side: SIDES[side] for side in sides}
    seconds = trained.medians(results, costs, links, strategies, rounds) if "time" in options.parts else {}
    title = f"{options.workload}, {options.optimizer}"
    samples = {title: measure_samples(results, sides, options)} if "samples" in options.parts else {}
    print(f"{STAGES} stages, {options.microbatches} micro-batches\n\n{trained.compared(seconds, samples, 'flush')}")
    times = {
        what: {side: [1 / max(ratio, 1 / PATIENCE) for ratio in each] for side, each in of_sides.items()}
        for what, of_sides in trained.sooner(seconds, samples, "flush").items()
    }
    if options.picture is not None and times:
        label = "time to the goal, as a multiple of that of flush; points: seeds"
        harness.bars(times, len(times), label, options.picture)


if __name__ == "__main__":
    main()
