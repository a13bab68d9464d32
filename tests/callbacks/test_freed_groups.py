"""Devices that freezing frees become further groups; training goes on as in groups that resume from a checkpoint."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_avgpipe import AdaptiveFreezing
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import combinations
from tests import processes
from tests.callbacks.test_freed_devices import FineTuned, options_of
from tests.commands import LIMIT_S, started
from tests.models import loader
from tests.trainers import pipeline

SIZE, EPOCHS = 64, 4


class Groups(L.Callback):
    """Notes epoch, stages, groups and iterations of an epoch as they change, and what is open at the end."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, float]] = []
        self.batches: list[list[float]] = []  # of each epoch, what this group has read
        self.opened = (0, 0)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.batches.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.cluster.reads:
            self.batches[-1] += batch[0][:, 0].tolist()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        now = (strategy.num_stages, strategy.num_groups, trainer.num_training_batches)
        if not self.seen or now != self.seen[-1][1:]:
            self.seen.append((trainer.current_epoch, *now))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        gc.collect()
        trainer.strategy.barrier()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("avgpipe")]
        self.opened = psutil.Process().num_fds(), len(threads)


def fit(
    rank: int,
    devices: int,
    folder: Path,
    stages: int | None = None,
    ckpt_path: Path | None = None,
    strategy: dict[str, Any] | None = None,
    data: Any = None,
    callbacks: Any = (),
    epochs: int = EPOCHS,
    **freezing: Any,
) -> tuple[dict[str, Tensor], Groups, float]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    module, groups = FineTuned(), Groups()
    saved = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    freeze = AdaptiveFreezing(**{"alpha": 0.4, "freed": "groups", **freezing})
    runner = pipeline(
        stages or devices, devices, {"num_microbatches": 4, **(strategy or {})}, max_epochs=epochs,
        callbacks=[*callbacks, freeze, groups, saved], enable_checkpointing=True,
    )  # fmt: skip
    data = data or loader(FineTuned, 8 * SIZE, SIZE, shuffle=True)
    runner.fit(module, data, loader(FineTuned, SIZE, SIZE), ckpt_path=ckpt_path)
    runner.save_checkpoint(folder / "after.ckpt")
    value = float(runner.validate(module, loader(FineTuned, SIZE, SIZE), verbose=False)[0]["val_loss"])
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, groups, value


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def grouped_and_begun_so(rank: int, folder: Path, rolling: Any) -> Any:
    """With freed devices as groups; and with groups from the start, from the checkpoint of the epoch before."""
    options = {"rolling": rolling}
    freed = fit(rank, 2, folder / "freed", strategy=options)
    begun = fit(rank, 2, folder / "begun", 1, folder / "freed" / "epoch=1.ckpt", options, freed=None, replan=True)
    return freed, begun, fit(rank, 2, folder / "resumed", None, folder / "freed" / "epoch=2.ckpt", options)


