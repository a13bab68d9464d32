"""What wire formats save on slow links: seconds of a batch with values as they are, as bf16, and as int8.

Two stages in two processes that a limited link joins in each direction. Each sleeps for as long as a device would
compute, once in a forward and twice in a backward, so that the cores are free for the engine; what travels, and its
compression, is real. All formats take turns in the same processes, round by round, and a ratio is the median of the
ratios of the rounds. One thread per process.

    python benchmarks/wire.py                            # half a minute; limited links need root
    python benchmarks/wire.py --forward-ms 40            # a forward and a backward take longer than a transfer
    python benchmarks/wire.py --megabits 1000 --forward-ms 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import network
from benchmarks.harness import add_options, connected, in_turns, launch, loaded, write
from benchmarks.models import Sleep
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.capture.wire_format import FORMATS, Format, wire_bytes
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.schedule import BACKWARD, FORWARD, build
from lightning_avgpipe.utils.random_streams import RandomKey

STEP = "training_step"
_FORMATS: tuple[Format | None, ...] = (None, *FORMATS)
_ROWS, _WIDTH = 256, 1024  # of a micro-batch's values: 1 MiB in float32


class Sleeper(nn.Module):
    """A layer that takes a device's time and no core's."""

    def __init__(self) -> None:
        super().__init__()
        self.rest_s = {FORWARD: 0.0, BACKWARD: 0.0}
        self.weight = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x * self.weight, self.rest_s)
        return slept


class Model(nn.Module):
    """A stage of one layer on each process."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sleeper(), Sleeper()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(x)).square().mean()  # type: ignore[no-any-return]


def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a batch in each format and round, and the bytes of its values."""
    torch.manual_seed(0)
    model, count = Model(), options.microbatches
    parts = [(torch.randn(_ROWS, _WIDTH), i) for i in range(count)]
    pipeline, plan = loaded(cluster, model, ["second"], parts[0])
    seconds_of = {FORWARD: options.forward_ms / 1e3, BACKWARD: 2 * options.forward_ms / 1e3}
    model.first.rest_s = model.second.rest_s = seconds_of
    schedule = build("advance_forward", 2, count, 2)
    step = pipeline.steps[STEP]
    seconds: dict[str, list[float]] = {str(wire): [] for wire in _FORMATS}
    for i, wire in enumerate(in_turns(_FORMATS, 1 + options.rounds)):
        pipeline.steps[STEP] = replace(step, wires=[wire])
        model.zero_grad()
        task = Task(
            lambda _, *args: model.training_step(*args), parts, lambda _, loss: loss, RandomKey(0, i),
            around=lambda _: nullcontext(),
        )  # fmt: skip
        with intercepting():
            cluster.group.barrier()
            before = time.perf_counter()
            run_together([pipeline], STEP, [schedule], [task])
            cluster.group.barrier()
            took = time.perf_counter() - before
        if i >= len(_FORMATS):  # the first round does not count
            seconds[str(wire)].append(took)
    sends = plan.stages[0].sends
    return {
        "seconds": seconds,
        "bytes": {str(wire): count * sum(wire_bytes(value, wire) for value in sends) for wire in _FORMATS},
    }


def table(found: dict[str, Any]) -> str:
    """One line per format."""
    lines = ["format   MB a batch, each way   median of a batch   times as fast"]
    for name, seconds in found["seconds"].items():
        ratio = statistics.median(a / b for a, b in zip(found["seconds"]["None"], seconds, strict=True))
        megabytes, median = found["bytes"][name] / 1e6, statistics.median(seconds)
        lines.append(f"{name:6s} {megabytes:22.2f} {median:17.3f} s {ratio:14.2f}x")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--megabits", type=int, default=100, help="per second, of the links; 0: free links")
    result.add_argument("--forward-ms", type=float, default=5.0, help="of a micro-batch on a stage")
    result.add_argument("--microbatches", type=int, default=16)
    result.add_argument("--rounds", type=int, default=9)
    add_options(result, 600.0, "pair of processes")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.result is not None:
        with connected() as cluster:
            found = measure(cluster, options)
        if cluster.rank == 0:
            options.result.write_text(json.dumps(found))
        return
    if options.megabits and not network.available():
        raise SystemExit("limited links are network namespaces, which need root, ip and tc; or use --megabits 0")
    found = launch(__file__, arguments, 2, options.megabits or None, options.limit_s)
    found |= {"cores": os.cpu_count(), "torch": torch.__version__, "megabits": options.megabits}
    links = f"links of {options.megabits} Mbit/s" if options.megabits else "free links"
    print(f"{links}, {options.forward_ms:g} ms of a forward, {options.microbatches} micro-batches\n{table(found)}")
    write(options, found)


if __name__ == "__main__":
    main(sys.argv[1:])
