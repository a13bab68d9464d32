"""Repeat AvgPipe's paper: train its three workloads to a target, with AvgPipe and with other systems.

    python -m benchmarks.paper --json paper.json --pictures docs --resume    # as root: hours; goes on where it was
    python -m benchmarks.paper --devices 6 --minutes 30 --json six.json --resume   # six slowed devices, a piece of it
    python -m benchmarks.paper --quick --workloads awd_lstm                  # one link, one seed; needs no corpus

Processes on rate-limited links (network namespaces, which need root) train the examples' models with real arithmetic:
with Lightning's ddp, torch.distributed.pipelining, DeepSpeed's pipeline, and this engine as GPipe, 1F1B, PipeDream,
PipeDream-2BW and AvgPipe. There is a round for each seed. In it all systems take turns, each in processes of its own.
Time to the target is time per epoch times epochs to the target. Epochs are counted in one process, since they depend on
no link (see ``learning.py``). The target is what plain training has reached after two thirds of its epochs.

With six devices each is slowed: what it computes takes six times as long as on a core of its own (``slowed.py``). So a
machine with two cores stands for six devices. Models have more layers, and batches more samples.

AvgPipe is what the tuner takes from its profile on the link, with ``rolling="auto"``, within the memory of the system
that it is compared with, as in the paper's Figures 11 and 12. Memory is counted in the same way for both (see
``settings.py``), and measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.paper import learning, report, timing
from benchmarks.paper.peers import PEERS
from benchmarks.paper.settings import label, settings_within
from benchmarks.paper.workloads import WORKLOADS, Workload, prepare, workloads
from benchmarks.results import Key, Record, Results
from lightning_avgpipe.tuning.profile import Setting

SYSTEMS = ["ddp", *PEERS, *timing.OURS]  # beside AvgPipe
SLOWNESS = {2: 1.0, 6: 6.0}  # number of devices -> how many times as slow as a core each is
MOST_PIPELINES = 2  # of AvgPipe
DATA, WORK = Path("data"), Path("build/paper")  # folders of the corpora, and of the parts of them
LIMIT_S = 300.0  # for each system


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        links: megabits per second.
        seeds: number of seeds.
        lines: of training, for each workload.
        epochs: of plain training.
        steps: that are timed.
    """

    links: tuple[int, ...] = (1000, 100)
    seeds: int = 3
    lines: int = 16_000
    epochs: int = 6
    steps: int = 16


QUICK = Extent((100,), 1, 2400, 2, 8)


@dataclass(frozen=True)
class Piece:
    """What this run measures.

    Attributes:
        results: what is known, and becomes known.
        chosen: workloads.
        folders: of their data, by name.
        extent: how much.
        ends: after which nothing more is begun, a value of ``time.monotonic``.
        replicas: of each stage, with which AvgPipe is timed as well; empty: it is not.
        outer_lr: with which models that divide batches are trained as well; None: they are not.
    """

    results: Results
    chosen: Sequence[Workload]
    folders: dict[str, Path]
    extent: Extent
    ends: float
    replicas: tuple[int, ...] = ()
    outer_lr: float | None = None


def measure_time(piece: Piece) -> None:
    """Everything that is not measured yet, round by round."""
    for seed in range(piece.extent.seeds):
        for workload in piece.chosen:
            for link in piece.extent.links:
                timed = functools.partial(_timed, piece, workload, link)
                settings = _settings(timed(timing.TUNING, None, 0), workload)
                for system, setting in [*((name, None) for name in SYSTEMS), *settings.items()]:
                    timed(system, setting, seed)
                for system, setting in settings.items() if piece.replicas else ():
                    timed(f"{system} replicas={','.join(map(str, piece.replicas))}", setting, seed, piece.replicas)


class _Ended(Exception):
    """The minutes of this piece are over."""


def _settings(profile: Record, workload: Workload) -> dict[str, Setting]:
    """Name in results -> setting of AvgPipe."""
    if "profile" not in profile:
        return {}
    return {label(setting): setting for setting in settings_within(profile, workload).values()}


