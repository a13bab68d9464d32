"""Compare the speed of the engine with torch.distributed.pipelining and with the simulator.

The same model and batch run in two processes in each of

- this engine, with the schedules afab, 1f1b and advance_forward, from the model's unchanged training_step;
- torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B), from stage modules that are written by hand;
- the simulator, which gives a bound: it knows the times of the hand-written stages, measured anew in every round with
  both processes at work, and the times of the links.

In one process, a stage is also compared with the hand-written one: forward and backward of a micro-batch, first
followed, then as the mean over 8 micro-batches, of which one is followed and 7 are repeated. ``--parts compiled`` does
so with compiled units, for which a C++ compiler works for minutes first.

    python benchmarks/engine.py                          # two to four minutes on two cores; limited links need root
    python benchmarks/engine.py --parts replay

All sides take turns in the same processes, round by round. A ratio is the median of the ratios of the rounds, so that
what disturbs the machine for longer than a round disturbs all sides alike. One thread per process.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import check_equal, connected, in_turns, launch, parser, table, write
from benchmarks.models import SIZES, HandWritten, LanguageModel, Size, begin, by_hand, example, loss_of, make_model
from benchmarks.one_pipeline import STEP, OnePipeline, TorchPipeline
from benchmarks.partition import leaves
from benchmarks.stages_alone import StagesAlone, thread_seconds
from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.tracer import intercepting, uncompiled
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.execution import Compiler, Execution
from lightning_avgpipe.engine.microbatch import split
from lightning_avgpipe.planning import cut_at
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import StageCosts, build, first_advance, simulate, uneven_steps

NUM_STAGES = 2
ROUNDS, REPLAY_ROUNDS = 7, 30  # of all sides in two processes, and in one
MEGABITS = 100  # per second, of the limited links
PARTS = ["replay", "compiled", "free", "limited"]  # two in one process; in two on free links, and on limited ones
_PROBES = 7
_CLOSE = 1e-4  # relative; losses of two engines that add in another order

# -- one process: replay beside the hand-written stage ---------------------------------------------------------------


def replay_overhead(
    size: Size, fine: bool, rounds: int, num_microbatches: int = 1, compiled: bool = False
) -> list[dict[str, Any]]:
    """A row per stage; CPU seconds of this thread for a forward and a backward, medians over rounds.

    Args:
        fine: whether every leaf is a unit, or the planner chooses the units for this cut.
        num_microbatches: of an iteration; only the first one is followed.
        compiled: whether units are compiled.
    """
    model, batch = make_model(size), example(size, 1)
    alone = replaying(model, batch, f"blocks.{size.layers // 2}", fine, compiled, num_microbatches)
    with intercepting(), nullcontext() if compiled else uncompiled():  # as an iteration does
        alone.forward()
        hidden = alone.hidden(1)
        gradient = torch.randn_like(hidden)
        rows = []
        for stage, given, other, sent in ((0, batch[0], gradient, gradient), (1, hidden, batch[1], None)):
            written = HandWritten(by_hand(model, stage), stage == 1)
            sides: dict[str, Callable[[], None]] = {
                "replayed": partial(alone.iterate, stage, sent),
                "written": partial(repeated, written, given, other, num_microbatches),
            }
            seconds = thread_seconds(model, sides, rounds, warming=2)
            ratios = (a / b for a, b in zip(seconds["replayed"], seconds["written"], strict=True))
            medians = {f"{side}_s": statistics.median(seconds[side]) / num_microbatches for side in sides}
            rows.append({"stage": stage, **medians, "overhead": statistics.median(ratios) - 1})
        return rows


def repeated(written: HandWritten, given: Tensor, other: Tensor, times: int) -> None:
    """Several micro-batches by hand."""
    for _ in range(times):
        written(given, other)


def replaying(
    model: LanguageModel, batch: tuple[Tensor, Tensor], split_point: str, fine: bool, compiled: bool,
    num_microbatches: int,
) -> StagesAlone:  # fmt: skip
    """Both stages of the model, in this process."""
    units = leaves(model)
    graph = capture(STEP, model.training_step, (batch, 0), model, units)
    cut = cut_at(graph, [split_point], NUM_STAGES)
    if not fine:  # the planner closes again what the cut does not divide
        plan = Planner(Divisible(model), NUM_STAGES, [split_point]).plan(
            Step(STEP, model.training_step, (batch, 0)), Conditions(build("1f1b", NUM_STAGES, num_microbatches)), units
        )
        graph, cut = plan.graph, plan.cuts
    execution = Execution(compiler=Compiler({}) if compiled else None)
    return StagesAlone(model, batch, graph, cut, execution, num_microbatches)


# -- two processes ---------------------------------------------------------------------------------------------------


class Costs:
    """The times of the hand-written stage of this process, without any engine, and of the links."""

    def __init__(self, size: Size, cluster: Cluster) -> None:
        self.cluster = cluster
        self.model = make_model(size)
        (stage,) = cluster.stages
        self.written = HandWritten(by_hand(self.model, stage), stage > 0)
        self.hidden = torch.randn(size.samples, size.length, size.width)
        self.link_s: list[float] = []

    def run(self, batch: tuple[Tensor, Tensor], num_microbatches: int) -> tuple[float, float]:
        """As many micro-batches as in an iteration; medians of the seconds of a forward and of a backward."""
        tokens, targets = (part.tensor_split(num_microbatches) for part in batch)
        last = self.written.is_last
        given = [(self.hidden, y) if last else (x, self.hidden) for x, y in zip(tokens, targets, strict=True)]
        forward, backward = zip(*(self.written(*pair) for pair in given), strict=True)
        return statistics.median(forward), statistics.median(backward)

    def probe(self) -> None:
        """Time of one boundary value on a link, there and back, beside nothing else."""
        for _ in range(_PROBES):
            self.cluster.group.barrier()
            before = time.perf_counter()
            for sender in range(NUM_STAGES):
                if self.cluster.rank == sender:
                    dist.send(self.hidden, 1 - sender)
                else:
                    dist.recv(torch.empty_like(self.hidden), sender)
            self.link_s.append((time.perf_counter() - before) / 2)


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """In each process: seconds of each side in each round, and what the simulator makes of the costs."""
    with connected() as cluster:
        return measured(cluster, size, rounds)


def measured(cluster: Cluster, size: Size, rounds: int) -> dict[str, Any]:
    """Return the same, on every rank."""
    batch, written, costs = example(size, size.num_microbatches), make_model(size), Costs(size, cluster)
    parts = split(batch, size.num_microbatches)
    engine = OnePipeline(
        cluster, make_model(size), [f"blocks.{size.layers // 2}"], [(part.data, 0) for part in parts],
        lambda i, loss: loss * parts[i].weight,
    )  # fmt: skip
    own = {cluster.rank: by_hand(written, cluster.rank)}
    models = (engine.model, written, costs.model)
    costs.probe()
    probed = _stage_costs(cluster, costs, costs.run(batch, size.num_microbatches))
    advance = first_advance(uneven_steps(probed), size.num_microbatches, probed)
    names = ["afab", "1f1b", *(["advance_forward"] if advance else [])]  # 0 would be 1f1b

    def iterate(name: str) -> list[Tensor]:
        """Run an iteration of this engine, which begins with the whole batch, as torch's do."""
        engine.args = [(part.data, 0) for part in split(batch, size.num_microbatches)]
        return engine.run(build(name, NUM_STAGES, size.num_microbatches, advance))

    sides: dict[str, Callable[[], list[Tensor]]] = {f"avgpipe {name}": partial(iterate, name) for name in names}
    for name, peer in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        sides[f"torch {name}"] = partial(TorchPipeline(cluster, peer, own, size.num_microbatches, loss_of).run, *batch)
    kinds = {side: {"gpipe": "afab"}.get(side.split()[1], side.split()[1]) for side in sides}
    order_of = {side: build(kind, NUM_STAGES, size.num_microbatches, advance) for side, kind in kinds.items()}
    for model in models:
        model.eval()  # without dropout all compute the same
    losses = {name: _gathered(cluster, side()) for name, side in sides.items()}
    check_equal(losses, _CLOSE)
    for model in models:
        model.train()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    units: list[tuple[float, float]] = []
    for name in in_turns([*sides, "costs"], rounds):
        for model in models:
            begin(model)
        # the strategy keeps this on while it trains
        with intercepting() if name.startswith("avgpipe") else nullcontext():
            cluster.group.barrier()  # also before the costs: both processes compute then, as they do in an iteration
            if name == "costs":
                units.append(costs.run(batch, size.num_microbatches))
                continue
            before, cpu = time.perf_counter(), time.process_time()
            sides[name]()
            times[name].append((time.perf_counter() - before, time.process_time() - cpu))
    gathered = _from_all(cluster, times)
    bounds = [_stage_costs(cluster, costs, unit) for unit in units]
    return {
        "advance": advance,
        "costs": [{"forward_s": x.forward_s, "backward_s": x.backward_s, "send_s": x.send_forward_s} for x in bounds],
        "bounds_s": {name: [simulate(rows, x).iteration_s for x in bounds] for name, rows in order_of.items()},
        # all processes begin together, so the iteration ends with the last of them
        "seconds": {name: [max(t[name][i][0] for t in gathered) for i in range(rounds)] for name in sides},
        "cpu_s": {name: [sum(t[name][i][1] for t in gathered) for i in range(rounds)] for name in sides},
    }


