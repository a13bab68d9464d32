"""Count the samples that elastic averaging needs to reach a goal, compared with ordinary training.

Three small workloads are trained with three optimizers, and with N = 2 and 4 parallel models:

- single: one model, batch size B; all others are compared with it;
- large: one model, batch size N B;
- elastic: N models with batch size B each around a reference model, ``outer_lr`` 1, the square root of N, and N;
- rolling: elastic without a barrier (``--without-barrier``);
- groups: rolling, with each model in a group of its own, which meets the others an iteration late
  (``--without-barrier``);
- split: rolling models that divide each batch, with batch size B / N each, ``outer_lr`` 1 and ``alpha`` 1
  (``--without-barrier``);
- independent: N models that never meet; the mean of their weights is judged.

Each has the learning rate that is best for a single model. The reference model, or what takes its place, is judged on
validation samples. The samples of all models together are counted until the loss is down to the goal, and divided by
the median of ``single``: 1.0 means that N models learn as much from a sample as one does, and N that they take N times
the epochs. What happens in an iteration does not depend on pipelines (the tests of the package say so). So the models
take turns in one process, and only the averaging step of the package is used.

    python benchmarks/statistical_efficiency.py --picture docs/statistical_efficiency.png   # about 40 minutes
    python benchmarks/statistical_efficiency.py --without-barrier rolling groups --workloads digits pairs --seeds 2
    python benchmarks/statistical_efficiency.py --without-barrier split
    python benchmarks/statistical_efficiency.py --tune   # the single model at other learning rates, see workloads.py

With ``--json`` each training is in the file as soon as it is done, and a later run goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.goal import reached
from benchmarks.results import Key, Results
from benchmarks.workloads import WORKLOADS, Samples, Workload
from lightning_avgpipe.averaging.averaging_step import AveragingStep
from lightning_avgpipe.averaging.staggered import StaggeredAveraging

OPTIMIZERS = ("sgd", "momentum", "adam")
LIMIT = 40_000  # samples for a single model, at most
EVALUATIONS = 8  # in an epoch; of the large data sets, more often
EVERY = 1_000  # samples between evaluations, at most
WITHOUT_BARRIER = ("rolling", "groups", "split")
PATIENCE = 5  # times the samples of the single model, after which a training is given up


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        method: "single", "large", "elastic", "independent", or one of those without a barrier.
        num_models: N.
        outer_lr: of the elastic ones.
        rate: learning rate as a multiple of the workload's.
    """

    workload: str
    optimizer: str
    method: str
    num_models: int
    outer_lr: float
    rate: float
    seed: int

    @property
    def label(self) -> str:
        """Method and its numbers, without workload, optimizer and seed."""
        name = self.method if self.method == "single" else f"{self.method} N={self.num_models}"
        outer = f", outer_lr={self.outer_lr:.3g}" if self.method in ("elastic", *WITHOUT_BARRIER) else ""
        return f"{name}{outer}{'' if self.rate == 1 else f', lr x {self.rate:g}'}"

    @property
    def training(self) -> str:
        """Workload and optimizer."""
        return f"{self.workload}, {self.optimizer}"

    @property
    def key(self) -> Key:
        """The key of its record."""
        return self.training, None, self.label, self.seed


def optimizer(name: str, model: nn.Module, lr: float, looks_ahead: bool = False) -> Optimizer:
    """Return an optimizer of all parameters by its name.

    Args:
        name: "sgd", "momentum", "adam" or "adamw".
        model: model with the parameters.
        lr: learning rate.
        looks_ahead: whether it is that of AsyncPP (arXiv:2505.01099): Nesterov's, with a momentum of 0.99, and for
            momentum a learning rate under which a gradient moves the weights as far in all as with 0.9.
    """
    parameters = model.parameters()
    if name in ("adam", "adamw"):
        if looks_ahead:
            decay = 0.01 if name == "adamw" else 0.0
            return NAdam(parameters, lr, (0.99, 0.999), weight_decay=decay, decoupled_weight_decay=True)
        return AdamW(parameters, lr) if name == "adamw" else Adam(parameters, lr)
    if looks_ahead:
        return SGD(parameters, lr / 10, momentum=0.99, nesterov=True)
    return SGD(parameters, lr, momentum=0.9 if name == "momentum" else 0.0)


def batches(samples: Samples, size: int, seed: int) -> Iterator[Samples]:
    """Whole batches without end, in a new order every epoch."""
    random = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(samples[-1]), generator=random).split(size):
            if len(chosen) == size:
                yield tuple(tensor[chosen] for tensor in samples)


