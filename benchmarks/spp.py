"""Compare plans for unequal links: SPP's, PipeDream's, equal layers, balanced pipelines and ddp; and time the planning.

    python benchmarks/spp.py                              # as root: a quarter of an hour on a quiet machine
    python benchmarks/spp.py --quick --parts networks --picture docs/replicas.png    # an iteration of SPP's plan there
    python benchmarks/spp.py --parts replicas planning    # and ddp on free links; planning times: no root needed

Four processes train with a Trainer. A unit sleeps for each sample in the place of computing, so that four devices have
room on two cores. Messages, all-reduces and everything around them are real. All plans of a network take turns in the
same processes. Predictions know only the measured times of one unit and the rates of links.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pipedream
from benchmarks.harness import Clock, launch, parser, quiet_trainer, table, write
from benchmarks.models import Sleep
from lightning_avgpipe import AvgPipeStrategy, PipelineTimeline
from lightning_avgpipe.comm.probe import measure_bandwidth
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.schedule import BACKWARD, FORWARD, build, with_replicas
from lightning_avgpipe.systems.spp.partition import plan
from lightning_avgpipe.systems.spp.placement import plan_in_turns, seconds_in_turns
from lightning_avgpipe.systems.spp.problem import Network, PlacedStage, Problem
from lightning_avgpipe.training.gradient_sums import BUCKET_BYTES

PARTS = ["networks", "replicas", "planning"]
DEVICES = 4
UNITS = 8
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of a unit, for each sample
MESSAGE_BYTES = 400_000  # of a sample
PARAMETER_BYTES = 1_000_000  # of a unit
MICROBATCHES = 8
ADVANCE = 1  # of all schedules, so that no step tries another
_BYTES_PER_S = 1e6 / 8  # of a megabit per second
_TRIALS = 20  # of a unit
_EDGE = 2  # steps that are not counted: the first makes the plan
_HIDDEN, _LAYERS = 1024, 4  # of the model that really computes


@dataclass(frozen=True)
class Setting:
    """A network of four devices.

    Attributes:
        megabits: per second from each rank to each other one.
        widths: of PipeDream's levels, and their megabits.
        slow: rank of a device that takes twice as long; -1: none.
    """

    megabits: list[list[int]]
    widths: tuple[tuple[int, int], ...]
    slow: int = -1


def _rates(fast: Any) -> list[list[int]]:
    return [[1000 if fast(u, v) else 100 for v in range(DEVICES)] for u in range(DEVICES)]


SETTINGS = {
    "two pairs": Setting(_rates(lambda u, v: u // 2 == v // 2), ((2, 1000), (2, 100))),
    "ring": Setting(_rates(lambda u, v: (u - v) % DEVICES in (1, DEVICES - 1)), ((4, 100),)),
    "slow device": Setting(_rates(lambda u, v: True), ((4, 1000),), slow=3),
}


def costs(forward_s: float = FORWARD_S, backward_s: float = BACKWARD_S) -> UnitCosts:
    """Of the sleeping model, with these times of a unit."""
    between = (float(MESSAGE_BYTES),) * (UNITS - 1)
    times = (forward_s,) * UNITS, (backward_s,) * UNITS
    return UnitCosts(*times, between, between, (float(PARAMETER_BYTES),) * UNITS)


def bandwidth(setting: Setting) -> list[list[float]]:
    """Bytes per second."""
    return [[rate * _BYTES_PER_S for rate in row] for row in setting.megabits]


# -- plans of a network ----------------------------------------------------------------------------------------------


def by_counts(ends: Sequence[int], replicas: Sequence[int]) -> dict[str, Any]:
    """Options of a plan: its stages begin at these units but for the first, and have so many replicas."""
    points = [f"units.{end}" for end in ends]
    shared = {"replicas": list(replicas)} if max(replicas) > 1 else {"num_stages": len(replicas)}
    return {"split_points": points or None, "costs": "flops", **shared}


def strategies(setting: Setting) -> dict[str, dict[str, Any]]:
    """Name of a plan -> options of the strategy; of ddp none."""
    widths, rates = zip(*setting.widths, strict=True)
    stages = pipedream.plan(costs(), widths, [rate * _BYTES_PER_S for rate in rates]).stages
    return {
        "spp": {"planner": "spp", "replicas": "auto"},
        "pipedream": by_counts([first for first, _, _ in stages[1:]], [count for _, _, count in stages]),
        "equal layers": by_counts(range(UNITS // DEVICES, UNITS, UNITS // DEVICES), [1] * DEVICES),
        "straight, balanced": {"num_stages": DEVICES},
        "replicas=4": {"num_stages": 1, "replicas": DEVICES},
        "ddp": {},
    }


def predicted_s(
    setting: Setting, known: UnitCosts, begins: Sequence[int], ranks: Sequence[Sequence[int]], of_ddp: bool
) -> float:
    """Seconds of an iteration as the simulator has it, in turns; whole replicas are a stage with as many."""
    order = [rank for of_stage in ranks for rank in of_stage]
    network = Network.of(bandwidth(setting), rings=True).ordered(order)
    slowness = tuple(2.0 if rank == setting.slow else 1.0 for rank in order)
    if of_ddp:  # it has a first bucket, of the last unit, which it all-reduces while it computes, and one of the others
        known = replace(known, parameter_bytes=(*known.parameter_bytes[:-1], 0.0))
    problem = Problem(known, network, MICROBATCHES, slowness, math.inf if of_ddp else BUCKET_BYTES)
    firsts = [sum(map(len, ranks[:k])) for k in range(len(ranks) + 1)]
    ends = [*begins[1:], UNITS]
    stages = [PlacedStage(begins[k], ends[k], firsts[k], firsts[k + 1]) for k in range(len(ranks))]
    made = build("advance_forward", len(ranks), MICROBATCHES, ADVANCE)
    return seconds_in_turns(problem, stages, with_replicas(made, [stage.replicas for stage in stages]))


# -- in a process ----------------------------------------------------------------------------------------------------


class Unit(nn.Module):
    """Sleeps a while for each sample, in both directions, and has parameters to all-reduce."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETER_BYTES // 4))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        times = {FORWARD: FORWARD_S * len(x) * self.factor, BACKWARD: BACKWARD_S * len(x) * self.factor}
        return Sleep.apply(x + self.weight.mean(), times)


