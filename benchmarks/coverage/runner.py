"""Cases in processes of their own, a few at a time, each with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage.case import Case, Source
from benchmarks.coverage.comparison import compare

__all__ = ["Results", "run"]


class Results:
    """What was found, in a file that is written after each case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def wants(self, source: str, name: str, again: Sequence[str]) -> bool:
        """Whether a case is still to be tried."""
        row = self.found.get(source, {}).get("cases", {}).get(name)
        return row is None or "all" in again or row["status"] in again

    def add(self, source: Source, case: Case, row: dict[str, Any]) -> None:
        """Write down what became of a case."""
        of_source = self.found.setdefault(source.name, {"cases": {}})
        of_source["version"] = source.version
        of_source["cases"][case.name] = {"kind": case.kind, **row}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.found, indent=1, sort_keys=True) + "\n")
        os.replace(new, self.path)


def run(
    source: Source,
    cases: Sequence[Case],
    results: Results,
    stages: Sequence[int],
    costs: str,
    workers: int,
    limit_s: float,
) -> None:
    """Try the cases.

    Args:
        stages: numbers of stages that each is tried with.
        costs: as in the strategy.
        workers: processes at a time.
        limit_s: a process that has computed for so many seconds is ended, and its case is ``slow``; other work on the
            machine does not count. After five times as long a process that waits is ended as well.
    """
    context = multiprocessing.get_context("fork")  # everything is imported already
    waiting, running, done = list(cases)[::-1], {}, 0
    while waiting or running:
        while waiting and len(running) < workers:
            case = waiting.pop()
            mine, other = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(case, stages, costs, limit_s, other))
            process.start()
            other.close()
            running[mine] = (case, process, time.monotonic())
        ready = set(wait(list(running), timeout=1.0))
        for connection, (case, process, began) in list(running.items()):
            took = time.monotonic() - began
            if connection not in ready and took < 5 * limit_s:
                continue
            row: dict[str, Any] = {"status": "slow", "reason": f"no answer in {limit_s:.0f} s"}
            if connection in ready:
                try:
                    row = connection.recv()
                except EOFError:
                    process.join()
                    if process.exitcode != -signal.SIGXCPU:
                        row = {"status": "refused", "reason": f"the process ended with exit code {process.exitcode}"}
            process.kill()
            process.join()
            connection.close()
            del running[connection]
            done += 1
            results.add(source, case, {**row, "seconds": round(took, 1)})
            print(
                f"{done}/{len(cases)} {case.name}: {row['status']} {row.get('reason', '')[:150]} ({took:.0f} s)",
                flush=True,
            )


def _work(case: Case, stages: Sequence[int], costs: str, limit_s: float, connection: Connection) -> None:
    os.nice(10)
    limit = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    connection.send(compare(case, stages, costs))
    connection.close()