def _timed(
    piece: Piece, workload: Workload, link: int, system: str, setting: Setting | None, seed: int,
    replicas: tuple[int, ...] = (),
) -> Record:  # fmt: skip
    key = workload.name, link, system, seed
    if (known := piece.results.find(*key)) is not None:
        return known
    if time.monotonic() > piece.ends:
        raise _Ended
    case = timing.Case(
        workload.name, workload.devices, workload.slowness, "avgpipe" if setting is not None else system,
        piece.folders[workload.name], piece.extent.steps, seed, setting, replicas,
    )  # fmt: skip
    try:
        found = timing.measure(case, link, LIMIT_S)
    except SystemExit as error:
        if not isinstance(error.code, str):  # this process is told to end
            raise
        found = {"failed": str(error)}
    except subprocess.TimeoutExpired:
        found = {"failed": f"not done within {LIMIT_S:g} s"}
    if "profile" in found:
        found["most"] = MOST_PIPELINES
    said = {name: value for name, value in found.items() if name != "profile"}
    print(f"{workload.name}, {link} Mbit/s, {system}, seed {seed}: {said}", flush=True)
    return piece.results.add(*key, found)


def measure_learning(piece: Piece) -> None:
    """A curve for each algorithm that was timed, and each seed: first those that say what the target is."""
    for plain in (True, False):
        targets = {w.name: None if plain else report.target_of(w.name, piece.results.records) for w in piece.chosen}
        trials: dict[Key, tuple[Any, ...]] = {
            (w.name, None, algorithm, seed): (
                piece.ends, w.name, algorithm, seed, piece.folders[w.name], piece.extent.epochs, targets[w.name],
                w.devices,
            )
            for w, algorithm, seed in _trials(piece)
            if (algorithm == learning.SYNCHRONOUS) == plain
        }  # fmt: skip
        piece.results.complete(learning.begun_before, trials)


def _trials(piece: Piece) -> Iterator[tuple[Workload, str, int]]:
    for workload in piece.chosen:
        timed = [r["system"] for r in piece.results.records if r["workload"] == workload.name and "batch_s" in r]
        algorithms = dict.fromkeys([learning.SYNCHRONOUS, *map(learning.algorithm_of, timed)])
        if piece.outer_lr is not None:
            algorithms |= {f"{a}{learning.OUTER_LR}{piece.outer_lr:g}": None for a in algorithms if a.endswith("split")}
        for algorithm in algorithms:
            for seed in range(piece.extent.seeds):
                yield workload, algorithm, seed


def parser() -> argparse.ArgumentParser:
    result = harness.parser(__doc__, quick=str(QUICK))
    result.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    result.add_argument("--devices", type=int, choices=SLOWNESS, default=2)
    result.add_argument("--megabits", type=int, nargs="+", help="rates of links, instead of 1000 and 100")
    result.add_argument("--replicas", type=int, nargs="+", help="of each stage, with which AvgPipe is timed as well")
    result.add_argument("--outer-lr", type=float, help="with which models that divide batches are trained as well")
    result.add_argument("--minutes", type=float, default=float("inf"), help="after which nothing more is begun")
    result.add_argument("--resume", action="store_true", help="measure what the results file does not have")
    result.add_argument("--pictures", type=Path, help="folder")
    return result


def main(arguments: Sequence[str]) -> None:
    """See above."""
    options = parser().parse_args(arguments)
    ends, extent = time.monotonic() + 60 * options.minutes, QUICK if options.quick else Extent()
    if options.megabits:
        extent = replace(extent, links=tuple(options.megabits))
    made = workloads(options.devices, SLOWNESS[options.devices])
    chosen = [made[name] for name in options.workloads]
    folders = {w.name: prepare(w, DATA, WORK.resolve(), extent.lines) for w in chosen}
    results, replicas = Results(options.json, options.resume), tuple(options.replicas or ())
    piece = Piece(results, chosen, folders, extent, ends, replicas, options.outer_lr)
    with contextlib.suppress(_Ended):
        measure_time(piece)
    measure_learning(piece)
    records = piece.results.records
    print(f"\n{report.summary(records)}")
    if options.pictures is not None:
        report.picture(report.rows(records), options.pictures / "paper_time.png")


if __name__ == "__main__":
    main(sys.argv[1:])