def measured() -> UnitCosts:
    """Of the sleeping model: one unit with one sample, alone."""
    unit, times = Unit(1.0), list[tuple[float, float]]()
    for _ in range(_TRIALS):
        x = torch.ones(1, MESSAGE_BYTES // 4, requires_grad=True)
        begin = time.perf_counter()
        y = unit(x)
        middle = time.perf_counter()
        y.backward(torch.ones_like(y))
        times.append((middle - begin, time.perf_counter() - middle))
    return costs(*map(statistics.median, zip(*times, strict=True)))


class Sleeping(L.LightningModule):
    """Units one after the other."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.units = nn.Sequential(*(Unit(factor) for _ in range(UNITS)))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.units(x.expand(-1, MESSAGE_BYTES // 4)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Computing(L.LightningModule):
    """Matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(_LAYERS) for m in (nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh())))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.layers(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(
    model: L.LightningModule, batches: Tensor, batch_size: int, strategy: Any, callbacks: Sequence[L.Callback] = ()
) -> float:
    """Train on the batches; return the median of the seconds of a step."""
    clock = Clock()
    trainer = quiet_trainer(
        strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), callbacks=[clock, *callbacks]
    )  # fmt: skip
    trainer.fit(model, DataLoader(batches, batch_size))  # type: ignore[arg-type]
    return statistics.median(clock.seconds(_EDGE))


def on_network(setting: Setting, steps: int, rounds: int, pictures: str) -> dict[str, Any]:
    """Each plan, measured and predicted; and the measured links. Into a folder, the last iteration of SPP's plan."""
    rank, found = int(os.environ["RANK"]), dict[str, Any]()
    known = costs() if rank else measured()
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, options in strategies(setting).items():
            whole = options.get("num_stages") == 1 or not options  # copies, each with a part of the batch
            strategy: Any = "ddp"
            if options:
                count = 1 if whole else MICROBATCHES
                strategy = AvgPipeStrategy(
                    num_microbatches=count, advance=ADVANCE, costs_cache=None, timeout=120, **options
                )
            batches = torch.ones((steps + _EDGE) * MICROBATCHES, 1)
            model = Sleeping(2.0 if rank == setting.slow else 1.0)
            draws = [PipelineTimeline(steps + _EDGE, pictures)] if pictures and name == "spp" else []
            size = MICROBATCHES // DEVICES if whole else MICROBATCHES
            seconds.setdefault(name, []).append(fit(model, batches, size, strategy, draws))
            if name in found:
                continue
            if name == "spp":
                links = measure_bandwidth(strategy.cluster.group)
            begins, ranks = [0], [list(range(DEVICES))]
            if not whole:
                begins += [int(stage.units[0].split(".")[1]) for stage in strategy.plan.stages[1:]]
                ranks = [list(strategy.cluster.stage_map.ranks(k)) for k in range(len(begins))]
            expected_s = predicted_s(setting, known, begins, ranks, of_ddp=not options)
            found[name] = {"begins": begins, "ranks": ranks, "predicted_s": expected_s}
    for name, times in seconds.items():
        found[name]["seconds"] = statistics.median(times)
    return {"plans": found, "links": links}


