"""What was found, as a page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.coverage.runner import Results

__all__ = ["write"]

_NAMES = {
    "works": "works",
    "refused": "refused",
    "wrong": "wrong numbers",
    "slow": "too slow",
    "plain": "does not train plainly",
}


def write(results: Results, path: Path) -> None:
    """Write the page."""
    path.write_text("\n".join(["# Coverage", "", *_INTRODUCTION, *_page(results.found)]) + "\n")


_INTRODUCTION = """\
`python -m benchmarks.coverage` trains every architecture twice: micro-batches accumulated in one process without this
package, and with `Trainer(strategy=AvgPipeStrategy(num_stages=K))`, K = 2, 3 and 4 at default options in one process.
It works if losses, and all weights and buffers by name, are the same after three steps: bit for bit, or to rounding
where parameters are tied (their gradients are summed in another order). Configurations are the default ones with
smaller numbers, `use_cache=True` included, and dropout is off; a model that draws random numbers nevertheless is
compared with itself in one stage. Architectures that do not train without stages with the example that the rules make
do not count.
""".splitlines()


def _page(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for source, rows in sorted(found.items()):
        cases: dict[str, Any] = rows["cases"]
        trained = {name: row for name, row in cases.items() if row["status"] != "plain"}
        works = sum(row["status"] == "works" for row in trained.values())
        share = works / max(len(trained), 1)
        lines += ["", f"## {source} {rows['version']}: {works} of {len(trained)} work ({share:.1%})", ""]
        lines += [f"| kind | {' | '.join(_NAMES.values())} |", f"| --- |{' --- |' * len(_NAMES)}"]
        for kind in dict.fromkeys(row["kind"] for row in cases.values()):
            counts = Counter(row["status"] for row in cases.values() if row["kind"] == kind)
            lines.append(f"| {kind} | {' | '.join(str(counts[status]) for status in _NAMES)} |")
        for status in ("wrong", "slow", "refused"):
            of_status = {name: row for name, row in sorted(cases.items()) if row["status"] == status}
            if of_status:
                lines += ["", f"### {_NAMES[status].capitalize()}", "", "| architecture | reason |", "| --- | --- |"]
                lines += [f"| {name} | {row['reason'].replace('|', ' ')[:300]} |" for name, row in of_status.items()]
        lines += [
            "",
            "### Works",
            "",
            ", ".join(sorted(name for name, row in cases.items() if row["status"] == "works")),
        ]
        left = sorted(name for name, row in cases.items() if row["status"] == "plain")
        lines += ["", "### Does not train plainly with the example of the rules", "", ", ".join(left)]
    return lines
