"""Do parallel pipelines fill each other's bubbles? Batches per second of N = 1, 2, 3 pipelines.

    python benchmarks/parallel_pipelines.py                     # as root; about three minutes on two cores
    python benchmarks/parallel_pipelines.py --parts rolling --microbatches 2    # with rolling=True, in a Trainer

Two stages in two processes, joined by a link of a limited rate in each direction. An iteration is what the strategy
runs: N batches of M micro-batches through the executor, N optimizer steps, one averaging. All N take turns in the same
processes, round by round, and a ratio is the median of the ratios of the rounds. As in ``schedules.py``, compute is a
sleep that releases the core, so that time shows the schedule.

Beside it stands what the tuner's simulator makes of the times that one pipeline took: of actions and steps, and of a
message of that size on the link. With one pipeline's iteration of T seconds, in which the busiest stage works for W, N
of them take T + (N-1) W at best where nothing but the ramps is idle: with a bubble of a third, two pipelines are 1.2
times as fast as one, and three 1.29 times.

Rolling: seconds per batch of a Trainer's run, with Lightning's own work, as ``trained.py`` measures them, for N
pipelines with and without ``rolling=True``; beside the limits N / (N - (N-1) b) and 1 / (1-b) for one pipeline that is
idle for b.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import trained
from benchmarks.harness import connected, in_turns, launch, parser, record, table, write
from benchmarks.models import Blocks
from benchmarks.one_pipeline import STEP
from benchmarks.schedules import calibrate, goodput
from lightning_avgpipe import Averaging
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Link
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.schedule import (
    BACKWARD,
    FORWARD,
    Schedule,
    StageCosts,
    Timeline,
    build,
    first_advance,
    uneven_steps,
)
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.plan_maker import Examples
from lightning_avgpipe.tuning.predictors import Simulator
from lightning_avgpipe.tuning.profile import Curve, Device, HopProfile, Profile, Setting, StageMemory, StageProfile
from lightning_avgpipe.utils.random_streams import RandomKey

NUM_STAGES = 2
FULL = trained.Costs(NUM_STAGES, 2, 20.0, 40.0, 500_000, 28)
QUICK = trained.Costs(NUM_STAGES, 2, 5.0, 10.0, 60_000, 28)
_ACTIONS = 4  # micro-batches of the iterations of a round, at least one iteration
_NO_MEMORY = StageMemory(0, 0, 0, 0)
_FLOAT_BYTES = 4


class Bench:
    """Two stages in two processes: parallel models that train as the strategy trains them, without a trainer.

    Args:
        cluster: open.
        model: the same on every rank; its step takes what ``args`` has.
        args: of one micro-batch; all micro-batches are alike.
        split_point: unit at which the last stage begins.
    """

    def __init__(self, cluster: Cluster, model: nn.Module, args: Sequence[Any], split_point: str) -> None:
        self.cluster = cluster
        self.observers = Observers()
        self.model = model
        self.args = args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.deployment = Deployment(
            model, cluster, Planner(Divisible(model), NUM_STAGES, [split_point]), lambda: [self.optimizer]
        )
        self.deployment.prepare(Examples(STEP, self._step, [args]), True, build("1f1b", NUM_STAGES, 1))
        self.pipelines = self.deployment.models.train(1)
        self.iterations = 0

    def _step(self, *args: Any) -> Any:
        return self.model.training_step(*args)  # type: ignore[operator]

    @property
    def message_bytes(self) -> int:
        """Of the values of a micro-batch, and of their gradients."""
        assert self.deployment.plan is not None
        return self.deployment.plan.stages[0].boundary_bytes

    def resize(self, num_pipelines: int) -> None:
        """Have so many pipelines from now on."""
        self.pipelines = self.deployment.models.train(num_pipelines)

    def iterate(self, schedule: Schedule) -> None:
        """A batch for each pipeline, their optimizers' steps, and the averaging."""
        self.iterations += 1
        count, ensemble = len(self.pipelines), self.deployment.models.ensemble
        self.optimizer.zero_grad()
        if ensemble is not None:
            for model in ensemble.models.each[1:]:
                model.clear_gradients()
        tasks = [
            Task(
                lambda i, *args: self._step(*args),
                [self.args] * schedule.num_microbatches,
                lambda i, loss: loss / schedule.num_microbatches,
                RandomKey(0, self.iterations, n),
            )
            for n in range(count)
        ]
        run_together(self.pipelines, STEP, [schedule] * count, tasks, self.observers)
        self.deployment.models.sum_copied_gradients()
        with self.observers.activity("step"):
            if ensemble is not None:
                ensemble.place(0)
                ensemble.optimizers.follow()
            self.optimizer.step()
            for n in range(1, count):
                assert ensemble is not None
                for made in ensemble.optimizers.of(n):
                    made.step()
        if ensemble is not None:
            with self.observers.activity("averaging"):
                ensemble.averager.stepped(count)

    def record(self, schedule: Schedule) -> Timeline | None:
        """One iteration; on rank 0 what happened in it."""
        return record(self.cluster, self.observers, lambda: self.iterate(schedule))

    def seconds(self, schedule: Schedule, iterations: int) -> float:
        """Of an iteration, until the last process is done; on rank 0."""
        self.cluster.group.barrier()
        begin = time.perf_counter()
        for _ in range(iterations):
            self.iterate(schedule)
        return max(self.cluster.group.gather_objects(time.perf_counter() - begin)) / iterations