@pytest.mark.parametrize("rolling", [False, pytest.param("auto", marks=pytest.mark.slow)])
def test_groups_that_are_made_train_as_groups_that_resume(rolling: Any, tmp_path: Path) -> None:
    found = processes.results(processes.run(2, grouped_and_begun_so, tmp_path, rolling, folder=tmp_path))
    for (weights, freed, value), begun, resumed in found:
        # the plan of epoch 1, with the first layers frozen, advises them
        assert freed.seen == [(0, 2, 1, 8), (2, 1, 2, 4)]
        assert begun[1].seen == [(2, 1, 2, 4)] and resumed[1].seen == [(3, 1, 2, 4)]
        for others in (begun, resumed):
            assert_same(weights, others[0])
            assert value == others[2]
            assert freed.opened <= others[1].opened, "the connections of the groups before are open"
    read = [freed.batches for (_, freed, _), *_ in found]
    assert [len(read[1][epoch]) for epoch in range(EPOCHS)] == [0, 0, 4 * SIZE, 4 * SIZE]
    for epoch in range(EPOCHS):
        assert len({*read[0][epoch], *read[1][epoch]}) == 8 * SIZE, "each sample is trained on once in each epoch"
    states = torch.load(tmp_path / "freed" / "after.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert len(states) == len(found[0][0][0])


def twice(rank: int, folder: Path) -> Any:
    little = {"memory_limit": 9000}  # one stage fits when most is frozen
    freed = fit(rank, 4, folder, strategy=little)
    return freed, fit(rank, 4, folder / "resumed", strategy=little, ckpt_path=folder / "epoch=2.ckpt")


@pytest.mark.slow
def test_groups_are_made_as_often_as_memory_allows(tmp_path: Path) -> None:
    for (weights, groups, _), resumed in processes.results(processes.run(4, twice, tmp_path, folder=tmp_path)):
        assert groups.seen == [(0, 4, 1, 8), (2, 2, 2, 4), (3, 1, 4, 2)]
        assert resumed[1].seen == [(3, 1, 4, 2)]
        assert_same(weights, resumed[0])


class Killed(L.Callback):
    """Dies when the groups connect."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            mock.patch.object(ProcessGroups, "open", lambda *_: os.kill(os.getpid(), signal.SIGKILL)).start()


@pytest.mark.slow
def test_a_process_that_is_killed_while_groups_are_made_is_named(tmp_path: Path) -> None:
    options = {"strategy": {"timeout": 8.0}, "callbacks": [Killed()]}
    survivor, _ = processes.run(2, killed, tmp_path, options, folder=tmp_path)
    assert survivor.error is not None and "PeerError" in survivor.error and "rank 1" in survivor.error


def killed(rank: int, folder: Path, options: Any) -> Any:
    return fit(rank, 2, folder, **options)


class Signalled(L.Callback):
    """Gets a signal in the second epoch of the groups, or just before they are made."""

    def __init__(self, before: bool) -> None:
        self.before = before

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == (2 if self.before else 3):
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(rank: int, folder: Path, before: bool) -> str:
    try:
        fit(rank, 2, folder, callbacks=[Signalled(before)], epochs=1000)
    except SIGTERMException:
        return "stopped"
    return "trained to the end"


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_signal_reaches_groups_that_were_made_while_training_ran(before: bool, tmp_path: Path) -> None:
    assert processes.results(processes.run(2, stopped, tmp_path, before, folder=tmp_path)) == ["stopped"] * 2


@pytest.mark.slow
def test_a_script_makes_groups(tmp_path: Path) -> None:
    """With the default launcher, measured costs and shuffled data."""
    freezing = {"alpha": 0.4, "freed": "groups"}
    given = {"devices": 2, "model": "WithSlowHead", "epochs": EPOCHS, "costs": "measured", "microbatches": 4}
    script = str(Path(__file__).parents[1] / "script.py")
    with started(([script, str(tmp_path), json.dumps({**given, "freezing": freezing})], {})) as (process,):
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "one stage on one process, 2 groups of them" in errors
    first, second = (torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True) for rank in range(2))
    assert_same(first, second)


class Fixed(BatchSampler):
    """A batch sampler that nobody can make anew for a part of the samples."""

    def __init__(self, rows: int) -> None:
        super().__init__(SequentialSampler(range(rows)), SIZE, True)


def with_a_sampler_of_its_own(rank: int, folder: Path) -> Any:
    x, y = FineTuned.example(8 * SIZE)
    return fit(rank, 2, folder, data=DataLoader(TensorDataset(x, y), batch_sampler=Fixed(8 * SIZE)))


@pytest.mark.slow
def test_data_that_cannot_be_divided_are_refused_before_training(tmp_path: Path) -> None:
    reader, _ = processes.run(2, with_a_sampler_of_its_own, tmp_path, folder=tmp_path)
    assert reader.error is not None and "ConfigurationError: AdaptiveFreezing(freed='groups')" in reader.error
    assert "use_distributed_sampler=False" in reader.error
    assert not list(tmp_path.glob("epoch*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 2}, "replicas=2 needs parallel models"),
        ({"num_stages": 4}, "num_stages=4 needs one stage on each device of a group; use num_stages=2"),
        ({"verify": True}, "verify=True needs no verification"),
        ({"schedule": "zb_h1"}, "schedule='zb_h1' needs one for any number of stages"),
        ({"weight_policy": "stash"}, "weight_policy='stash' needs one that several groups have"),
        ({"save_distributed_checkpoint": True}, "save_distributed_checkpoint=True needs one file"),
    ],
)
def test_options_that_do_not_go_with_groups_later_are_refused_by_name(options: Any, message: str) -> None:
    stage_map = StageMap.on(DeviceLayout(2), options.get("num_stages", 2))
    with pytest.raises(ConfigurationError, match=f"freed='groups'.*{message}"):
        combinations.grouping_later(options_of(**options), stage_map)


def test_groups_from_the_start_may_become_more() -> None:
    combinations.grouping_later(options_of(num_stages=2), StageMap.on(DeviceLayout(4), 2))


@pytest.mark.parametrize(
    ("freezing", "callbacks", "message"),
    [
        ({"cache": "1MB"}, [], "freed='groups', whose models differ"),
        ({}, [StochasticWeightAveraging(1e-2)], "StochasticWeightAveraging, which averages the weights of one model"),
    ],
)
def test_what_knows_one_model_is_refused(freezing: Any, callbacks: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(0, 1, tmp_path, 2, callbacks=callbacks, **freezing)


class Regroups(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.regroup(1)


def test_groups_are_refused_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"regroup\(1\) in on_train_batch_end.*in on_train_epoch_start of"):
        fit(0, 1, tmp_path, 2, callbacks=[Regroups()])
