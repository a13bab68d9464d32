"""What does a Trainer cost around the engine? A transformer in two processes, beside ddp and beside the simulator.

    python benchmarks/trainer.py                        # some ten minutes on two cores
    python benchmarks/trainer.py --quick

The same LightningModule and the same samples per batch for each of

- ``ddp``, half of the batch in each process;
- ``strategy="avgpipe"`` with M micro-batches, one pipeline and N, with a barrier and rolling.

Printed are seconds per batch, from the end of one step to that of the next, as multiples of ddp's; and of pipelines
with a barrier beside the simulator, which is given the times of the actions and messages of the very iterations that
are compared with it, medians of each, and knows nothing of Lightning, optimizers and averaging. All sides take turns in
the same processes, with one thread each; medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import add_options, begin, in_turns, launch, quiet_trainer, timeline_of, write
from benchmarks.models import SIZES, LanguageModel, Size
from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.engine.recording import Recorder
from lightning_avgpipe.schedule import StageCosts, simulate

PROCESSES = 2
EDGE = 4  # steps at the begin of an epoch that are not counted


class _Module(L.LightningModule):
    """The model as a user has it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.net = LanguageModel(size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net.training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-4)


class _Clock(L.Callback):
    """Times of steps, and what the simulator makes of each.

    Attributes:
        seconds: from the end of one step to that of the next.
        simulated_s: of the same iterations; none of what is no pipeline, or rolls.
    """

    def __init__(self, records: bool) -> None:
        self.seconds: list[float] = []
        self.simulated_s: list[float] = []
        self._records = records
        self._recorder: Recorder | None = None
        self._before = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._records:
            cluster = trainer.strategy.cluster  # type: ignore[attr-defined]
            self._recorder = Recorder(cluster.rank, cluster.device)
            self._seen = trainer.strategy.observers.having(self._recorder)  # type: ignore[attr-defined]
            self._seen.__enter__()
        self._before = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._before)
        if self._recorder is None:
            return
        self._seen.__exit__(None, None, None)
        timeline = timeline_of(trainer.strategy.cluster, self._recorder)  # type: ignore[attr-defined]
        if timeline is not None:
            again = simulate([timeline.schedule()] * timeline.num_pipelines, StageCosts.measured(timeline))
            self.simulated_s.append(again.iteration_s)


def sides(microbatches: int, counts: Sequence[int]) -> dict[str, dict[str, Any] | None]:
    """Arguments of each side's strategy; None: ddp."""
    found: dict[str, dict[str, Any] | None] = {"ddp": None, "N=1": {"num_microbatches": microbatches}}
    for n in counts:
        many = {"num_microbatches": microbatches, "num_pipelines": n}
        found |= {f"N={n}": many, f"rolling N={n}": {**many, "averaging": Averaging(rolling=True)}}
    return found


def run(side: dict[str, Any] | None, size: Size, steps: int, records: bool) -> tuple[float, float | None]:
    """Seconds per batch, and those that the simulator allows; medians of the steps."""
    count = 1 if side is None else side.get("num_pipelines", 1)
    batch = size.samples * size.num_microbatches
    text = torch.randint(size.vocabulary, (steps * count * batch, size.length + 1))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    clock = _Clock(records)
    trainer = quiet_trainer(
        strategy="ddp" if side is None else AvgPipeStrategy(split_points=[f"net.blocks.{size.layers // 2}"], **side),
        devices=PROCESSES,
        callbacks=[clock],
    )
    torch.manual_seed(0)
    trainer.fit(_Module(size), DataLoader(data, batch // (PROCESSES if side is None else 1)))
    simulated = [seconds / count for seconds in clock.simulated_s[EDGE:]]
    return (
        statistics.median(clock.seconds[EDGE:]) / count,
        statistics.median(simulated) if simulated else None,
    )


def work(options: argparse.Namespace) -> None:
    """What each process does, as torchrun would start it; rank 0 writes the results."""
    rank, _ = begin()
    size, all_sides = SIZES[options.size], sides(SIZES[options.size].num_microbatches, options.pipelines)
    found: dict[str, list[Any]] = {name: [] for name in all_sides}
    for name in in_turns(list(all_sides), options.rounds):
        side = all_sides[name]
        seconds, _ = run(side, size, options.steps, records=False)
        records = side is not None and not side.get("averaging", Averaging()).rolling
        recorded, simulated = run(side, size, options.steps, records=True) if records else (None, None)
        found[name].append((seconds, recorded, simulated))
    if rank == 0:
        options.result.write_text(json.dumps(found))


def table(found: dict[str, list[Any]]) -> str:
    """Markdown: a row per side, medians of the rounds' ratios."""
    lines = ["| | seconds a batch | over ddp | over the simulator |", "| --- | --- | --- | --- |"]
    for name, rounds in found.items():
        over = statistics.median(mine[0] / ddp[0] for mine, ddp in zip(rounds, found["ddp"], strict=True))
        ratios = [recorded / simulated for _, recorded, simulated in rounds if simulated]
        beside = f"{statistics.median(ratios):.3f}" if ratios else ""
        lines.append(f"| {name} | {statistics.median(each[0] for each in rounds):.3f} | {over:.2f} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--pipelines", nargs="+", type=int, default=[2], help="N, beside one")
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="of all sides; medians count")
    parser.add_argument("--quick", action="store_true", help="the small model, one round")
    add_options(parser, 1500.0, "run")
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds, options.steps = "small", 1, 8
    if options.result is not None:
        work(options)
        return
    arguments = ["--size", options.size, "--steps", str(options.steps), "--rounds", str(options.rounds)]
    arguments += ["--pipelines", *map(str, options.pipelines)]
    found = launch(__file__, arguments, PROCESSES, None, options.limit_s)
    print(table(found))
    write(options, found)


if __name__ == "__main__":
    main()
