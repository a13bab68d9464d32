"""Measure how well planned stages are balanced: four uneven models, divided into 2, 3 and 4 stages in four ways.

- plan: by this package, from costs that it measures once;
- layers: an equal number of layers (submodules that a person would list) in each stage;
- parameters: layers, so that the largest number of parameters in a stage is as small as it can be;
- best: of all splits between any two calls of the smallest submodules, the one whose slowest stage is fastest.

All are judged by the time of the slowest stage, forward plus backward of one micro-batch. The costs for this are
medians of further measurements, at the finest granularity, which the plan has not seen.

    python benchmarks/partition.py                  # two to three minutes on two cores
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import parser, table, write
from benchmarks.models import Block
from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import measure
from lightning_avgpipe.planning import Costs, Plan, cut_at
from lightning_avgpipe.planning.balance import gaps
from lightning_avgpipe.planning.costs import Costing
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build

STEP = "training_step"
STAGES, RUNS = (2, 3, 4), 5  # RUNS: measurements whose median judges the splits

# -- models, uneven on purpose ---------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A vocabulary that is large for its width: the embedding has the parameters, the head the time."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int, causal: bool) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def batch(self) -> Any:
        return torch.randint(0, self.vocabulary, (2, self.length)), torch.randint(0, self.vocabulary, (2, self.length))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.around(x))


class ResNet(nn.Module):
    """Early layers have the time (large images), late layers the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)]
        self.layers = nn.ModuleList(Residual(*sizes) for sizes in [*widths, (256, 256, 1)])
        self.head = nn.Linear(256, 1000)

    def batch(self) -> Any:
        return torch.randn(2, 3, 128, 128), torch.randint(0, 1000, (2,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class UNet(nn.Module):
    """Skip connections over the whole length; the time is at both ends, the parameters in the middle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(4)]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b, 2) for a, b in itertools.pairwise(sizes))
        self.middle = Residual(sizes[-1], sizes[-1], 1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes))
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a in sizes[:-1])
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def batch(self) -> Any:
        return torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        skips = [self.enter(images)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = self.middle(skips.pop())
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = F.relu(merge(torch.cat([up(x), skips.pop()], 1)))
        return F.mse_loss(self.leave(x), targets)


MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: Transformer(vocabulary=8000, width=192, layers=6, length=128, causal=False),
    "resnet": ResNet,
    "unet": UNet,
    "gpt": lambda: Transformer(vocabulary=24000, width=128, layers=12, length=64, causal=True),
}

# -- splits ----------------------------------------------------------------------------------------------------------


def leaves(module: nn.Module) -> tuple[str, ...]:
    """The smallest units."""
    units = Divisible(module).units()
    while heavy := [unit for unit in units if Divisible(module).opens(unit)]:
        units = Divisible(module).refine(units, heavy)
    return units


def slowest(cuts: Sequence[int], costs: Costs) -> float:
    """Seconds of the slowest stage, forward plus backward."""
    return max(sum(costs.node[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs.node)]))


def evenest(weights: Sequence[float], positions: Iterable[int], num_stages: int) -> tuple[int, ...]:
    """Return, of all cuts at these positions, tried one by one, those whose heaviest stage is lightest."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    every = np.array(list(itertools.combinations(positions, num_stages - 1)))
    bounds = np.concatenate([np.zeros((len(every), 1), int), every, np.full((len(every), 1), len(weights))], axis=1)
    return tuple(map(int, every[np.diff(sums[bounds], axis=1).max(axis=1).argmin()]))


def begins(plan_or_layers: Sequence[Sequence[str]]) -> list[str]:
    """The first unit of each stage after the first."""
    return [units[0] for units in plan_or_layers[1:]]


def equal_layers(layers: Sequence[str], num_stages: int) -> list[str]:
    """The same number of layers for each stage, as far as possible."""
    return begins([list(part) for part in np.array_split(np.array(layers, dtype=object), num_stages)])


def equal_parameters(module: nn.Module, layers: Sequence[str], num_stages: int) -> list[str]:
    """Layers, so that no stage has more parameters than needed."""
    sizes = [sum(p.numel() for p in module.get_submodule(name).parameters()) for name in layers]
    return [layers[cut] for cut in evenest(sizes, range(1, len(layers)), num_stages)]


# -- measuring -------------------------------------------------------------------------------------------------------


def median_costs(graph: CallGraph, module: Any, args: Sequence[Any]) -> Costs:
    """The median of several independent measurements."""
    found = [measure(graph, module.training_step, args, module) for _ in range(RUNS)]
    return Costs(
        tuple(statistics.median(column) for column in zip(*(costs.forward for costs in found), strict=True)),
        tuple(statistics.median(column) for column in zip(*(costs.backward for costs in found), strict=True)),
        found[0].stash_bytes,
        measured=True,
    )


def compare(name: str) -> list[dict[str, Any]]:
    """All splits of one model; one row for each number of stages."""
    torch.manual_seed(0)
    module = MODELS[name]()
    args = (module.batch(), 0)
    plans: dict[int, Plan] = {}
    seconds: dict[int, float] = {}
    for num_stages in STAGES:
        begin = time.perf_counter()
        planner = Planner(Divisible(module), num_stages, costing=Costing("measured"))
        conditions = Conditions(build("1f1b", num_stages, 4 * num_stages))
        plans[num_stages] = planner.plan(Step(STEP, module.training_step, args), conditions)
        seconds[num_stages] = time.perf_counter() - begin
        print(f"{name}, planned in {seconds[num_stages]:.1f} s:\n{plans[num_stages]}\n", flush=True)
    graph = capture(STEP, module.training_step, args, module, leaves(module))
    costs = median_costs(graph, module, args)
    called = capture(STEP, module.training_step, args, module, Divisible(module).units()).nodes
    layers = list(dict.fromkeys(node.name for node in called if node.kind != "glue"))
    legal = [gap.position for gap in gaps(graph) if gap.obstacle is None]
    rows = []
    for num_stages in STAGES:
        splits = {
            "plan": cut_at(graph, begins([stage.units for stage in plans[num_stages].stages]), num_stages),
            "layers": cut_at(graph, equal_layers(layers, num_stages), num_stages),
            "parameters": cut_at(graph, equal_parameters(module, layers, num_stages), num_stages),
            "best": evenest(costs.node, legal, num_stages),
        }
        row: dict[str, Any] = {"model": name, "stages": num_stages, "even_s": sum(costs.node) / num_stages}
        row |= {f"{kind}_s": slowest(cuts, costs) for kind, cuts in splits.items()}
        row |= {"planned_in_s": seconds[num_stages], "calls": sum(node.kind == "call" for node in graph.nodes)}
        rows.append(row)
    return rows


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of the slowest stage, and how much slower than the best the others are."""
    head = ["model", "stages", "best, ms", "plan / best", "equal layers / best", "equal parameters / best"]
    lines = [
        (row["model"], row["stages"], f"{row['best_s'] * 1e3:.1f}",
         *(f"{row[f'{kind}_s'] / row['best_s']:.2f}" for kind in ("plan", "layers", "parameters")))
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = [row for name in MODELS for row in compare(name)]
    print(compared(rows))
    write(options, rows)


if __name__ == "__main__":
    main()