def beside_ddp(steps: int, rounds: int) -> dict[str, Any]:
    """Equal replicas of one stage, and ddp: the same numbers, and seconds of a step round by round."""
    torch.manual_seed(1)
    batches, found, weights = torch.randn(64 * steps * 2, _HIDDEN), dict[str, list[float]](), dict[str, Any]()
    for number in range(rounds):
        sides: dict[str, Any] = {"replicas=2": AvgPipeStrategy(replicas=2, num_microbatches=1), "ddp": "ddp"}
        for name in sorted(sides, reverse=bool(number % 2)):
            torch.manual_seed(5)
            model = Computing()
            found.setdefault(name, []).append(fit(model, batches, 64, sides[name]))
            weights[name] = [p.detach().clone() for p in model.parameters()]
    apart = max(float((a - b).abs().max()) for a, b in zip(*weights.values(), strict=True))
    ratios = [ours / theirs for ours, theirs in zip(found["replicas=2"], found["ddp"], strict=True)]
    return {"seconds": found, "ratio": statistics.median(ratios), "largest_difference": apart}


# -- tables ----------------------------------------------------------------------------------------------------------


def planning(units: Sequence[int], devices: Sequence[int]) -> list[dict[str, Any]]:
    """Seconds of the processor for plans of random units on nodes of eight devices."""
    rows = []
    for length in units:
        for count in devices:
            draw = random.Random(0)

            def some(number: int, most: float, draw: random.Random = draw) -> tuple[float, ...]:
                return tuple(draw.uniform(0.1, most) for _ in range(number))

            given = UnitCosts(
                some(length, 1), some(length, 2), some(length - 1, 3), some(length - 1, 3), some(length, 8)
            )
            nodes = [[8.0 if u // 8 == v // 8 else 2.0 for v in range(count)] for u in range(count)]
            taken = []
            for planner in (plan, plan_in_turns):
                begin = time.process_time()
                planner(given, nodes, 32)
                taken.append(time.process_time() - begin)
            rows.append({"units": length, "devices": count, "spp_s": taken[0], "in_turns_s": taken[1]})
            print(f"{length:5d} units on {count:2d} devices: {taken[0]:6.2f} s, in turns {taken[1]:6.2f} s", flush=True)
    return rows


def show(name: str, found: dict[str, Any]) -> None:
    """Print a network."""
    setting, plans = SETTINGS[name], found["plans"]
    best = min(entry["seconds"] for entry in plans.values())
    rows = []
    for title, entry in plans.items():
        stages = "; ".join(
            f"{b}- @{','.join(map(str, r))}" for b, r in zip(entry["begins"], entry["ranks"], strict=True)
        )
        took, said = entry["seconds"], entry["predicted_s"]
        rows.append((title, f"{took:.3f}", f"{said:.3f}", f"{took / said - 1:+.1%}", f"{took / best:.2f}x", stages))
    head = [f"{name}: seconds of an iteration", "measured", "predicted", "off", "over the best", "stages"]
    print(f"\n{table(head, rows)}\n")
    off = [
        found["links"][u][v] / speed - 1
        for u, row in enumerate(bandwidth(setting))
        for v, speed in enumerate(row)
        if u != v
    ]
    print(f"links measured at {min(off):+.1%} to {max(off):+.1%} of their rates")


def main() -> None:
    arguments = parser(__doc__, quick="one network, few steps")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--picture", type=Path, help="of an iteration of SPP's plan on the first network")
    options = arguments.parse_args()
    result: dict[str, Any] = {}
    names, steps, rounds = (list(SETTINGS)[:1], 2, 1) if options.quick else (list(SETTINGS), 5, 2)
    if "networks" in options.parts:
        for name in names:
            with tempfile.TemporaryDirectory() as pictures:
                drawn = pictures if options.picture and name == names[0] else ""
                given = SETTINGS[name], steps, rounds, drawn
                result[name] = launch(on_network, given, DEVICES, SETTINGS[name].megabits)[0]
                for path in Path(pictures).glob("*.png"):
                    shutil.copyfile(path, options.picture)
            show(name, result[name])
    if "replicas" in options.parts:
        found = result["replicas"] = launch(beside_ddp, (10 * steps, 2 * rounds + 1), 2)[0]
        print(f"\nreplicas=2 over ddp on free links: {found['ratio']:.3f} of its time, weights apart by at most "
              f"{found['largest_difference']:.1e}")  # fmt: skip
    if "planning" in options.parts:
        print("\nseconds of the processor to plan")
        result["planning"] = planning((12, 100, 1000), (4, 16) if options.quick else (4, 16, 64))
    write(options, result)


if __name__ == "__main__":
    main()
