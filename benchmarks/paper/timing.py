"""Seconds of a batch and memory of a process for one system on one link: a process for each stage, real arithmetic.

``python -m benchmarks.paper`` launches this file once for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import TIMEOUT, Resident, add_options, begin, launch
from benchmarks.paper.peers import PEERS, STAGES, NotPossible
from benchmarks.paper.settings import MICROBATCHES
from benchmarks.paper.workloads import WORKLOADS, Workload
from lightning_avgpipe import Averaging, AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.tuning import Setting

__all__ = ["OURS", "TUNING", "measure"]

OURS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "afab"},
    "1f1b": {"schedule": "1f1b"},
    "pipedream": {"weight_policy": "stash"},
    "2bw": {"weight_policy": "2bw"},
}
TUNING = "tuning"
_EDGE = 3  # steps at either end that are not counted: a plan is made, pipelines fill and drain


def measure(
    workload: Workload,
    system: str,
    setting: Setting | None,
    folder: Path,
    link: int | None,
    steps: int,
    seed: int,
    limit_s: float,
) -> dict[str, Any]:
    """Of a system: ``batch_s``, and ``memory`` in MiB of each process above what it held before the model was built;
    of ``TUNING`` ``profile``, and ``rolls``, whether parallel models can; or ``refused``, why it cannot be.

    Args:
        setting: of AvgPipe; None: another system.
        folder: of the data.
        link: megabits per second; None: no limit.
        steps: that are timed.
        limit_s: longest time.
    Raises:
        SystemExit: a process failed.
    """  # fmt: skip
    given = None if setting is None else asdict(setting)
    work = json.dumps([workload.name, system, given, str(folder), steps, seed])
    return launch(__file__, ["--work", work], STAGES, link, limit_s)


class _Clock(L.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        ends = self.ends[_EDGE:-_EDGE]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def _strategy(workload: Workload, system: str, setting: Setting | None) -> Any:
    if system == "ddp":
        return DDPStrategy(broadcast_buffers=False)  # hidden states are each process's own
    common: dict[str, Any] = {**workload.options, "timeout": 120, "costs_cache": None}
    if system == TUNING:
        return AvgPipeStrategy(**common, averaging=Averaging(rolling="auto"))
    common["num_microbatches"] = MICROBATCHES
    if setting is not None:
        common |= {
            "num_microbatches": setting.num_microbatches, "num_pipelines": setting.num_pipelines,
            "advance": setting.advance, "averaging": Averaging(rolling=setting.rolling),
        }  # fmt: skip
    return AvgPipeStrategy(**common, **OURS.get(system, {}))


def _fit(workload: Workload, system: str, setting: Setting | None, folder: Path, steps: int) -> dict[str, Any]:
    """With a Trainer."""
    models = 1 if setting is None else setting.num_pipelines
    loader = _loader(workload, folder, workload.batch_size // (STAGES if system == "ddp" else 1), models)
    above, clock = Resident(), _Clock()
    with tempfile.TemporaryDirectory() as made:
        # two models are looked at, but cost so much that one is taken, for which the data is
        tuners = [AvgPipeTuner(2, samples_factor=100.0, dirpath=made)] if system == TUNING else []
        trainer = L.Trainer(
            strategy=_strategy(workload, system, setting), accelerator="cpu", devices=STAGES, max_epochs=-1,
            max_steps=1 if tuners else steps + 2 * _EDGE + 1, gradient_clip_val=workload.clip, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[clock, *tuners],
        )  # fmt: skip
        trainer.fit(workload.module(models), loader)
    if tuners:
        found = tuners[0].result
        rolls = any(candidate.setting.rolling for candidate in found.candidates)
        return {"profile": found.profile.to_json(), "rolls": rolls}
    return {"batch_s": clock.seconds() / models, "memory": above.peak()}


def _loader(workload: Workload, folder: Path, batch_size: int, models: int) -> Any:
    data = workload.data(folder, batch_size, models)
    data.setup("fit")
    return data.train_dataloader()


def _run_peer(workload: Workload, system: str, folder: Path, steps: int) -> dict[str, Any]:
    """With the stages written by hand."""
    loader = _loader(workload, folder, workload.batch_size, 1)
    above, clock = Resident(), _Clock()
    step = PEERS[system](workload, workload.module(1))
    for batch in islice(_again(loader), steps + 2 * _EDGE + 1):
        step(batch)
        clock.on_train_batch_end()
    return {"batch_s": clock.seconds(), "memory": above.peak()}


def _again(loader: Any) -> Any:
    while True:
        yield from loader


def _work(options: argparse.Namespace) -> None:
    """What each process does, as torchrun would start it; rank 0 writes the result."""
    rank, size = begin()
    name, system, given, folder, steps, seed = json.loads(options.work)
    setting = None if given is None else Setting(**given)
    workload = WORKLOADS[name]
    torch.manual_seed(seed)
    try:
        if system in PEERS:
            found = _run_peer(workload, system, Path(folder), steps)
        else:
            found = _fit(workload, system, setting, Path(folder), steps)
    except (AvgPipeError, NotPossible) as error:
        found = {"refused": str(error).split("\n")[0]}
    if "memory" in found:
        found["memory"] = _gathered(rank, size, found["memory"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        options.result.write_text(json.dumps(found))


def _gathered(rank: int, size: int, value: float) -> list[float]:
    """What each process has, on rank 0, by a store of its own: engines close their process groups or do not."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    store = dist.TCPStore(*place, size, is_master=rank == 0, timeout=TIMEOUT)  # waits until all are there
    store.set(str(rank), str(value))
    values = [float(store.get(str(r))) for r in range(size)]
    store.add("read", 1)
    while rank == 0 and store.add("read", 0) < size:  # it serves the others until they have read
        time.sleep(0.01)
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", help=argparse.SUPPRESS)
    add_options(parser, 300.0, "system")
    _work(parser.parse_args())
