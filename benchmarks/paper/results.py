"""The results file: a record for each measurement, written when it is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Record", "Results"]

Record = dict[str, Any]  # workload, link (Mbit/s; None: no link), system, seed, and what was measured


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

    def add(self, workload: str, link: int | None, system: str, seed: int, found: dict[str, Any]) -> Record:
        """Keep what was found."""
        record = {"workload": workload, "link": link, "system": system, "seed": seed, **found}
        self.records.append(record)
        if self._path is not None:
            beside = self._path.with_suffix(".tmp")
            beside.write_text(json.dumps({"records": self.records}, indent=1))
            os.replace(beside, self._path)
        return record
