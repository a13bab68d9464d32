"""Try every architecture of other libraries with two, three and four stages, and write down what works.

Usage::

    python -m benchmarks.coverage [--source timm diffusers] [--stages 3] [--first] [--costs flops]

Each architecture runs in a process of its own, with a time limit. Results are appended to ``coverage.jsonl``, so that
an interrupted run goes on where it was. ``--first`` tries each body with one head only. Sources that train with
``pytorch_lightning`` (lightly, darts, neuralforecast) are left out, unless a run is for them alone.
``docs/coverage.md`` shows the results as tables.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from pathlib import Path

import benchmarks.coverage.stand_ins  # noqa: F401  (first: others import torchvision)

if not {"lightly", "darts", "neuralforecast"}.isdisjoint(sys.argv):
    import pytorch_lightning  # noqa: F401  (first: these train with it, so it is to be chosen)

# isort: split
from benchmarks.coverage.runner import Results, run
from benchmarks.coverage.table import write

MODULES = {
    "transformers_source": ["transformers"],
    "image_libraries": ["timm", "torchvision", "segmentation", "monai", "lightly", "anomalib"],
    "diffusers_source": ["diffusers"],
    "geometric_source": ["geometric"],
    "sequence_libraries": ["x_transformers", "lightning", "forecasting", "darts", "neuralforecast"],
}
SOURCES = {name: f"benchmarks.coverage.{module}" for module, names in MODULES.items() for name in names}
TABLE = Path(__file__).parents[2] / "docs" / "coverage.md"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=SOURCES, nargs="*", default=list(SOURCES))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--costs", default="measured", help="'flops' is faster")
    parser.add_argument("--first", action="store_true", help="each body with one head")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for each architecture and number of stages")
    options = parser.parse_args()
    results = Results(Path("coverage.jsonl"))
    for name in options.source:
        try:
            source = getattr(importlib.import_module(SOURCES[name]), f"of_{name}")()
            found = list(source.cases)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        cases = [
            (case, wanted)
            for case in found
            if (case.first or not options.first) and (wanted := results.wanted(source.name, case.name, options.stages))
        ]
        random.Random(0).shuffle(cases)  # what an interrupted run has found stands for all
        run(source, cases, results, options.costs, options.limit_s)
    write(results, TABLE)


if __name__ == "__main__":
    main()
