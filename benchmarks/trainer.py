"""Measure what a Trainer costs around the engine: a transformer in two processes, compared with ddp and the simulator.

    python benchmarks/trainer.py                        # some ten minutes on two cores
    python benchmarks/trainer.py --quick

The same LightningModule has the same samples per batch with each of

- ``ddp``, half of the batch in each process;
- ``strategy="avgpipe"`` with M micro-batches, one pipeline and N, with a barrier and rolling.

Printed are seconds per batch, from the end of one step to that of the next, and their ratio to ddp's. Pipelines with a
barrier are also compared with the simulator. It is given the median times of the actions and messages of the same
iterations, and knows nothing of Lightning, optimizers and averaging. All sides take turns in the same processes, with
one thread each. Numbers are medians of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import in_turns, launch, parser, quiet_trainer, table, timeline_of, write
from benchmarks.models import SIZES, LanguageModel, Size
from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.engine.recording import Recorder
from lightning_avgpipe.schedule import StageCosts, simulate

PROCESSES, N = 2, 2  # N: pipelines beside one
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
        simulated_s: of the same iterations; none of what is not a pipeline, or rolls.
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
            self._seen = trainer.strategy.observers.with_added(self._recorder)  # type: ignore[attr-defined]
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


def sides(microbatches: int) -> dict[str, dict[str, Any] | None]:
    """Arguments of each side's strategy; None: ddp."""
    many = {"num_microbatches": microbatches, "num_pipelines": N}
    rolling = {**many, "averaging": Averaging(rolling=True)}
    return {"ddp": None, "N=1": {"num_microbatches": microbatches}, f"N={N}": many, f"rolling N={N}": rolling}


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


def measure(size: Size, steps: int, rounds: int) -> dict[str, list[Any]]:
    """In each process: seconds of a batch, and recorded and simulated ones, of each side in each round."""
    all_sides = sides(size.num_microbatches)
    found: dict[str, list[Any]] = {name: [] for name in all_sides}
    for name in in_turns(list(all_sides), rounds):
        side = all_sides[name]
        seconds, _ = run(side, size, steps, records=False)
        records = side is not None and not side.get("averaging", Averaging()).rolling
        recorded, simulated = run(side, size, steps, records=True) if records else (None, None)
        found[name].append((seconds, recorded, simulated))
    return found


def compared(found: dict[str, list[Any]]) -> str:
    """A row per side, medians of the rounds' ratios."""
    rows = []
    for name, rounds in found.items():
        over = statistics.median(mine[0] / ddp[0] for mine, ddp in zip(rounds, found["ddp"], strict=True))
        ratios = [recorded / simulated for _, recorded, simulated in rounds if simulated]
        beside = f"{statistics.median(ratios):.3f}" if ratios else ""
        rows.append((name, f"{statistics.median(each[0] for each in rounds):.3f}", f"{over:.2f}", beside))
    return table(["", "seconds a batch", "over ddp", "over the simulator"], rows)


def main() -> None:
    options = parser(__doc__, quick="the small model, one round").parse_args()
    given = (SIZES["small"], 8, 1) if options.quick else (SIZES["large"], 10, 3)
    found = launch(measure, given, PROCESSES, limit_s=1500.0)[0]
    print(compared(found))
    write(options, found)


if __name__ == "__main__":
    main()
