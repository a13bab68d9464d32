"""Measure seconds of a batch and memory of a process for one system on one link, with a process for each stage.

``python -m benchmarks.paper`` launches this file once for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import TIMEOUT, Resident, add_options, begin, launch
from benchmarks.paper.peers import PEERS, NotPossible
from benchmarks.paper.settings import MICROBATCHES
from benchmarks.paper.slowed import SlowDevice
from benchmarks.paper.workloads import Workload, workloads
from lightning_avgpipe import Averaging, AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.tuning import Setting

__all__ = ["OURS", "TUNING", "Case", "measure"]

OURS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "afab"},
    "1f1b": {"schedule": "1f1b"},
    "pipedream": {"weight_policy": "stash"},
    "2bw": {"weight_policy": "2bw"},
}
TUNING = "tuning"
_EDGE = 3  # steps at either end that are not counted: a plan is made, pipelines fill and drain


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        workload: name of the workload.
        devices: number of processes, one for each stage.
        slowness: how many times as slow as a core each device is.
        system: name of the system.
        folder: folder of the data.
        steps: number of steps that are timed.
        seed: seed of weights and data.
        num_microbatches: M of all systems but AvgPipe.
        setting: fields of AvgPipe's setting; None: another system.
    """

    workload: str
    devices: int
    slowness: float
    system: str
    folder: str
    steps: int
    seed: int
    num_microbatches: int = MICROBATCHES
    setting: dict[str, Any] | None = None

    @classmethod
    def of(cls, workload: Workload, system: str, setting: Setting | None, folder: Path, steps: int, seed: int) -> Case:
        """Return the case of a system by its name in results, which may end with its number of micro-batches."""
        name, _, count = system.partition(" M=")
        given = (setting, MICROBATCHES) if setting is not None else (None, int(count or MICROBATCHES))
        return cls(
            workload.name, workload.devices, workload.slowness, "avgpipe" if setting is not None else name, str(folder),
            steps, seed, given[1], None if given[0] is None else asdict(given[0]),
        )  # fmt: skip


def measure(case: Case, link: int | None, limit_s: float) -> dict[str, Any]:
    """Measure a system in processes of their own.

    Args:
        case: what is measured.
        link: megabits per second; None: no limit.
        limit_s: longest time.
    Returns:
        ``batch_s``, ``memory`` in MiB of each process above what it held before the model was built, and ``busy``, the
        share of time for which each device computes, where devices are slowed. Of ``TUNING`` ``profile``, and
        ``rolls``, whether parallel models can; or ``refused``, why it cannot be.
    Raises:
        SystemExit: a process failed.
    """
    return launch(__file__, ["--work", json.dumps(asdict(case))], case.devices, link, limit_s)


class _Clock(L.Callback):
    """A record of when each step ended, and for how long the device had computed until then."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device
        self._ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self._ends.append((time.perf_counter(), self._device.busy_s))

    def found(self, models: int) -> dict[str, Any]:
        """Return seconds of a batch of one model, and the share of time for which the device computed."""
        ends = self._ends[_EDGE:-_EDGE]
        seconds, busy_s = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
        found = {"batch_s": seconds / (len(ends) - 1) / models}
        return found if self._device.factor == 1 else {**found, "busy": busy_s / seconds}


def _strategy(workload: Workload, case: Case, setting: Setting | None, device: SlowDevice) -> Any:
    if case.system == "ddp":
        slowed = {} if device.factor == 1 else device.take_ddp()
        return DDPStrategy(broadcast_buffers=False, **slowed)  # hidden states are each process's own
    if device.factor != 1:
        device.take_engine()
    common: dict[str, Any] = {**workload.options, "timeout": 120, "costs_cache": None, "verify": False}
    if case.system == TUNING:
        return AvgPipeStrategy(**common, averaging=Averaging(rolling="auto"))
    common["num_microbatches"] = case.num_microbatches
    if setting is not None:
        common |= {
            "num_microbatches": setting.num_microbatches, "num_pipelines": setting.num_pipelines,
            "advance": setting.advance, "averaging": Averaging(rolling=setting.rolling),
        }  # fmt: skip
    return AvgPipeStrategy(**common, **OURS.get(case.system, {}))


def _fit(workload: Workload, case: Case, device: SlowDevice) -> dict[str, Any]:
    """Train with a Trainer."""
    setting = None if case.setting is None else Setting(**case.setting)
    models = 1 if setting is None else setting.num_pipelines
    share = case.devices if case.system == "ddp" else 1
    loader = _loader(workload, Path(case.folder), workload.batch_size // share, models)
    above, clock = Resident(), _Clock(device)
    with tempfile.TemporaryDirectory() as made:
        # several models are looked at, but cost so much that one is taken, for which the data is
        tuners = [AvgPipeTuner(2, samples_factor=100.0, dirpath=made)] if case.system == TUNING else []
        trainer = L.Trainer(
            strategy=_strategy(workload, case, setting, device), accelerator="cpu", devices=case.devices, max_epochs=-1,
            max_steps=1 if tuners else case.steps + 2 * _EDGE + 1, gradient_clip_val=workload.clip, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[clock, *tuners],
        )  # fmt: skip
        trainer.fit(workload.module(models), loader)
    if tuners:
        found = tuners[0].result
        rolls = any(candidate.setting.rolling for candidate in found.candidates)
        return {"profile": found.profile.to_json(), "rolls": rolls}
    return {**clock.found(models), "memory": above.peak()}


def _loader(workload: Workload, folder: Path, batch_size: int, models: int) -> Any:
    data = workload.data(folder, batch_size, models)
    data.setup("fit")
    return data.train_dataloader()


def _run_peer(workload: Workload, case: Case, device: SlowDevice) -> dict[str, Any]:
    """Train with the stages written by hand."""
    loader = _loader(workload, Path(case.folder), workload.batch_size, 1)
    above, clock = Resident(), _Clock(device)
    model = workload.module(1)
    step = PEERS[case.system](workload, model, next(iter(loader)), case.num_microbatches, device)
    for batch in islice(_again(loader), case.steps + 2 * _EDGE + 1):
        step(batch)
        clock.on_train_batch_end()
    return {**clock.found(1), "memory": above.peak()}


def _again(loader: Any) -> Any:
    while True:
        yield from loader


def _work(options: argparse.Namespace) -> None:
    """Measure in each process, as torchrun would start it; rank 0 writes the result."""
    rank, size = begin()
    case = Case(**json.loads(options.work))
    workload = workloads(case.devices, case.slowness)[case.workload]
    torch.manual_seed(case.seed)
    device = SlowDevice(case.slowness)
    if case.slowness != 1:
        device.take_optimizers()
    try:
        found = (_run_peer if case.system in PEERS else _fit)(workload, case, device)
    except (AvgPipeError, NotPossible) as error:
        found = {"refused": str(error).split("\n")[0]}
    if "memory" in found:
        for name in ("memory", "busy"):
            if name in found:
                found[name] = _gathered(rank, size, name, found[name])
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        options.result.write_text(json.dumps(found))


def _gathered(rank: int, size: int, name: str, value: float) -> list[float]:
    """Return what each process has, on rank 0, by a store of its own: engines close their process groups or do not."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1 + (name == "busy")
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
