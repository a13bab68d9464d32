"""The results file: a record for each measurement, written when it is made."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

__all__ = ["Key", "Record", "Results"]

Key = tuple[str, int | None, str, int]  # workload, link (Mbit/s; None: no link), system, seed or number of the round
Record = dict[str, Any]  # the parts of the key, and what was measured


class Results:
    """All records, and their file.

    Args:
        path: of the file; None: they are kept in memory.
        resume: whether to go on with what the file has.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self.records: list[Record] = []
        if resume and path is not None and path.exists():
            self.records = [r for r in json.loads(path.read_text())["records"] if "failed" not in r]  # tried once more

    def find(self, workload: str, link: int | None, system: str, seed: int) -> Record | None:
        """One record."""
        key = workload, link, system, seed
        return next((r for r in self.records if (r["workload"], r["link"], r["system"], r["seed"]) == key), None)

    def add(self, workload: str, link: int | None, system: str, seed: int, found: Mapping[str, Any]) -> Record:
        """Keep what was found."""
        record = {"workload": workload, "link": link, "system": system, "seed": seed, **found}
        self.records.append(record)
        if self._path is not None:
            beside = self._path.with_suffix(".tmp")
            beside.write_text(json.dumps({"records": self.records}, indent=1))
            os.replace(beside, self._path)
        return record

    def complete(self, function: Callable[..., Any], trials: Mapping[Key, tuple[Any, ...]]) -> None:
        """Call a function for each key that has no record, one call for each core at a time, and keep what it returns.

        Args:
            function: a function that returns what was found; None: it has not measured, and nothing is kept.
            trials: its arguments by key.
        """
        missing = {key: arguments for key, arguments in trials.items() if self.find(*key) is None}
        with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
            runs = {pool.submit(function, *arguments): key for key, arguments in missing.items()}
            for run in as_completed(runs):
                if run.result() is not None:
                    print(self.add(*runs[run], run.result()), file=sys.stderr, flush=True)

    def samples(self, workload: str, system: str, seeds: int) -> list[float]:
        """Return the samples that trainings with these seeds needed to their goal; infinite: it was given up."""
        records = [self.find(workload, None, system, seed) or {} for seed in range(seeds)]
        return [math.inf if record["samples"] is None else float(record["samples"]) for record in records]
