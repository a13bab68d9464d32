"""Measure seconds of a batch and memory of a process for one system on one link, with a process for each stage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.harness import Clock, Resident, launch, quiet_trainer
from benchmarks.paper.peers import PEERS, NotPossible
from benchmarks.paper.settings import MICROBATCHES
from benchmarks.paper.slowed import SlowDevice
from benchmarks.paper.workloads import Workload, workloads
from lightning_avgpipe import Averaging, AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.tuning.profile import Setting, to_json

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
        setting: of AvgPipe; None: another system.
        replicas: of each stage of AvgPipe, as many as there are devices; empty: a stage on each device.
    """

    workload: str
    devices: int
    slowness: float
    system: str
    folder: Path
    steps: int
    seed: int
    setting: Setting | None = None
    replicas: tuple[int, ...] = ()


def measure(case: Case, link: int, limit_s: float) -> dict[str, Any]:
    """Measure a system in processes of their own.

    Args:
        case: what is measured.
        link: megabits per second.
        limit_s: longest time.
    Returns:
        ``batch_s``, ``memory`` in MiB of each process above what it held before the model was built, and ``busy``, the
        share of time for which each device computes, where devices are slowed. Of ``TUNING`` ``profile``, and
        ``rolls``, whether parallel models can; or ``refused``, why it cannot be.
    Raises:
        SystemExit: a process failed.
    """
    ranks = launch(_measured, (case,), case.devices, link, limit_s)
    return {**ranks[0], **{name: [found[name] for found in ranks] for name in ("memory", "busy") if name in ranks[0]}}


class _Clock(Clock):
    """A record of when each step ended, and for how long the device had computed until then."""

    def __init__(self, device: SlowDevice) -> None:
        super().__init__()
        self._device = device
        self._busy_s: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        self._busy_s.append(self._device.busy_s)

    def found(self, batches: int) -> dict[str, Any]:
        """Return seconds of a batch, given those of a step, and the share of time for which the device computed."""
        steps = self.seconds(_EDGE + 1, _EDGE)
        seconds, busy_s = sum(steps), self._busy_s[-_EDGE - 1] - self._busy_s[_EDGE]
        found = {"batch_s": seconds / len(steps) / batches}
        return found if self._device.factor == 1 else {**found, "busy": busy_s / seconds}


class _Beat(Profiler):
    """Tells a clock when each step has ended.

    A callback could read the module between steps, so that each process would send what its submodules have changed,
    such as the hidden states of an LSTM, to all others. Peers send none.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def start(self, action_name: str) -> None:
        """Begin an action."""

    def stop(self, action_name: str) -> None:
        """End an action."""
        if action_name == "run_training_batch":
            self._clock.on_train_batch_end()


def _strategy(workload: Workload, case: Case, device: SlowDevice) -> Any:
    if case.system == "ddp":
        slowed = {} if device.factor == 1 else device.take_ddp()
        return DDPStrategy(broadcast_buffers=False, **slowed)  # hidden states are each process's own
    if device.factor != 1:
        device.take_engine()
    common: dict[str, Any] = {**workload.options, "timeout": 120, "costs_cache": None, "verify": False}
    if case.system == TUNING:
        return AvgPipeStrategy(**common, averaging=Averaging(rolling="auto"))
    common["num_microbatches"] = MICROBATCHES
    if (setting := case.setting) is not None:
        common |= {
            "num_microbatches": setting.num_microbatches, "num_pipelines": setting.num_pipelines,
            "advance": setting.advance, "averaging": Averaging(rolling=setting.rolling, split_batches=setting.split),
        }  # fmt: skip
    if case.replicas:
        common["replicas"] = list(case.replicas)
    return AvgPipeStrategy(**common, **OURS.get(case.system, {}))


def _fit(workload: Workload, case: Case, device: SlowDevice) -> dict[str, Any]:
    """Train with a Trainer."""
    batches = 1 if case.setting is None else case.setting.batches
    share = case.devices if case.system == "ddp" else 1
    loader = _loader(workload, case.folder, workload.batch_size // share, batches)
    above, clock = Resident(), _Clock(device)
    with tempfile.TemporaryDirectory() as made:
        # several models are looked at, but cost so much that one is taken, for which the data is
        tuners = [AvgPipeTuner(2, samples_factor=100.0, dirpath=made)] if case.system == TUNING else []
        trainer = quiet_trainer(
            strategy=_strategy(workload, case, device), devices=case.devices, max_epochs=-1,
            max_steps=1 if tuners else case.steps + 2 * _EDGE + 1, gradient_clip_val=workload.clip,
            callbacks=tuners, profiler=_Beat(clock),
        )  # fmt: skip
        trainer.fit(workload.module(batches), loader)
    if tuners:
        found = tuners[0].result
        rolls = any(candidate.setting.rolling for candidate in found.candidates)
        return {"profile": to_json(found.profile), "rolls": rolls}
    return {**clock.found(batches), "memory": above.peak()}


def _loader(workload: Workload, folder: Path, batch_size: int, models: int) -> Any:
    data = workload.data(folder, batch_size, models)
    data.setup("fit")
    return data.train_dataloader()


def _run_peer(workload: Workload, case: Case, device: SlowDevice) -> dict[str, Any]:
    """Train with the stages written by hand."""
    loader = _loader(workload, case.folder, workload.batch_size, 1)
    above, clock = Resident(), _Clock(device)
    model = workload.module(1)
    step = PEERS[case.system](workload, model, next(iter(loader)), MICROBATCHES, device)
    for batch in islice(_again(loader), case.steps + 2 * _EDGE + 1):
        step(batch)
        clock.on_train_batch_end()
    return {**clock.found(1), "memory": above.peak()}


def _again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _measured(case: Case) -> dict[str, Any]:
    """In each process: what this one has measured."""
    workload = workloads(case.devices, case.slowness)[case.workload]
    torch.manual_seed(case.seed)
    device = SlowDevice(case.slowness)
    if case.slowness != 1:
        device.take_optimizers()
    try:
        found = (_run_peer if case.system in PEERS else _fit)(workload, case, device)
    except (AvgPipeError, NotPossible) as error:
        found = {"refused": str(error).split("\n")[0]}
    if dist.is_initialized():
        dist.destroy_process_group()
    return found
