"""Run cases in processes of their own, a few at a time, each with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.case import Case, Source
from benchmarks.coverage.comparison import compare

__all__ = ["Results", "run"]

WORKERS = 2  # processes at a time


class Results:
    """What was found: a line of JSON for each case and number of stages, appended as it is found; the last one counts.

    Attributes:
        rows: by source, case and number of stages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[str, str, int], dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            self._keep(json.loads(line))

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows[row["source"], row["name"], row["stages"]] = row

    def wanted(self, source: str, name: str, stages: Sequence[int]) -> list[int]:
        """The numbers of stages with which a case is still to be tried."""
        return [number for number in stages if (source, name, number) not in self.rows]

    def add(self, source: Source, case: Case, stages: int, found: dict[str, Any]) -> None:
        """Write down what became of a case."""
        about = {"source": source.name, "version": source.version, "name": case.name, "kind": case.kind}
        self._keep({**about, "first": case.first, "stages": stages, **found})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[source.name, case.name, stages]) + "\n")


@dataclass
class _Worker:
    """A process that tries one case.

    Attributes:
        waiting: numbers of stages that it has no answer for yet.
        since: when the last answer came.
    """

    case: Case
    process: multiprocessing.process.BaseProcess
    waiting: list[int]
    since: float


def run(source: Source, cases: Sequence[tuple[Case, list[int]]], results: Results, costs: str, limit_s: float) -> None:
    """Try the cases, two at a time.

    Args:
        cases: each with the numbers of stages that it is tried with.
        costs: as in the strategy.
        limit_s: a process that has computed for so many seconds without an answer is ended, and its case is ``slow``;
            other work on the machine does not count. After five times as long a process that waits is ended as well.
    """
    context = multiprocessing.get_context("fork")  # everything is imported already
    queue, running, done = list(cases)[::-1], dict[Connection, _Worker](), 0
    while queue or running:
        while queue and len(running) < WORKERS:
            case, stages = queue.pop()
            mine, other = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(case, stages, costs, limit_s, other))
            process.start()
            other.close()
            running[mine] = _Worker(case, process, list(stages), time.monotonic())
        ready = set(wait(list(running), timeout=1.0))
        for connection, worker in list(running.items()):
            if connection not in ready and time.monotonic() - worker.since < 5 * limit_s:
                continue
            found: dict[str, Any] = {"status": "slow", "reason": f"no answer in {limit_s:.0f} s"}
            number, ended = worker.waiting[0], connection not in ready
            if not ended:
                try:
                    number, found = connection.recv()
                except EOFError:
                    ended = True
                    worker.process.join()
                    if worker.process.exitcode != -signal.SIGXCPU:
                        code = worker.process.exitcode
                        found = {"status": "refused", "reason": f"the process ended with exit code {code}"}
            results.add(source, worker.case, number, {**found, "costs": costs})
            worker.waiting.remove(number)
            worker.since = time.monotonic()
            if worker.waiting and not ended:
                continue
            worker.process.kill()
            worker.process.join()
            connection.close()
            del running[connection]
            if worker.waiting:  # with fewer stages it may be fast enough
                queue.append((worker.case, worker.waiting))
            else:
                done += 1
            print(f"{done}/{len(cases)} {worker.case.name}, {number} stages: {_line(found)}", flush=True)


def _line(found: dict[str, Any]) -> str:
    return f"{found['status']} {found.get('reason', '')[:150]}"


def _work(case: Case, stages: Sequence[int], costs: str, limit_s: float, connection: Connection) -> None:
    os.nice(1)
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    _allow(limit_s)
    for number, found in compare(case, stages, costs):
        connection.send((number, found))
        _allow(limit_s)
    connection.close()


def _allow(seconds: float) -> None:
    """End this process when it has computed for so long from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds), most))
