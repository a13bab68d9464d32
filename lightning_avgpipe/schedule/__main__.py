"""Print, simulate and draw a schedule: ``python -m lightning_avgpipe schedule 1f1b --stages 4 --microbatches 8``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_avgpipe.errors import AvgPipeError, ScheduleError
from lightning_avgpipe.schedule import Schedule, StageCosts, Timeline, build, picture, simulate
from lightning_avgpipe.schedule.picture import chrome_trace, text
from lightning_avgpipe.schedule.policies import POLICIES
from lightning_avgpipe.schedule.recipes import RECIPES, devices_of

_COLUMNS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the grid of a schedule, simulate it, draw it if the options ask for it, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        devices = devices_of(options.schedule, options.stages, options.devices)
        schedule = build(options.schedule, options.stages, options.microbatches, options.advance, devices)
        costs = StageCosts.uniform(options.stages, options.forward, options.backward, options.send, options.latency)
        costs = costs.on(schedule.devices)
        timeline = _simulated(options, schedule, costs)
        print(schedule)
        if options.text:
            print(text(timeline, min(_COLUMNS, max(1, round(timeline.iteration_s)))))
        print(summary(schedule, timeline))
        if options.policy is not None:
            copies = " ".join(map(str, POLICIES[options.policy].copies(options.stages, options.microbatches)))
            print(f"weight policy {options.policy}, copies of the weights {copies}")
        if options.output is not None:
            _write(options.output, schedule, timeline, options.iterations)
    except (AvgPipeError, OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _simulated(options: argparse.Namespace, schedule: Schedule, costs: StageCosts) -> Timeline:
    if options.policy is None:
        return simulate([schedule] * options.pipelines, costs, iterations=options.iterations)
    if options.pipelines > 1 or schedule.warm_up != build("1f1b", options.stages, options.microbatches).warm_up:
        raise ScheduleError("--policy is for one pipeline with the schedule 1f1b; leave --pipelines and --advance out")
    return POLICIES[options.policy].simulate(costs, options.microbatches, options.iterations)


def summary(schedule: Schedule, timeline: Timeline) -> str:
    """Return one line with the time, the idle share, the warm-up and the peak stash of a simulated schedule."""
    return (
        f"iteration {timeline.steady_s:g} s, idle {timeline.bubble_fraction:.1%}, "
        f"warm-up {' '.join(map(str, schedule.warm_up))}, peak stash {' '.join(map(str, timeline.peak_stash))}"
    )


def _write(path: Path, schedule: Schedule, timeline: Timeline, iterations: int) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(timeline, schedule=schedule.name)))
        return
    filled = f" once filled, {iterations} iterations" if iterations > 1 else ""
    title = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches, "
        f"{timeline.steady_s:g} s an iteration, idle {timeline.bubble_fraction:.1%}{filled}"
    )
    picture.draw(timeline, title).savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_avgpipe schedule",
        description="Print a schedule as a grid (one row per stage), simulate it on equal stages, and draw it.",
    )
    parser.add_argument("schedule", choices=(*RECIPES, "forward"), help="advance_forward with --advance 0 is 1f1b")
    parser.add_argument("--stages", type=int, default=4, metavar="K", help="number of stages (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="M", help="number per iteration (default: 8)")
    parser.add_argument("--advance", type=int, default=0, metavar="H", help="for advance_forward (default: 0)")
    parser.add_argument(
        "--devices", type=int, metavar="D", help="for interleaved and bfs, with K/D stages on each (default: K/2)"
    )
    parser.add_argument("--text", action="store_true", help="also draw it with letters")
    parser.add_argument("--pipelines", type=int, default=1, metavar="N", help="number in parallel (default: 1)")
    parser.add_argument(
        "--iterations", type=int, default=1, metavar="T", help="number without a drain between them (default: 1)"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, help="weight policy of one pipeline, which goes on while its stages are updated"
    )
    for name, default, what in (
        ("forward", 1.0, "a forward"),
        ("backward", 2.0, "a backward"),
        ("send", 0.0, "a message on its link"),
        ("latency", 0.0, "a message after it has left its link"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"seconds of {what} (default: {default:g})"
        )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="picture (.png, .svg, .pdf), or trace for ui.perfetto.dev (.json)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