def _gathered(cluster: Cluster, losses: list[Tensor]) -> list[float]:
    found: list[list[float]] = _from_all(cluster, [float(loss.detach()) for loss in losses])
    return next(values for values in found if values)


def _from_all(cluster: Cluster, item: Any) -> Any:
    """What every process has, by rank, known to all."""
    return cluster.group.broadcast(cluster.group.gather_objects(item))


def _stage_costs(cluster: Cluster, costs: Costs, unit: tuple[float, float]) -> StageCosts:
    """Of all stages, given the seconds of a forward and of a backward in this process."""
    found = _from_all(cluster, (unit, min(costs.link_s)))
    by_stage = [found[cluster.stage_map.owner(stage)] for stage in range(NUM_STAGES)]
    send = [max(link for _, link in found)]
    return StageCosts([unit[0] for unit, _ in by_stage], [unit[1] for unit, _ in by_stage], send, send, [0.0])


# -- the parent ------------------------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A row per side: median, and the medians over rounds of how much faster than the peers it was."""
    seconds: dict[str, list[float]] = result["seconds"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((name for name in medians if name.startswith("torch")), key=medians.__getitem__)
    rows = []
    for name, values in seconds.items():
        row = {
            "side": name,
            "median_s": medians[name],
            "cpu_s": statistics.median(result["cpu_s"][name]),
            "over_best_peer": statistics.median(b / a for a, b in zip(values, seconds[best], strict=True)),
            "of_bound": statistics.median(a / b for a, b in zip(values, result["bounds_s"][name], strict=True)),
        }
        rows.append(row)
    return {"best_peer": best, "rows": rows}


def timed(found: dict[str, Any]) -> str:
    """One line per side."""
    head = ["side", "median", "CPU of both", f"over {found['best_peer']}", "of its bound"]
    return table(
        head,
        [
            (row["side"], f"{row['median_s']:.3f} s", f"{row['cpu_s']:.3f} s", f"{row['over_best_peer']:.3f}x",
             f"{row['of_bound']:.3f}")
            for row in found["rows"]
        ],
    )  # fmt: skip


def replayed(sizes: Sequence[str], units: str, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Measure each model with units that are "planned", "leaves" or "compiled", in iterations of so many micro-batches.

    Prints one line per stage; CPU time of a micro-batch, forward and backward.
    """
    rows = [
        {"size": size, "units": units, "of": count, **row}
        for size in sizes
        for count in counts
        for row in replay_overhead(SIZES[size], units == "leaves", rounds, count, units == "compiled")
    ]
    lines = [
        (*(row[name] for name in ("size", "units", "of", "stage")),
         *(f"{row[name] * 1e3:.2f} ms" for name in ("written_s", "replayed_s")),
         f"{(row['replayed_s'] - row['written_s']) * 1e3:.2f} ms", f"{row['overhead']:+.1%}")
        for row in rows
    ]  # fmt: skip
    head = ["model", "units", "micro-batches", "stage", "by hand", "ours", "more", "overhead"]
    print(f"CPU time per micro-batch in one process\n{table(head, lines)}\n", flush=True)
    return rows


def main() -> None:
    arguments = parser(__doc__, quick="the small model, and few rounds")
    arguments.add_argument("--parts", choices=PARTS, nargs="+", default=[part for part in PARTS if part != "compiled"])
    options = arguments.parse_args()
    sizes, rounds, replays = (["small"], 2, 3) if options.quick else ([*SIZES], ROUNDS, REPLAY_ROUNDS)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "replay" in options.parts:
        found["replay"] = [row for units in ("planned", "leaves") for row in replayed(sizes, units, (1, 8), replays)]
    if "compiled" in options.parts:
        found["compiled"] = replayed(sizes, "compiled", (1,), replays)
    for part, megabits in (("free", None), ("limited", MEGABITS)):
        if part in options.parts:
            result = launch(measure, (SIZES[sizes[0]], rounds), NUM_STAGES, megabits)[0]
            found[part] = {"megabits": megabits, **result, **summary(result)}
            print(f"{part} links, two processes, {sizes[0]} model\n{timed(found[part])}\n", flush=True)
    write(options, found)


if __name__ == "__main__":
    main()
