"""AvgPipe's paper once more: its three workloads to a target, beside what else one could use.

    python -m benchmarks.paper --json paper.json --pictures docs --resume    # as root: hours; goes on where it was
    python -m benchmarks.paper --devices 6 --minutes 30 --json six.json --resume   # six slowed devices, a piece of it
    python -m benchmarks.paper --quick                                       # one link, one seed: some twenty minutes
    python -m benchmarks.paper --quick --workloads awd_lstm                  # needs no corpus

Processes on rate-limited links (network namespaces, which need root) train the examples' models with real
arithmetic: with Lightning's ddp, torch.distributed.pipelining, DeepSpeed's pipeline, and this engine as GPipe, 1F1B,
PipeDream, PipeDream-2BW and AvgPipe. In each round, one for each seed, all of them take turns, each in processes of
its own. Time to the target is time per epoch times epochs to the target, which are counted in one process, since they
depend on no link (see ``learning.py``). The target is what plain training has reached after two thirds of its epochs.

With six devices each is slowed: what it computes takes ``--slowness`` times as long as on a core of its own
(``slowed.py``), so that a machine with two cores stands for six devices. Models have more layers, batches more samples,
and all other pipelines run with each number of micro-batches of ``--microbatches``, of which the best counts.

AvgPipe is what the tuner takes from its profile on the link, with ``rolling="auto"``, within the memory of the system
that it is compared with, as in the paper's Figures 11 and 12; memory is counted in the same way for both (see
``settings.py``), and measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import network
from benchmarks.paper import learning, report, timing
from benchmarks.paper.peers import PEERS
from benchmarks.paper.results import Record, Results
from benchmarks.paper.settings import MICROBATCHES, label, settings_within
from benchmarks.paper.workloads import WORKLOADS, Workload, prepare, workloads
from lightning_avgpipe.tuning import Setting

SYSTEMS = ["ddp", *PEERS, *timing.OURS]
QUICK = {"links": [100], "seeds": 1, "lines": 2400, "epochs": 2, "steps": 8}


def measure_time(
    results: Results, chosen: Sequence[Workload], folders: dict[str, Path], options: argparse.Namespace
) -> None:
    """Everything that is not measured yet, round by round."""
    for seed in range(options.seeds):
        for workload in chosen:
            for link in options.links:
                timed = functools.partial(_timed, results, workload, folders[workload.name], link, options)
                profile = timed(timing.TUNING, None, 0)
                settings = _settings(profile, workload)
                for system, setting in [*((name, None) for name in _names(options)), *settings.items()]:
                    timed(system, setting, seed)


def _names(options: argparse.Namespace) -> list[str]:
    """Return the systems beside AvgPipe, those with micro-batches with each number of them."""
    return [
        name if name == "ddp" or count == MICROBATCHES else f"{name} M={count}"
        for name in options.systems
        for count in ([MICROBATCHES] if name == "ddp" else options.microbatches)
    ]


class _Ended(Exception):
    """The minutes of this piece are over."""


def _settings(profile: Record, workload: Workload) -> dict[str, Setting]:
    """Name in results -> setting of AvgPipe."""
    if "profile" not in profile:
        return {}
    return {label(setting): setting for setting in settings_within(profile, workload).values()}


def _timed(
    results: Results, workload: Workload, folder: Path, link: int, options: argparse.Namespace,
    system: str, setting: Setting | None, seed: int,
) -> Record:  # fmt: skip
    key = workload.name, link, system, seed
    if (known := results.find(*key)) is not None:
        return known
    if time.monotonic() > options.ends:
        raise _Ended
    limit = link if options.namespaces else None
    try:
        case = timing.Case.of(workload, system, setting, folder, options.steps, seed)
        found = timing.measure(case, limit, options.limit_s)
    except SystemExit as error:
        if not isinstance(error.code, str):  # this process is told to end
            raise
        found = {"failed": str(error)}
    except subprocess.TimeoutExpired:
        found = {"failed": f"not done within {options.limit_s:g} s"}
    if "profile" in found:
        found["most"] = options.pipelines
    said = {name: value for name, value in found.items() if name != "profile"}
    print(f"{workload.name}, {link} Mbit/s, {system}, seed {seed}: {said}", flush=True)
    return results.add(*key, found)


def measure_learning(
    results: Results, chosen: Sequence[Workload], folders: dict[str, Path], options: argparse.Namespace
) -> None:
    """A curve for each algorithm that was timed, and each seed: first those that say what the target is."""
    for plain in (True, False):
        trials = [
            trial
            for trial in _trials(results, chosen, options)
            if (trial[1] == learning.SYNCHRONOUS) == plain and results.find(trial[0], None, *trial[1:]) is None
        ]
        targets = {w.name: None if plain else report.target_of(w.name, results.records) for w in chosen}
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            runs = {
                pool.submit(
                    learning.begun_before,
                    options.ends,
                    *trial,
                    folders[trial[0]],
                    options.epochs,
                    targets[trial[0]],
                    options.devices,
                ): trial
                for trial in trials
            }
            for done in as_completed(runs):
                if done.result() is None:
                    continue
                name, algorithm, seed = runs[done]
                record = results.add(name, None, algorithm, seed, done.result())
                print(f"{name}, {algorithm}, seed {seed}: {record.get('curve', record)}", flush=True)


def _trials(
    results: Results, chosen: Sequence[Workload], options: argparse.Namespace
) -> Iterator[tuple[str, str, int]]:
    for workload in chosen:
        timed = [r["system"] for r in results.records if r["workload"] == workload.name and "batch_s" in r]
        for algorithm in dict.fromkeys([learning.SYNCHRONOUS, *map(learning.algorithm_of, timed)]):
            for seed in range(options.seeds):
                yield workload.name, algorithm, seed


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--workloads", nargs="+", choices=WORKLOADS)
    result.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="beside AvgPipe")
    result.add_argument("--links", nargs="+", type=int, default=[1000, 100], help="megabits per second")
    result.add_argument("--devices", type=int, choices=[2, 6], default=2)
    result.add_argument("--slowness", type=float, help="of a device over a core; default: 1 of two, 6 of six")
    result.add_argument("--microbatches", nargs="+", type=int, default=[MICROBATCHES], help="of other pipelines")
    result.add_argument("--minutes", type=float, default=float("inf"), help="after which nothing more is begun")
    result.add_argument("--seeds", type=int, default=3)
    result.add_argument("--lines", type=int, default=16_000, help="of training, for each workload")
    result.add_argument("--epochs", type=int, default=6)
    result.add_argument("--steps", type=int, default=16, help="that are timed")
    result.add_argument("--pipelines", type=int, default=2, help="of AvgPipe, at most")
    result.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time that count epochs")
    result.add_argument("--limit-s", type=float, default=300.0, help="for each system")
    result.add_argument("--free", dest="namespaces", action="store_false", help="links without a limit: a trial")
    result.add_argument("--quick", action="store_true", help=f"{QUICK}, where nothing else is said")
    result.add_argument("--resume", action="store_true", help="measure what the results file does not have")
    result.add_argument("--data", type=Path, default=Path("data"), help="folder of the corpora")
    result.add_argument("--work", type=Path, default=Path("build/paper"), help="folder of the parts of them")
    result.add_argument("--json", type=Path, help="results file")
    result.add_argument("--pictures", type=Path, help="folder")
    return result


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    made = parser()
    if "--quick" in arguments:
        made.set_defaults(**QUICK)
    return made.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """See above."""
    options = parsed(arguments)
    if options.namespaces and not network.available():
        raise SystemExit("links of a limited rate are network namespaces, which need root, ip and tc; or give --free")
    options.ends = time.monotonic() + 60 * options.minutes
    slowness = options.slowness or {2: 1.0, 6: 6.0}[options.devices]
    made = workloads(options.devices, slowness)
    results, chosen = Results(options.json, options.resume), [made[name] for name in options.workloads or made]
    folders: dict[str, Any] = {w.name: prepare(w, options.data, options.work.resolve(), options.lines) for w in chosen}
    with contextlib.suppress(_Ended):
        measure_time(results, chosen, folders, options)
    measure_learning(results, chosen, folders, options)
    print(f"\n{report.summary(results.records)}")
    if options.pictures is not None:
        report.pictures(report.rows(results.records), results.records, options.pictures)


if __name__ == "__main__":
    main(sys.argv[1:])
