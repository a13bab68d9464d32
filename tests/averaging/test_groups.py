"""Several groups of processes train the parallel models of one group."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import Averaging
from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.averaging.models import Batches, Net, Unsized, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import pipeline


def share(groups: int, group: int, models: int) -> Batches:
    """The batches that a group's models have in one process: of eight in all."""
    batches = list(loader(Net, 64, 8))
    return Batches([batch for i, batch in enumerate(batches) if i % models * groups // models == group])


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but running means, which groups sum in another order."""
    return {name: tensor for name, tensor in tensors.items() if "running" not in name}


class Seen(L.Callback):
    """Which samples come to training and to validation here; tells the process to stop at a batch."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.stop_at = stop_at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.trained += batch[0][:, 0].tolist()
        if batch_idx == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated += batch[0][:, 0].tolist()


def numbered(count: int, **options: Any) -> DataLoader[Any]:
    inputs = torch.arange(count, dtype=torch.float32)[:, None].expand(-1, 8) / count
    return DataLoader(TensorDataset(inputs, torch.zeros(count, 8)), batch_size=4, **options)


def divided(rank: int) -> Any:
    options = {"num_microbatches": 2, "averaging": Averaging(groups=2), "timeout": timedelta(seconds=30)}
    torch.manual_seed(rank)  # so the groups' modules differ until training begins
    model, seen = MLP(), Seen()
    runner = pipeline(1, 2, options, callbacks=[seen], max_epochs=1, num_sanity_val_steps=0)
    runner.fit(model, numbered(24, shuffle=True), numbered(8))
    steps = [runner.global_step]
    left = state(model)

    endless = pipeline(1, 2, options, max_epochs=1)
    with pytest.warns(UserWarning, match="group_number") if rank == 0 else contextlib.nullcontext():
        endless.fit(MLP(), DataLoader(Unsized([MLP.example(4)] * (3 + 2 * rank)), batch_size=None))
    steps.append(endless.global_step)

    stopped = pipeline(1, 2, options, callbacks=[Seen(stop_at=1 if rank else None)])
    with pytest.raises(SystemExit):
        stopped.fit(MLP(), numbered(160))
    steps.append(stopped.global_step)

    with pytest.raises(ConfigurationError, match=r"dataloaders of 2, 3 batches"):
        pipeline(1, 2, options).fit(MLP(), Batches([MLP.example(4)] * (2 + rank)))
    return left, seen.trained, seen.validated, steps


def test_groups_divide_training_and_end_together(tmp_path: Path) -> None:
    results = processes.results(processes.run(2, divided, folder=tmp_path))
    (left, trained_here, validated, steps), (other, trained_there, validated_there, steps_there) = results
    assert_equal(left, other)
    assert sorted(trained_here + trained_there) == pytest.approx([n / 24 for n in range(24)])
    assert validated == validated_there == pytest.approx([n / 8 for n in range(8)])
    assert steps == steps_there
    assert steps[:2] == [3, 3]  # 24 samples in two groups; the shorter of two streams
    assert 1 <= steps[2] < 20


def failing(rank: int) -> None:
    model = MLP()
    if rank == 1:
        model.register_forward_pre_hook(Bomb(3))
    options = {"num_microbatches": 2, "averaging": Averaging(groups=2), "timeout": timedelta(seconds=20)}
    pipeline(1, 2, options).fit(model, loader(MLP, 64, 8))


class Bomb:
    """Raises after some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, *_: Any) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise ValueError("one group has failed")


def test_a_failure_in_one_group_ends_the_other(tmp_path: Path) -> None:
    survivor, failed = processes.run(2, failing, folder=tmp_path)
    assert failed.error is not None and "ValueError: one group has failed" in failed.error
    assert survivor.error is not None and "rank 1 (stage 0 of group 1)" in survivor.error
    assert "ValueError: one group has failed" in survivor.error
