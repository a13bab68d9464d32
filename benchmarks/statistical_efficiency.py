"""How many samples does elastic averaging need to reach a goal, beside ordinary training? For three small workloads,
three optimizers, and N = 2 and 4 parallel models:

- single: one model, batch size B; what all others are compared with;
- large: one model, batch size N B;
- elastic: N models with batch size B each around a reference model, ``outer_lr`` 1, the square root of N, and N;
- rolling: the same without a barrier (``--without-barrier``);
- groups: and with each model in a group of its own, which meets the others an iteration late (``--without-barrier``);
- independent: N models that never meet; the mean of their weights is judged.

Each with the learning rate that is best for a single model; single ones, and elastic ones with 1 and N, also with half
of it. Judged is the reference model, or what takes its place, on validation samples; counted are samples, of all models
together, until the loss is down to the goal. They are divided by the median of ``single``: 1.0 means that N models
learn as much from a sample as one does, N that they take N times the epochs. What happens in an iteration does not
depend on pipelines (the tests of the package say so), so the models take turns here in one process, and of the package
only the averaging step is involved.

    python benchmarks/statistical_efficiency.py --json efficiency.json --picture efficiency.png   # about 40 minutes
    python benchmarks/statistical_efficiency.py --workloads digits --seeds 2
    python benchmarks/statistical_efficiency.py --tune   # the single model at other learning rates, see workloads.py
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import WORKLOADS, Samples, Workload
from lightning_avgpipe.averaging.averaging_step import average
from lightning_avgpipe.averaging.staggered import StaggeredAveraging

EVALUATIONS = 8  # in an epoch; of the large data sets, more often
EVERY = 1_000  # samples between evaluations, at most
WITHOUT_BARRIER = ("rolling", "groups")
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


def train(trial: Trial, limit: int) -> int | None:
    """Samples until the goal is reached, interpolated between evaluations; None if that takes more than the limit."""
    torch.set_num_threads(1)
    torch.manual_seed(trial.seed)
    workload = WORKLOADS[trial.workload]
    samples, held_out = workload.data()
    reference = workload.model()
    together = trial.method in ("elastic", "independent", *WITHOUT_BARRIER)
    models = [copy.deepcopy(reference) for _ in range(trial.num_models)] if together else [reference]
    lr = workload.rates[trial.optimizer] * trial.rate
    optimizers = [optimizer(trial.optimizer, model, lr) for model in models]
    alpha = 0.0 if trial.method == "independent" else 1.0 / trial.num_models
    rolls = trial.method in WITHOUT_BARRIER
    staggered = _without_barrier(trial, models, reference, alpha) if rolls else []
    size = workload.batch_size * (trial.num_models if trial.method == "large" else 1)
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
            average([_statistics(model) for model in models], _statistics(reference), 0.0, 1.0, len(models))
        elif together:
            average([_floats(model) for model in models], _floats(reference), alpha, trial.outer_lr, len(models))
        return size * len(models)

    def loss() -> float:
        for one in staggered:
            one.catch_up()
        return judge(workload, reference, held_out)

    return samples_to_goal(workload, iterate, loss, len(samples[-1]), limit)


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
    seen, judged, before = 0, 0, (0, loss())
    while seen < limit:
        seen += iterate(seen)
        if seen - judged >= every:
            judged, now = seen, loss()
            if now <= workload.goal:
                share = (before[1] - workload.goal) / (before[1] - now)
                return round(before[0] + share * (seen - before[0]))
            if not math.isfinite(now):
                return None
            before = (seen, now)
    return None


def _without_barrier(
    trial: Trial, models: Sequence[nn.Module], reference: nn.Module, alpha: float
) -> list[StaggeredAveraging]:
    """Of all models, or of each group."""
    weights = [[p.detach() for p in model.parameters()] for model in models]
    centre = [p.detach() for p in reference.parameters()]
    if trial.method == "rolling":
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
    """Everything but the single model at its best rate, which decides how long the others may take.

    With methods without a barrier: they, and the elastic ones that they are compared with.
    """
    if methods:
        for size in sizes:
            for outer_lr in (1.0, math.sqrt(size), float(size)):
                for method in ("elastic", *methods):
                    yield Trial(workload, name, method, size, outer_lr, 1.0, seed)
        return
    yield Trial(workload, name, "single", 1, 1.0, 0.5, seed)
    for size in sizes:
        yield Trial(workload, name, "large", size, 1.0, 1.0, seed)
        yield Trial(workload, name, "independent", size, 1.0, 1.0, seed)
        yield Trial(workload, name, "elastic", size, math.sqrt(size), 1.0, seed)
        for outer_lr in (1.0, float(size)):
            for rate in (1.0, 0.5):
                yield Trial(workload, name, "elastic", size, outer_lr, rate, seed)


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per trial: its fields, and ``samples``."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        pairs = [(workload, name) for workload in args.workloads for name in args.optimizers]
        singles = {
            pool.submit(train, Trial(*pair, "single", 1, 1.0, 1.0, seed), args.limit): (pair, seed)
            for pair in pairs
            for seed in range(args.seeds)
        }
        found: dict[tuple[str, str], list[int]] = {pair: [] for pair in pairs}
        for done in as_completed(singles):
            pair, seed = singles[done]
            rows.append({**asdict(Trial(*pair, "single", 1, 1.0, 1.0, seed)), "samples": done.result()})
            if done.result() is not None:
                found[pair].append(done.result())
            _say(rows, args.json)
        others = {
            pool.submit(train, trial, round(PATIENCE * statistics.median(found[pair]))): trial
            for pair in pairs
            if found[pair]
            for seed in range(args.seeds)
            for trial in trials(*pair, args.models, seed, args.without_barrier)
        }
        for done in as_completed(others):
            rows.append({**asdict(others[done]), "samples": done.result()})
            _say(rows, args.json)
    return rows


def tune(args: argparse.Namespace) -> str:
    """Samples to the goal of a single model at powers of two around its learning rate: one line per optimizer."""
    powers = range(-3, 4)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = {
            (workload, name): [
                [
                    pool.submit(train, Trial(workload, name, "single", 1, 1.0, 2.0**power, seed), args.limit)
                    for power in powers
                ]
                for seed in range(args.seeds)
            ]
            for workload in args.workloads
            for name in args.optimizers
        }
        lines = [f"{'times':24}" + "".join(f"{2.0**power:>10g}" for power in powers)]
        for (workload, name), seeds in found.items():
            samples = [[run.result() or math.inf for run in seed] for seed in seeds]
            medians = [statistics.median(column) for column in zip(*samples, strict=True)]
            rate = WORKLOADS[workload].rates[name]
            lines.append(f"{f'{workload}, {name} {rate:g}':24}" + "".join(f"{median:>10.0f}" for median in medians))
    return "\n".join(lines)


def _say(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    if path is not None:  # each time, so that a run that is broken off has not been for nothing
        path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    print(f"\r{len(rows)} trainings", end="", file=sys.stderr, flush=True)


def relative(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], list[float]]:
    """(workload, optimizer, label) -> samples of each seed as multiples of the single model's median; inf: given up."""
    grouped: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        trial = Trial(**{key: value for key, value in row.items() if key != "samples"})
        samples = math.inf if row["samples"] is None else float(row["samples"])
        grouped.setdefault((trial.workload, trial.optimizer, trial.label), []).append(samples)
    for (workload, name, label), samples in grouped.items():
        if label != "single":
            unit = statistics.median(grouped[workload, name, "single"])
            grouped[workload, name, label] = [value / unit for value in samples]
    return {key: sorted(value) for key, value in grouped.items() if key[2] != "single"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row per method, a column per workload and optimizer, medians with the range of the seeds."""
    ratios = relative(rows)
    columns = sorted({key[:2] for key in ratios})
    labels = sorted({key[2] for key in ratios}, key=lambda label: (label.split(",")[0], label))
    lines = ["| | " + " | ".join(f"{w}, {o}" for w, o in columns) + " |", "| --- |" + " --- |" * len(columns)]
    for label in labels:
        cells = [_cell(ratios.get((*column, label), [])) for column in columns]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    median = statistics.median(values)
    shown = [f"> {PATIENCE}" if math.isinf(value) else f"{value:.2f}" for value in (median, values[0], values[-1])]
    return f"{shown[0]} ({shown[1]} - {shown[2]})"


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Points: seeds; bars: medians. A panel per workload and optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratios = relative(rows)
    workloads, optimizers = (sorted({key[i] for key in ratios}) for i in (0, 1))
    labels = sorted({key[2] for key in ratios if "lr x" not in key[2]})
    figure, axes = pyplot.subplots(
        len(workloads), len(optimizers), figsize=(4.2 * len(optimizers), 2.6 * len(workloads)), squeeze=False,
        sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    colours = {"large": "#9aa5b1", "independent": "#d9a441", "elastic": "#2f6fb2"}
    for i, workload in enumerate(workloads):
        for j, name in enumerate(optimizers):
            axis = axes[i][j]
            for y, label in enumerate(labels):
                values = [min(value, PATIENCE) for value in ratios.get((workload, name, label), [])]
                if values:
                    axis.barh(y, statistics.median(values), color=colours.get(label.split()[0], "#5fa65a"), height=0.7)
                    axis.plot(values, [y] * len(values), "k.", markersize=4)
            axis.axvline(1.0, color="black", linewidth=0.8)
            axis.set_title(f"{workload}, {name}", fontsize=9)
            axis.set_yticks(range(len(labels)), labels, fontsize=7)
            axis.invert_yaxis()
    figure.supxlabel("samples to the goal, as multiples of a single model's", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--optimizers", nargs="+", choices=("sgd", "momentum", "adam"), default=["sgd", "momentum", "adam"]
    )
    parser.add_argument("--models", nargs="+", type=int, default=[2, 4], help="N")
    parser.add_argument("--without-barrier", nargs="+", choices=WITHOUT_BARRIER, default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time, one thread each")
    parser.add_argument("--limit", type=int, default=40_000, help="samples for a single model, at most")
    parser.add_argument("--json", type=Path, help="write all trainings to this file")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--tune", action="store_true", help="try learning rates on the single model instead")
    args = parser.parse_args()
    if args.tune:
        print(tune(args))
        return
    rows = run_all(args)
    print(f"\nsamples to the goal, as multiples of a single model's: median of {args.seeds} seeds (range)\n")
    print(table(rows))
    if args.picture:
        picture(rows, args.picture)


if __name__ == "__main__":
    main()