def train(trial: Trial, limit: int) -> dict[str, Any]:
    """Train until the goal; ``samples`` are interpolated between evaluations, None if the limit is passed."""
    torch.set_num_threads(1)
    torch.manual_seed(trial.seed)
    workload = WORKLOADS[trial.workload]
    samples, held_out = workload.data()
    reference = workload.model()
    together = trial.method in ("elastic", "independent", *WITHOUT_BARRIER)
    models = [copy.deepcopy(reference) for _ in range(trial.num_models)] if together else [reference]
    lr = workload.rates[trial.optimizer] * trial.rate
    optimizers = [optimizer(trial.optimizer, model, lr) for model in models]
    alpha = {"independent": 0.0, "split": 1.0}.get(trial.method, 1.0 / trial.num_models)
    rolls = trial.method in WITHOUT_BARRIER
    staggered = _without_barrier(trial, models, reference, alpha) if rolls else []
    count = trial.num_models
    size = {"large": count * workload.batch_size, "split": workload.batch_size // count}.get(
        trial.method, workload.batch_size
    )
    source = batches(samples, size, trial.seed)

    def iterate(seen: int) -> int:
        for n, (model, steps) in enumerate(zip(models, optimizers, strict=True)):
            *inputs, targets = next(source)
            model.train()
            steps.zero_grad()
            workload.loss(model(*inputs), targets).backward()
            steps.step()
            if staggered:  # the next model's iteration began before, where its last one ended
                staggered[n % len(staggered)].end(n // len(staggered))
        if staggered:
            AveragingStep([_statistics(model) for model in models], _statistics(reference), len(models)).end(0.0, 1.0)
        elif together:
            step = AveragingStep([_floats(model) for model in models], _floats(reference), len(models))
            step.end(alpha, trial.outer_lr)
        return size * len(models)

    def loss() -> float:
        for one in staggered:
            one.add_pending_sums()
        return judge(workload, reference, held_out)

    needed = samples_to_goal(workload, iterate, loss, len(samples[-1]), limit)
    return {"samples": needed, "torch": torch.__version__}


def samples_to_goal(
    workload: Workload, iterate: Callable[[int], int], loss: Callable[[], float], epoch: int, limit: int
) -> int | None:
    """Train until the goal is reached, and return the samples, interpolated between evaluations.

    Args:
        workload: training with the goal.
        iterate: function of the samples so far that trains an iteration, and returns the number of its samples.
        loss: function that returns the loss on validation samples.
        epoch: number of samples of an epoch.
        limit: largest number of samples; None is returned if the goal takes more, or the loss is not finite.
    """
    every = min(EVERY, epoch // EVALUATIONS)
    seen, curve = 0, [(0, loss())]
    while seen < limit and workload.goal < curve[-1][1] < math.inf:
        seen += iterate(seen)
        if seen - curve[-1][0] >= every:
            curve.append((seen, loss()))
    needed = reached(curve, workload.goal)
    return None if needed is None else round(needed)


def _without_barrier(
    trial: Trial, models: Sequence[nn.Module], reference: nn.Module, alpha: float
) -> list[StaggeredAveraging]:
    """Of all models, or of each group."""
    weights = [[p.detach() for p in model.parameters()] for model in models]
    centre = [p.detach() for p in reference.parameters()]
    if trial.method != "groups":
        return [StaggeredAveraging(weights, centre, alpha, trial.outer_lr)]
    sums: dict[int, list[Tensor]] = {}
    centres = [centre, *([tensor.clone() for tensor in centre] for _ in weights[1:])]
    return [
        StaggeredAveraging([own], of_group, alpha, trial.outer_lr, _InTurns(sums, len(models)))  # type: ignore[arg-type]
        for own, of_group in zip(weights, centres, strict=True)
    ]


class _InTurns:
    """Stands for what connects a group to the others, where all take turns in one process.

    Args:
        sums: of all groups, by number.
        count: of groups.
    """

    def __init__(self, sums: dict[int, list[Tensor]], count: int) -> None:
        self.count, self._sums, self._number = count, sums, -1

    def begin_sum(self, tensors: list[Tensor]) -> Callable[[], None]:
        """What is returned puts the sum into the tensors; it is called when all groups have begun."""
        self._number += 1
        total = self._sums.setdefault(self._number, [torch.zeros_like(tensor) for tensor in tensors])
        self._sums.pop(self._number - 2, None)  # which all have
        torch._foreach_add_(total, tensors)
        return lambda: torch._foreach_copy_(tensors, total)


def _floats(model: nn.Module) -> list[Tensor]:
    """What is averaged: parameters, and statistics such as those of batch normalisation."""
    tensors = (*model.parameters(), *model.buffers())
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def _statistics(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def judge(workload: Workload, model: nn.Module, samples: Samples) -> float:
    """The loss on validation samples."""
    model.eval()
    *inputs, targets = samples
    return workload.loss(model(*inputs), targets).item()


# -- all trials --------------------------------------------------------------------------------------------------------


def trials(workload: str, name: str, sizes: Sequence[int], seed: int, methods: Sequence[str]) -> Iterator[Trial]:
    """Everything but the single model, which decides how long the others may take.

    With methods without a barrier: they, and the elastic ones that they are compared with. Models that divide batches
    are compared with the single one.
    """
    averaged = [method for method in methods if method != "split"]
    for size in sizes:
        for method in ("elastic", *averaged) if averaged or not methods else ():
            for outer_lr in (1.0, math.sqrt(size), float(size)):
                yield Trial(workload, name, method, size, outer_lr, 1.0, seed)
        if "split" in methods:
            yield Trial(workload, name, "split", size, 1.0, 1.0, seed)
        for method in () if methods else ("large", "independent"):
            yield Trial(workload, name, method, size, 1.0, 1.0, seed)


def train_all(results: Results, singles: Sequence[Trial], others: Sequence[Trial]) -> None:
    """Train what the results do not have: single models, then others, up to a multiple of the samples of those."""
    results.complete(train, {trial.key: (trial, LIMIT) for trial in singles})
    needed: dict[str, list[int]] = {}
    for trial in singles:
        found = (results.find(*trial.key) or {})["samples"]
        needed.setdefault(trial.training, []).extend([] if found is None else [found])
    results.complete(
        train,
        {
            trial.key: (trial, round(PATIENCE * statistics.median(needed[trial.training])))
            for trial in others
            if needed[trial.training]
        },
    )


def tune(results: Results, options: argparse.Namespace) -> str:
    """Samples to the goal of a single model at powers of two around its learning rate: one line per optimizer."""
    rates = [2.0**power for power in range(-3, 4)]
    lines = []
    for workload in options.workloads:
        for name in OPTIMIZERS:
            trials = [Trial(workload, name, "single", 1, 1.0, r, seed) for r in rates for seed in range(options.seeds)]
            results.complete(train, {trial.key: (trial, LIMIT) for trial in trials})
            labels = dict.fromkeys(trial.label for trial in trials)
            samples = (results.samples(trials[0].training, label, options.seeds) for label in labels)
            medians = (f"{statistics.median(each):.0f}" for each in samples)
            lines.append((f"{workload}, {name} {WORKLOADS[workload].rates[name]:g}", *medians))
    return harness.table(["times", *rates], lines)


def relative(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """(training, label) -> samples of each seed as multiples of the single model's median; inf: given up."""
    grouped: dict[tuple[str, str], list[float]] = {}
    for record in records:
        samples = math.inf if record["samples"] is None else float(record["samples"])
        grouped.setdefault((record["workload"], record["system"]), []).append(samples)
    units = {
        training: statistics.median(samples) for (training, label), samples in grouped.items() if label == "single"
    }
    return {
        (training, label): sorted(value / units[training] for value in samples)
        for (training, label), samples in grouped.items()
        if label != "single"
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row per method, a column per training, medians with the range of the seeds."""
    ratios = relative(records)
    columns = sorted({training for training, _ in ratios})
    labels = sorted({label for _, label in ratios}, key=lambda label: (label.split(",")[0], label))
    rows = [(label, *(_cell(ratios.get((column, label), [])) for column in columns)) for label in labels]
    return harness.table(["", *columns], rows)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    median = statistics.median(values)
    shown = [f"> {PATIENCE}" if math.isinf(value) else f"{value:.2f}" for value in (median, values[0], values[-1])]
    return f"{shown[0]} ({shown[1]} - {shown[2]})"


def picture(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Points: seeds; bars: medians. A panel per training."""
    panels: dict[str, dict[str, list[float]]] = {}
    for (training, label), values in sorted(relative(records).items()):
        panels.setdefault(training, {})[label] = [min(value, PATIENCE) for value in values]
    columns = len({training.split(", ")[1] for training in panels})
    colours = {"large": "#9aa5b1", "independent": "#d9a441", "elastic": "#2f6fb2"}
    what = "samples to the goal, as multiples of a single model's"
    harness.bars(panels, columns, what, path, lambda label: colours.get(label.split()[0], "#5fa65a"))


def main() -> None:
    arguments = harness.parser(__doc__, quick="one training, two models, one seed")
    arguments.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    arguments.add_argument("--models", nargs="+", type=int, default=[2, 4], help="N")
    arguments.add_argument("--without-barrier", nargs="+", choices=WITHOUT_BARRIER, default=[])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--picture", type=Path)
    arguments.add_argument("--tune", action="store_true", help="try learning rates on the single model instead")
    options = arguments.parse_args()
    optimizers: Sequence[str] = OPTIMIZERS
    if options.quick:
        options.workloads, options.models, options.seeds, optimizers = ["digits"], [2], 1, ["adam"]
    results = Results(options.json, resume=True)
    if options.tune:
        print(tune(results, options))
        return
    seeded = [(w, name, seed) for w in options.workloads for name in optimizers for seed in range(options.seeds)]
    singles = [Trial(workload, name, "single", 1, 1.0, 1.0, seed) for workload, name, seed in seeded]
    others = [t for w, name, seed in seeded for t in trials(w, name, options.models, seed, options.without_barrier)]
    train_all(results, singles, others)
    print(f"samples to the goal, as multiples of a single model's: median of {options.seeds} seeds (range)\n")
    print(table(results.records))
    if options.picture:
        picture(results.records, options.picture)


if __name__ == "__main__":
    main()
