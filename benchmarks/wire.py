"""Measure what wire formats gain on slow links: seconds of a batch in full precision, as bf16, and as int8.

Two stages run in two processes, with a limited link in each direction. Each sleeps for as long as a device would
compute, once in a forward and twice in a backward, so that the cores are free for the engine. Messages and their
compression are real. All formats take turns in the same processes, round by round, and a ratio is the median of the
ratios of the rounds. One thread per process.

    python benchmarks/wire.py                            # half a minute; limited links need root
    python benchmarks/wire.py --forward-ms 40            # a forward and a backward take longer than a transfer
    python benchmarks/wire.py --megabits 1000 --forward-ms 1
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import connected, launch, parser, table, timed, write
from benchmarks.models import SleepingBlock, TwoLayers
from benchmarks.one_pipeline import STEP, OnePipeline
from lightning_avgpipe.capture.wire_format import FORMATS, Format, wire_bytes
from lightning_avgpipe.schedule import BACKWARD, FORWARD, build

MICROBATCHES, ROUNDS = 16, 9
_FORMATS: tuple[Format | None, ...] = (None, *FORMATS)
_ROWS, _WIDTH = 256, 1024  # of a micro-batch's values: 1 MiB in float32


def measure(forward_s: float) -> dict[str, Any]:
    """In each process: seconds of a batch in each format and round, and the bytes of its values."""
    torch.manual_seed(0)
    model = TwoLayers(SleepingBlock(_WIDTH), SleepingBlock(_WIDTH))
    parts = [(torch.randn(_ROWS, _WIDTH), 0) for _ in range(MICROBATCHES)]
    schedule = build("advance_forward", 2, MICROBATCHES, 2)
    with connected() as cluster:
        ours = OnePipeline(cluster, model, ["second"], parts)
        model.first.rest_s = model.second.rest_s = {FORWARD: forward_s, BACKWARD: 2 * forward_s}
        step = ours.pipeline.steps[STEP]

        def iterate(wire: Format | None) -> None:
            ours.pipeline.steps[STEP] = replace(step, wire_formats=[wire])
            model.zero_grad()
            ours.run(schedule)

        seconds = timed(cluster, {str(wire): partial(iterate, wire) for wire in _FORMATS}, ROUNDS)
    sends = ours.plan.stages[0].sends
    nbytes = {str(wire): MICROBATCHES * sum(wire_bytes(value, wire) for value in sends) for wire in _FORMATS}
    return {"seconds": seconds, "bytes": nbytes}


def compared(found: dict[str, Any]) -> str:
    """One line per format."""
    rows = []
    for name, seconds in found["seconds"].items():
        ratio = statistics.median(a / b for a, b in zip(found["seconds"]["None"], seconds, strict=True))
        rows.append((name, f"{found['bytes'][name] / 1e6:.2f}", f"{statistics.median(seconds):.3f} s", f"{ratio:.2f}x"))
    return table(["format", "MB a batch, each way", "median of a batch", "times as fast"], rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--megabits", type=int, default=100, help="per second, of the links")
    arguments.add_argument("--forward-ms", type=float, default=5.0, help="of a micro-batch on a stage")
    options = arguments.parse_args()
    found = launch(measure, (options.forward_ms / 1e3,), 2, options.megabits)[0]
    print(f"links of {options.megabits} Mbit/s, {options.forward_ms:g} ms of a forward\n\n{compared(found)}")
    write(options, found)


if __name__ == "__main__":
    main()
