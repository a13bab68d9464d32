"""Write the results of coverage as a page."""

from __future__ import annotations

from collections import Counter, defaultdict
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
_INTRODUCTION = """\
`python -m benchmarks.coverage` trains every architecture twice: with Lightning's accumulation of gradients in one
process without this package, and with `Trainer(strategy=AvgPipeStrategy(num_stages=K))` at default options in one
process. It works if losses, and all weights and buffers by name, are the same after three steps: bit for bit, or to
rounding (where parameters are tied their gradients are summed in another order). Some models draw random numbers, or
make a small rounding large. These are compared step by step by `verify`, which draws the same numbers; those of
`transformers` with themselves in another number of stages. Configurations are the default ones with smaller numbers,
`use_cache=True` included. Architectures that do not train without stages with the example that the rules make are not
counted in shares. A run may be interrupted: the page counts what was tried. With `--first` each body is tried with one
head. `--costs flops` is faster than measuring, which is the default. A library that is not installed is left out.
""".splitlines()


def write(results: Results, path: Path) -> None:
    """Write the page. What it says of libraries of which there are no results stays."""
    by_source = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for row in results.rows.values():
        by_source[row["source"], row["version"]].append(row)
    sections = _sections(path)
    for (source, version), rows in sorted(by_source.items()):
        sections[source] = "\n".join([f"## {source} {version}", "", *_source(rows)])
    introduction = "\n".join(["# Coverage", "", *_INTRODUCTION])
    path.write_text("\n\n".join([introduction, *(sections[source] for source in sorted(sections))]) + "\n")


def _sections(path: Path) -> dict[str, str]:
    """By library what the page says of it."""
    _, *found = path.read_text().split("\n## ") if path.exists() else [""]
    return {section.split(maxsplit=1)[0]: f"## {section.strip()}" for section in found}


def _source(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"| | {' | '.join(_NAMES.values())} | works of what trains |", f"| --- |{' --- |' * (len(_NAMES) + 1)}"]
    for number in sorted({row["stages"] for row in rows}):
        of_number = [row for row in rows if row["stages"] == number]
        lines.append(_counts(f"**{number} stages**", of_number))
        for costs in sorted({row["costs"] for row in of_number}):
            of_costs = [row for row in of_number if row["costs"] == costs]
            lines.append(_counts(f'*of these with `costs="{costs}"`*', of_costs))
        for kind in dict.fromkeys(row["kind"] for row in of_number):
            lines.append(_counts(kind, [row for row in of_number if row["kind"] == kind]))
    for status in ("wrong", "slow", "refused", "plain"):
        reasons = defaultdict[tuple[str, str], list[int]](list)
        for row in rows:
            if row["status"] == status:
                reason = row.get("reason", "").replace("|", " ")[:300]
                reasons[row["name"], reason if status != "plain" else reason[:120]].append(row["stages"])
        if reasons:
            lines += ["", f"### {_NAMES[status].capitalize()}", "", "| architecture | stages | reason |"]
            lines += ["| --- | --- | --- |"]
            lines += [f"| {n} | {', '.join(map(str, sorted(k)))} | {why} |" for (n, why), k in sorted(reasons.items())]
    works = {row["name"] for row in rows} - {row["name"] for row in rows if row["status"] != "works"}
    return [*lines, "", "### Works", "", ", ".join(sorted(works))]


def _counts(title: str, rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["status"] for row in rows)
    trains = len(rows) - counts["plain"]
    share = f"{counts['works'] / trains:.1%}" if trains else "-"
    return f"| {title} | {' | '.join(str(counts[status]) for status in _NAMES)} | {share} |"
