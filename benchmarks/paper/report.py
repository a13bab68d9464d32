"""Report the measurements: a table with the paper's claims, and a picture of the times to the target."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.goal import reached
from benchmarks.paper.learning import OUTER_LR, REACHED_AFTER, SYNCHRONOUS, algorithm_of
from benchmarks.paper.peers import PEERS
from benchmarks.paper.settings import BOUNDS, MICROBATCHES, UNLIMITED, label, settings_within
from benchmarks.paper.timing import OURS, TUNING
from benchmarks.paper.workloads import WORKLOADS, workloads
from benchmarks.results import Record

__all__ = ["Row", "claims", "picture", "rows", "summary", "table", "target_of"]

# What is compared within the memory of what: the other engines' pipelines stash what ours do.
BOUND_OF = {"torch gpipe": "gpipe", "torch 1f1b": "1f1b", "deepspeed": "1f1b"} | {
    name: name for name in (*BOUNDS, UNLIMITED)
}


@dataclass(frozen=True)
class Row:
    """A system on a link.

    Attributes:
        epoch_s: seconds of an epoch, median of the seeds; None: it was not measured.
        memory: MiB of the fullest process, at most.
        epochs: to the target, median of the seeds; infinite where most of them miss it; None: not trained.
        note: why something is missing.
        within: setting of AvgPipe that fits the memory of this system; for AvgPipe itself "".
        freely: setting of AvgPipe without a limit of memory.
        busy: share of time for which the devices compute, on average; None: it was not measured.
    """

    workload: str
    link: int
    system: str
    epoch_s: float | None
    memory: float | None
    epochs: float | None
    note: str = ""
    within: str = ""
    freely: str = ""
    busy: float | None = None

    @property
    def target_s(self) -> float | None:
        """Seconds to the target."""
        return None if self.epoch_s is None or self.epochs is None else self.epoch_s * self.epochs


def target_of(workload: str, records: Sequence[Record]) -> float | None:
    """The best metric that plain training had after two thirds of its epochs, median of the seeds.

    Of an even number of seeds the one of the two in the middle that both have reached.
    """
    plain = [r for r in records if (r["workload"], r["system"]) == (workload, SYNCHRONOUS) and "curve" in r]
    falls = WORKLOADS[workload].goal == "min"
    better, median = (min, statistics.median_high) if falls else (max, statistics.median_low)
    found = [better(value for epoch, value in r["curve"] if epoch <= REACHED_AFTER * r["epochs"]) for r in plain]
    return median(found) if found else None


def _epochs(workload: str, algorithm: str, records: Sequence[Record]) -> float | None:
    target = target_of(workload, records)
    curves = [r["curve"] for r in records if (r["workload"], r["system"]) == (workload, algorithm) and "curve" in r]
    if target is None or not curves:
        return None
    found = [reached(curve, target, WORKLOADS[workload].goal == "min") for curve in curves]
    return statistics.median_low(float("inf") if value is None else value for value in found)


def rows(records: Sequence[Record]) -> list[Row]:
    """One for each system on each link, AvgPipe the last."""
    timed = [r for r in records if r["link"] is not None and r["system"] != TUNING]
    made = []
    for workload, link, system in dict.fromkeys((r["workload"], r["link"], r["system"]) for r in timed):
        here = [r for r in timed if (r["workload"], r["link"], r["system"]) == (workload, link, system)]
        good = [r for r in here if "batch_s" in r]
        note = next((r[key] for r in here for key in ("refused", "failed") if key in r), "")
        batches = next((r["batches"] for r in records if r["workload"] == workload and "batches" in r), None)
        batch_s = statistics.median(r["batch_s"] for r in good) if good else None
        algorithm = algorithm_of(system)
        of_workload = [r for r in records if r["workload"] == workload and r["link"] is None]
        others = [r["system"] for r in of_workload if r["system"].startswith(f"{algorithm}{OUTER_LR}")]
        for trained in dict.fromkeys([algorithm, *others]):
            refused = next((r["refused"] for r in of_workload if r["system"] == trained and "refused" in r), "")
            made.append(
                Row(
                    workload, link, f"{system}{trained.removeprefix(algorithm)}",
                    None if batch_s is None or batches is None else batch_s * batches,
                    max((max(r["memory"]) for r in good), default=None), _epochs(workload, trained, records),
                    note or refused, _within(workload, link, system, records),
                    _within(workload, link, UNLIMITED, records),
                    statistics.median(statistics.mean(r["busy"]) for r in good) if good and "busy" in good[0] else None,
                )
            )  # fmt: skip
    order = {system: i for i, system in enumerate(["ddp", *PEERS, *OURS])}
    names = list(WORKLOADS)
    return sorted(made, key=lambda row: (names.index(row.workload), -row.link, order.get(row.system, len(order))))


def _within(workload: str, link: int, system: str, records: Sequence[Record]) -> str:
    profile = next((r for r in records if (r["workload"], r["link"], r["system"]) == (workload, link, TUNING)), None)
    bound = BOUND_OF.get(system)
    if profile is None or "profile" not in profile or bound is None:
        return ""
    devices = next((len(r["memory"]) for r in records if "memory" in r), 2)
    return _labels(workload, devices, profile["profile"], profile["most"], profile["rolls"])[bound]


@functools.cache  # a search for each bound, and the same for each system
def _labels(workload: str, devices: int, profile: str, most: int, rolls: bool) -> dict[str, str]:
    found = settings_within({"profile": profile, "most": most, "rolls": rolls}, workloads(devices)[workload])
    return {bound: label(setting) for bound, setting in found.items()}


def table(found: Sequence[Row]) -> str:
    """Markdown; speed-ups are times of the system over those of AvgPipe within its memory."""
    names = [
        "workload", "link", "", "epoch", "memory", "epochs to target", "time to target", "AvgPipe in its memory",
        "epoch over AvgPipe's", "target over AvgPipe's", "target over AvgPipe's in any memory", "busy",
    ]  # fmt: skip
    lines = []
    for row in found:
        ours, free = _rival(row, found, row.within), _rival(row, found, row.freely if row.within else "")
        cells = [
            row.workload, f"{row.link} Mbit/s", row.system, _shown(row.epoch_s, "{:.1f} s"),
            _shown(row.memory, "{:.0f} MiB"), _shown(row.epochs, "{:.2f}"), _shown(row.target_s, "{:.0f} s"),
            row.within.removeprefix("avgpipe "), _ratio(row.epoch_s, ours and ours.epoch_s),
            _ratio(row.target_s, ours and ours.target_s), _ratio(row.target_s, free and free.target_s),
            _shown(row.busy, "{:.0%}"),
        ]  # fmt: skip
        lines.append(cells)
    return harness.table(names, lines)


def notes(found: Sequence[Row]) -> str:
    """Why something is missing: a line for each system of a workload."""
    said = {f"- {row.workload}, {row.system}: {row.note}" for row in found if row.note}
    return "\n".join(sorted(said))


PAPER = {
    "pipelines of other engines": ("1.7x", ["torch gpipe", "torch 1f1b", "deepspeed"]),
    "pipelines here": ("1.7x", ["gpipe", "1f1b", "pipedream", "2bw"]),
    "data parallelism": ("4.7x", ["ddp"]),
}


def claims(found: Sequence[Row]) -> str:
    """Return Markdown: how much sooner AvgPipe reaches the target, over all workloads and links, beside the paper."""
    lines = []
    for group, (claimed, systems) in PAPER.items():
        for memory, setting in (("as theirs", "within"), ("any", "freely")):
            theirs = [row for row in found if row.system in systems]
            pairs = [(row.target_s, _rival(row, found, getattr(row, setting))) for row in theirs]
            ratios = [a / b.target_s for a, b in pairs if a and b is not None and b.target_s]
            finite = [ratio for ratio in ratios if 0 < ratio < float("inf")]
            values = (statistics.geometric_mean(finite), min(finite), max(finite)) if finite else ()
            lines.append((group, memory, claimed, *([f"{value:.2f}x" for value in values] or ["-"] * 3)))
    head = ["AvgPipe over", "its memory", "paper, on average", "here, geometric mean", "least", "largest"]
    return harness.table(head, lines)


def _rival(row: Row, found: Sequence[Row], setting: str) -> Row | None:
    """Return the row of a setting of AvgPipe on the same workload and link."""
    return next((o for o in found if (o.workload, o.link, o.system) == (row.workload, row.link, setting)), None)


def _shown(value: float | None, text: str) -> str:
    if value is None:
        return "-"
    return "not reached" if value == float("inf") else text.format(value)


def _ratio(theirs: float | None, ours: float | None) -> str:
    if theirs is None or not ours or float("inf") in (theirs, ours):
        return "-"
    return f"{theirs / ours:.2f}x"


def picture(found: Sequence[Row], path: Path) -> None:
    """Bars: the time to the target over that of ddp, a panel for each workload and link."""
    names, links = list(dict.fromkeys(row.workload for row in found)), sorted({row.link for row in found})
    panels = {}
    for link, workload in itertools.product(links, names):
        times = {r.system: r.target_s for r in found if (r.workload, r.link) == (workload, link)}
        unit = times.get("ddp") or 1.0
        drawn = {system: [s / unit] for system, s in times.items() if s is not None and s != float("inf")}
        panels[f"{workload}, {link} Mbit/s"] = drawn
    path.parent.mkdir(parents=True, exist_ok=True)
    harness.bars(
        panels, len(names), "time to the target, over that of ddp", path,
        lambda system: "#2f6fb2" if system.startswith("avgpipe") else "#9aa5b1",
    )  # fmt: skip


def summary(records: Sequence[Record]) -> str:
    """All of it."""
    found = rows(records)
    about = f"{MICROBATCHES} micro-batches in all other pipelines; targets: " + ", ".join(
        f"{workload} {target:.3f}"
        for workload in dict.fromkeys(row.workload for row in found)
        if (target := target_of(workload, records)) is not None
    )
    return "\n\n".join(text for text in (about, table(found), notes(found), claims(found)) if text)
