"""How fast is the engine? The same model, batch and two processes for each of

- this engine, with the schedules afab, 1f1b and advance_forward, from the model's unchanged training_step;
- torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B), from stage modules that are written by hand;
- the simulator, which is given this run's own times of those hand-written stages, measured anew in every round with
  both processes at work, and of the links: a bound.

And in one process: a stage beside the hand-written one, forward and backward of a micro-batch, once followed and once
as the mean over an iteration of 8, of which one is followed and 7 are repeated; with ``--parts compiled`` also with its
units compiled, where a C++ compiler works for minutes first.

    python benchmarks/engine.py                          # two to four minutes on two cores; limited links need root
    python benchmarks/engine.py --json engine.json
    python benchmarks/engine.py --parts replay

All sides take turns in the same processes, round by round, and a ratio is the median of the ratios of the rounds: what
disturbs the machine for longer than a round disturbs all sides alike. One thread per process.
"""

from __future__ import annotations

import argparse
import json
import os
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import network
from benchmarks.harness import TIMEOUT, add_options, connected, in_turns, launch, loaded, write
from benchmarks.models import SIZES, HandWritten, LanguageModel, Size, begin, by_hand, example, loss_of, make_model
from benchmarks.partition import leaves
from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.tracer import intercepting, uncompiled
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.execution import Compiler, Execution
from lightning_avgpipe.engine.microbatch import split
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import cut_at
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Action,
    Schedule,
    StageCosts,
    build,
    first_advance,
    simulate,
    uneven_steps,
)
from lightning_avgpipe.utils.random_streams import RandomKey
from lightning_avgpipe.weights.tied import TiedParameters

NUM_STAGES = 2
STEP = "training_step"
PARTS = ["replay", "compiled", "free", "limited"]  # two in one process; in two on free links, and on limited ones
_DEFAULT = ["replay", "free", "limited"]
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
    first, last = replaying(model, batch, f"blocks.{size.layers // 2}", fine, compiled)
    several = range(num_microbatches)
    task = Task(
        lambda i, *args: model.training_step(*args), [(batch, 0) for _ in several], lambda i, loss: loss,
        around=lambda i: nullcontext(),
    )  # fmt: skip
    with intercepting(), nullcontext() if compiled else uncompiled():  # as an iteration does
        received = [first.perform(Action(FORWARD, i), task, None) for i in several]
        first.clear()
        assert received[0] is not None
        hidden = received[0].tensors[0]
        assert hidden is not None
        gradient = torch.randn_like(hidden)
        gradients = [Message(i, (gradient,)) for i in several]

        def replay(stage: Stage, values: Sequence[Message | None], gradients: Sequence[Message | None]) -> None:
            stage.begin(())
            for i in several:
                stage.perform(Action(FORWARD, i), task, values[i])
                stage.perform(Action(BACKWARD, i), task, gradients[i])
            stage.clear()

        nothing = [None for _ in several]
        sides = (
            (partial(replay, first, nothing, gradients), HandWritten(by_hand(model, 0), False), batch[0], gradient),
            (partial(replay, last, received, nothing), HandWritten(by_hand(model, 1), True), hidden, batch[1]),
        )
        return [
            {"stage": stage, **compared(model, ours, partial(repeated, written, x, y, num_microbatches), rounds,
                                        num_microbatches)}
            for stage, (ours, written, x, y) in enumerate(sides)
        ]  # fmt: skip


def repeated(written: HandWritten, given: Tensor, other: Tensor, times: int) -> None:
    """Several micro-batches by hand."""
    for _ in range(times):
        written(given, other)


def replaying(
    model: LanguageModel, batch: tuple[Tensor, Tensor], split_point: str, fine: bool, compiled: bool
) -> tuple[Stage, Stage]:
    """Both stages of the model, in this process."""
    units = leaves(model)
    graph = capture(STEP, model.training_step, (batch, 0), model, units)
    cut = cut_at(graph, [split_point], NUM_STAGES)
    if not fine:  # the planner closes again what the cut does not divide
        plan = Planner(Divisible(model), NUM_STAGES, [split_point]).plan(
            Step(STEP, model.training_step, (batch, 0)), units
        )
        graph, cut = plan.graph, plan.cuts
    device = torch.device("cpu")
    process = Process(0, device, TIMEOUT.total_seconds(), ProcessGroups(0, device, TIMEOUT))
    cluster = Cluster(StageMap(NUM_STAGES), process)
    execution = Execution(compiler=Compiler({}) if compiled else None)
    first, last = (
        Stage(program, model, cluster.device, TiedParameters(model, cluster, {}), execution)
        for program in stage_programs(graph, cut)
    )
    return first, last


