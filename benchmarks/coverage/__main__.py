"""Try every architecture of other libraries with two, three and four stages, and write down what works.

Usage::

    python -m benchmarks.coverage [--source timm diffusers] [--kind "causal language model"] [--only Llama] [--again]

Each architecture runs in a process of its own, with a time limit. What was found is appended to ``coverage.jsonl``, so
that an interrupted run goes on where it was; ``--again refused`` tries once more what had this outcome. ``--first``
tries each body with one head only. Sources that train with ``pytorch_lightning`` (lightly, darts, neuralforecast) are
left out, unless a run is for them alone. ``docs/coverage.md`` shows all as a table.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import sys
from pathlib import Path

import benchmarks.coverage.stand_ins  # noqa: F401  (first: others import torchvision)

if not {"lightly", "darts", "neuralforecast"}.isdisjoint(sys.argv):
    import pytorch_lightning  # noqa: F401  (first: these train with it, so it is to be chosen)

# isort: split
from benchmarks.coverage.runner import Results, run
from benchmarks.coverage.table import write

SOURCES = {
    name: f"benchmarks.coverage.{name}_source"
    for name in (
        "transformers", "timm", "torchvision", "diffusers", "geometric", "segmentation", "monai", "x_transformers",
        "lightning", "lightly", "anomalib", "forecasting", "darts", "neuralforecast",
    )
}  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=SOURCES, nargs="*", default=list(SOURCES))
    parser.add_argument("--kind", help="a regular expression of kinds")
    parser.add_argument("--only", help="a regular expression of names")
    parser.add_argument("--again", nargs="*", default=[], help="outcomes that are tried once more, or 'all'")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--costs", default="measured", help="'flops' is faster")
    parser.add_argument("--accelerator", default="cpu", help="as in the Trainer; one device")
    parser.add_argument("--first", action="store_true", help="each body with one head")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=90.0, help="for each architecture and number of stages")
    parser.add_argument("--results", type=Path, default=Path("coverage.jsonl"))
    parser.add_argument("--table", type=Path, default=DOCS / "coverage.md")
    options = parser.parse_args()
    results = Results(options.results)
    for name in options.source:
        try:
            source = importlib.import_module(SOURCES[name]).Source()
            found = list(source.cases())
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        cases = [
            (case, wanted)
            for case in found
            if re.search(options.kind or "", case.kind)
            and re.search(options.only or "", case.name)
            and (case.first or not options.first)
            and (wanted := results.wanted(source.name, case.name, options.stages, options.again))
        ]
        random.Random(0).shuffle(cases)  # what an interrupted run has found stands for all
        run(source, cases, results, options.costs, options.accelerator, options.workers, options.limit_s)
    write(results, options.table)


if __name__ == "__main__":
    main()