# -- time ------------------------------------------------------------------------------------------------------------


def measure_time(
    costs: trained.Costs, microbatches: Sequence[int], counts: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """In each process: a row for each M and N; on ranks other than 0 none."""
    with connected() as cluster:
        rate, model = goodput(cluster), Blocks(NUM_STAGES, max(1, costs.message_bytes // _FLOAT_BYTES))
        bench = Bench(cluster, model, (torch.ones(1, 1),), "blocks.1")
        wanted_s = {FORWARD: costs.forward_ms / 1e3, BACKWARD: costs.backward_ms / 1e3}
        calibrate(cluster, model, wanted_s, lambda: bench.record(build("1f1b", NUM_STAGES, 4)))
        return [row for count in microbatches for row in measure_setting(bench, count, counts, rounds, rate)]


def measure_setting(
    bench: Bench, num_microbatches: int, counts: Sequence[int], rounds: int, rate: float
) -> list[dict[str, Any]]:
    """A row for each N at one M, with the advance that is best for one pipeline."""
    cluster, message_s = bench.cluster, bench.message_bytes / rate
    found = cluster.group.broadcast(bench.record(build("1f1b", NUM_STAGES, num_microbatches)))
    assert found is not None
    expected = costs_of([found], message_s)
    advance = first_advance(uneven_steps(expected), num_microbatches, expected)
    schedule = build("advance_forward", NUM_STAGES, num_microbatches, advance)
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    timelines: dict[int, list[Timeline]] = {n: [] for n in counts}
    iterations = max(1, _ACTIONS // num_microbatches)
    for n in in_turns(counts, rounds):
        bench.resize(n)
        timeline = bench.record(schedule)
        seconds[n].append(bench.seconds(schedule, iterations))
        if timeline is not None:
            timelines[n].append(timeline)
    bench.resize(1)
    if cluster.rank:
        return []
    costs, setting = costs_of(timelines[1], message_s), Setting(num_microbatches, 1, advance)
    profile = profile_of(costs, bench.message_bytes, rate, timelines[counts[-1]], setting)
    predicted = {n: Simulator().predict(profile, Setting(num_microbatches, n, advance)).iteration_s for n in counts}
    return [
        {
            "microbatches": num_microbatches, "pipelines": n, "advance": advance,
            "seconds": statistics.median(seconds[n]),
            "batches_per_s": n / statistics.median(seconds[n]),
            "over_one": statistics.median(n * a / b for a, b in zip(seconds[1], seconds[n], strict=True)),
            "bubble": statistics.median(t.bubble_fraction for t in timelines[n]),
            "simulated_s": predicted[n],
            "simulated_over_one": n * predicted[1] / predicted[n],
            "rounds_s": [round(s, 5) for s in seconds[n]],
            "costs": {"forward_s": costs.forward_s, "backward_s": costs.backward_s, "message_s": message_s,
                      "latency_s": costs.latency_s[0]},
        }
        for n in counts
    ]  # fmt: skip


def costs_of(timelines: Sequence[Timeline], message_s: float) -> StageCosts:
    """Of one pipeline: medians of actions; a message occupies the link for as long as its bytes take.

    The sending end cannot tell, as it is done when the system has a copy. What the quickest message took beyond that is
    latency; others have waited for each other.
    """
    measured = [StageCosts.measured(timeline) for timeline in timelines]
    stages = range(NUM_STAGES)
    latency_s = max(0.0, min(t.arrival_s - t.begin_s for found in timelines for t in found.transfers) - message_s)
    return StageCosts(
        [statistics.median(costs.forward_s[k] for costs in measured) for k in stages],
        [statistics.median(costs.backward_s[k] for costs in measured) for k in stages],
        [message_s], [message_s], [latency_s],
    )  # fmt: skip


def profile_of(
    costs: StageCosts, message_bytes: int, rate: float, timelines: Sequence[Timeline], setting: Setting
) -> Profile:
    """What the tuner would know; steps and averagings are those of the timelines' pipelines, divided among them."""

    def update_s(stage: int, kind: str) -> float:
        rank = NUM_STAGES - 1 - stage
        return statistics.median(
            sum(a.end_s - a.begin_s for a in t.activities if (a.device, a.kind) == (rank, kind)) / t.num_pipelines
            for t in timelines
        )

    stages = tuple(
        StageProfile(
            Curve.constant(costs.forward_s[k], 1.0), Curve.constant(costs.backward_s[k], 1.0), _NO_MEMORY,
            step_s=update_s(k, "step"), averaging_s=update_s(k, "averaging"),
        )
        for k in range(NUM_STAGES)
    )  # fmt: skip
    link = Link(1 / rate, costs.latency_s[0])
    hop = HopProfile(message_bytes, message_bytes, link, link)
    count = setting.num_microbatches
    return Profile(count, 1, count, stages, (hop,), Device("process", 0, in_turns=True))


# -- rolling ---------------------------------------------------------------------------------------------------------


def measure_rolling(costs: trained.Costs, megabits: int, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for one pipeline, and for each other N with and without a barrier."""
    count, of_stages = costs.microbatches, costs.on(megabits)
    advance = first_advance(uneven_steps(of_stages), count, of_stages)
    settings = [(1, False), *((n, rolls) for n in counts if n > 1 for rolls in (False, True))]
    strategies = [
        {"num_pipelines": n, "averaging": Averaging(rolling=rolls), "advance": advance} for n, rolls in settings
    ]
    seconds = trained.measure(costs, megabits, strategies, rounds)
    expected = [trained.simulated(costs, megabits, strategy) for strategy in strategies]
    idle = 1 - count * (costs.forward_ms + costs.backward_ms) / 1e3 / seconds[0]
    return [
        {
            "megabits": megabits, "microbatches": count, "pipelines": n, "rolling": rolls, "idle": idle,
            "seconds": found, "over_one": seconds[0] / found, "simulated_over_one": expected[0] / simulated,
            "limit": min(n, 1 / (1 - idle)) if rolls else n / (n - (n - 1) * idle),
        }
        for (n, rolls), found, simulated in zip(settings, seconds, expected, strict=True)
    ]  # fmt: skip


# -- the parent ------------------------------------------------------------------------------------------------------


def timed(rows: Sequence[dict[str, Any]]) -> str:
    """One line per measurement of time."""
    head = ["Mbit/s", "M", "h", "N", "idle", "iteration", "simulated", "error", "batches/s", "over N=1",
            "simulated"]  # fmt: skip
    lines = [
        (*(row[name] for name in ("megabits", "microbatches", "advance", "pipelines")),
         f"{row['bubble']:.1%}", f"{row['seconds']:.3f} s", f"{row['simulated_s']:.3f} s",
         f"{row['seconds'] / row['simulated_s'] - 1:+.1%}", f"{row['batches_per_s']:.2f}", f"{row['over_one']:.2f}x",
         f"{row['simulated_over_one']:.2f}x")
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def rolled(rows: Sequence[dict[str, Any]]) -> str:
    """One line per setting."""
    head = ["Mbit/s", "M", "N", "rolling", "idle, N=1", "s a batch", "over N=1", "simulated", "limit"]
    lines = [
        (*(row[name] for name in ("megabits", "microbatches", "pipelines", "rolling")), f"{row['idle']:.1%}",
         f"{row['seconds']:.4f}", *(f"{row[name]:.2f}x" for name in ("over_one", "simulated_over_one", "limit")))
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", choices=["time", "rolling"], nargs="+", default=["time"], help="what to measure")
    arguments.add_argument("--microbatches", type=int, nargs="+", default=[2, 16], help="M of each batch")
    arguments.add_argument("--quick", action="store_true", help="two N, one link, short sleeps and few rounds")
    options = arguments.parse_args()
    costs, counts, links, rounds = (QUICK, [1, 2], [100], 2) if options.quick else (FULL, [1, 2, 3], [100, 1000], 3)
    found: dict[str, Any] = {}
    if "time" in options.parts:
        given = costs, options.microbatches, counts, rounds
        found["rows"] = [
            {"megabits": link, **row} for link in links for row in launch(measure_time, given, NUM_STAGES, link)[0]
        ]
        print(f"{timed(found['rows'])}\n", flush=True)
    if "rolling" in options.parts:
        costs = replace(costs, microbatches=min(options.microbatches))
        found["rolling"] = [row for link in links for row in measure_rolling(costs, link, counts, rounds)]
        print(f"a Trainer, with and without a barrier\n\n{rolled(found['rolling'])}", flush=True)
    write(options, found)


if __name__ == "__main__":
    main()