def compared(
    model: LanguageModel, replayed: Callable[[], Any], written: Callable[[], Any], rounds: int, num_microbatches: int
) -> dict[str, float]:
    """Both in turns, seconds of a micro-batch; the first two rounds do not count."""
    seconds: dict[Any, list[float]] = {replayed: [], written: []}
    for i in range(rounds + 2):
        for side in (replayed, written) if i % 2 else (written, replayed):
            begin(model)
            before = time.thread_time()
            side()
            if i >= 2:
                seconds[side].append((time.thread_time() - before) / num_microbatches)
    overhead = statistics.median(a / b for a, b in zip(seconds[replayed], seconds[written], strict=True)) - 1
    replayed_s, written_s = (statistics.median(seconds[side]) for side in (replayed, written))
    return {"replayed_s": replayed_s, "written_s": written_s, "overhead": overhead,
            "difference_s": replayed_s - written_s}  # fmt: skip


# -- two processes ---------------------------------------------------------------------------------------------------


class Engine:
    """This engine in one of the processes."""

    def __init__(self, size: Size, cluster: Cluster) -> None:
        self.model = make_model(size)
        self.cluster = cluster
        self.num_microbatches = size.num_microbatches
        self.pipeline, _ = loaded(cluster, self.model, [f"blocks.{size.layers // 2}"], (example(size, 1), 0))
        self.iterations = 0

    def run(self, schedule: str, advance: int, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """One iteration; the losses of the micro-batches where the last stage is."""
        parts = split(batch, self.num_microbatches)
        self.iterations += 1
        task = Task(
            lambda i, *args: self.model.training_step(*args),
            [(part.data, 0) for part in parts],
            lambda i, loss: loss * parts[i].weight,
            RandomKey(0, self.iterations),
            around=lambda i: nullcontext(),  # operations are repeated, as in training
        )
        rows = build(schedule, NUM_STAGES, self.num_microbatches, advance)
        return run_together([self.pipeline], STEP, [rows], [task])[0].results or []


class Peer:
    """torch.distributed.pipelining in one of the processes."""

    def __init__(self, size: Size, cluster: Cluster) -> None:
        self.model = make_model(size)
        self.stage = cluster.rank
        module = by_hand(self.model, self.stage)
        self.schedules = {
            name: schedule(
                PipelineStage(module, self.stage, NUM_STAGES, cluster.device), size.num_microbatches, loss_fn=loss_of
            )
            for name, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B))
        }

    def run(self, name: str, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """One iteration; the losses of the micro-batches where the last stage is."""
        losses: list[Tensor] = []
        if self.stage == 0:
            self.schedules[name].step(batch[0])
        else:
            self.schedules[name].step(target=batch[1], losses=losses, return_outputs=False)
        return losses


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


def work(options: argparse.Namespace) -> None:
    """What each process does; rank 0 writes the results."""
    with connected() as cluster:
        result = measure(cluster, SIZES[options.size], options.rounds)
    if cluster.rank == 0:
        options.result.write_text(json.dumps(result))


def measure(cluster: Cluster, size: Size, rounds: int) -> dict[str, Any]:
    """Seconds of each side in each round, and what the simulator makes of the costs."""
    batch = example(size, size.num_microbatches)
    engine, peer, costs = Engine(size, cluster), Peer(size, cluster), Costs(size, cluster)
    models = (engine.model, peer.model, costs.model)
    costs.probe()
    probed = _stage_costs(cluster, costs, [costs.run(batch, size.num_microbatches)])
    advance = first_advance(uneven_steps(probed), size.num_microbatches, probed)
    sides: dict[str, Callable[[], list[Tensor]]] = {
        "avgpipe afab": partial(engine.run, "afab", 0, batch),
        "avgpipe 1f1b": partial(engine.run, "1f1b", 0, batch),
        "torch gpipe": partial(peer.run, "gpipe", batch),
        "torch 1f1b": partial(peer.run, "1f1b", batch),
    }
    if advance:  # 0 would be 1f1b
        sides["avgpipe advance_forward"] = partial(engine.run, "advance_forward", advance, batch)
    for model in models:
        model.eval()  # without dropout all compute the same
    losses = {name: _gathered(cluster, side()) for name, side in sides.items()}
    _compare(losses)
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
    bounds = [_stage_costs(cluster, costs, [unit]) for unit in units]
    schedules = {name: _schedule_of(name, advance, size.num_microbatches) for name in sides}
    return {
        "advance": advance,
        "costs": [{"forward_s": x.forward_s, "backward_s": x.backward_s, "send_s": x.send_forward_s} for x in bounds],
        "bounds_s": {name: [simulate(rows, x).iteration_s for x in bounds] for name, rows in schedules.items()},
        # all processes begin together, so the iteration ends with the last of them
        "seconds": {name: [max(t[name][i][0] for t in gathered) for i in range(rounds)] for name in sides},
        "cpu_s": {name: [sum(t[name][i][1] for t in gathered) for i in range(rounds)] for name in sides},
    }


def _schedule_of(side: str, advance: int, num_microbatches: int) -> Schedule:
    name = {"gpipe": "afab"}.get(side.split()[1], side.split()[1])
    return build(name, NUM_STAGES, num_microbatches, advance)


def _gathered(cluster: Cluster, losses: list[Tensor]) -> list[float]:
    found: list[list[float]] = _from_all(cluster, [float(loss.detach()) for loss in losses])
    return next(values for values in found if values)


def _from_all(cluster: Cluster, item: Any) -> Any:
    """What every process has, by rank, known to all."""
    return cluster.group.broadcast(cluster.group.gather_objects(item))


def _compare(losses: dict[str, list[float]]) -> None:
    name, wanted = next(iter(losses.items()))
    for other, found in losses.items():
        if len(found) != len(wanted) or any(abs(a - b) > _CLOSE * abs(b) for a, b in zip(found, wanted, strict=True)):
            raise SystemExit(f"{other} and {name} do not compute the same: losses {found} and {wanted}")


def _stage_costs(cluster: Cluster, costs: Costs, units: Sequence[tuple[float, float]]) -> StageCosts:
    """The least of these rounds, in each process."""
    mine = min(f for f, _ in units), min(b for _, b in units)
    found = _from_all(cluster, (mine, min(costs.link_s)))
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


def table(found: dict[str, Any]) -> str:
    """One line per side."""
    lines = [f"side                        median    CPU both   over {found['best_peer']}   of its bound"]
    for row in found["rows"]:
        lines.append(
            f"{row['side']:24s} {row['median_s']:7.3f} s {row['cpu_s']:9.3f} s {row['over_best_peer']:15.3f}x"
            f"{row['of_bound']:14.3f}"
        )
    return "\n".join(lines)


def replay_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per stage; CPU time of a micro-batch, forward and backward."""
    lines = ["model  units    of   stage   by hand     ours        more      overhead"]
    for row in rows:
        lines.append(
            f"{row['size']:6s} {row['units']:8s} {row['of']:2d} {row['stage']:4d}   {row['written_s'] * 1e3:9.2f} ms "
            f"{row['replayed_s'] * 1e3:9.2f} ms {row['difference_s'] * 1e3:7.2f} ms {row['overhead']:+8.1%}"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--size", choices=list(SIZES), default="large", help="of the model in two processes")
    result.add_argument("--rounds", type=int, default=7, help="of all sides, in two processes")
    result.add_argument("--megabits", type=int, default=100, help="per second, of the limited links")
    result.add_argument("--replay-rounds", type=int, default=30)
    result.add_argument("--parts", choices=PARTS, nargs="+", default=_DEFAULT, help="what to measure")
    result.add_argument("--quick", action="store_true", help="the small model, and few rounds")
    add_options(result, 600.0, "pair of processes")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.quick:
        options.size, options.rounds, options.replay_rounds = "small", 2, 3
        arguments = [*arguments, "--size", "small", "--rounds", "2"]
    if options.result is not None:
        work(options)
        return
    found: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__, "size": options.size}
    torch.set_num_threads(1)
    if "replay" in options.parts:
        found["replay"] = [
            {"size": size, "units": "leaves" if fine else "planned", "of": number, **row}
            for size in (["small"] if options.quick else SIZES)
            for fine in (False, True)
            for number in (1, SIZES[size].num_microbatches)
            for row in replay_overhead(SIZES[size], fine, options.replay_rounds, number)
        ]
        print(f"replay in one process, CPU time per micro-batch\n{replay_table(found['replay'])}", flush=True)
    if "compiled" in options.parts:
        found["compiled"] = [
            {"size": size, "units": "compiled", "of": 1, **row}
            for size in (["small"] if options.quick else SIZES)
            for row in replay_overhead(SIZES[size], False, options.replay_rounds, compiled=True)
        ]
        print(f"the same with compiled units\n{replay_table(found['compiled'])}", flush=True)
    for part, megabits in (("free", None), ("limited", options.megabits)):
        if part not in options.parts:
            continue
        if megabits is not None and not network.available():
            print("limited links are left out: network namespaces need root, ip and tc")
            continue
        result = launch(__file__, arguments, NUM_STAGES, megabits, options.limit_s)
        found[part] = {"megabits": megabits, **result, **summary(result)}
        links = "free links" if megabits is None else f"links of {megabits} Mbit/s"
        print(f"\n{links}, two processes, {options.size} model\n{table(found[part])}", flush=True)
    write(options, found)


if __name__ == "__main__":
    main(sys.argv[1:])
