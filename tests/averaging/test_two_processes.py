"""Parallel models on two processes are those of one."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.comm.topology import Party
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from tests import processes
from tests.averaging.models import Batches, Models, Net
from tests.averaging.test_checkpoints import LATE
from tests.averaging.test_checkpoints import fit as fit_late
from tests.averaging.test_training import Poisoned, data
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, TiedTransformer, loader
from tests.strategy.test_resume import ResumableLoader
from tests.trainers import pipeline, trainer

STRATEGY = {"num_pipelines": 3, "num_microbatches": 2}


def fit(folder: Path, devices: int, path: Path | None = None) -> dict[str, Any]:
    """Two epochs of seven batches: the last iteration of each has one batch for three pipelines."""
    torch.manual_seed(4 if path is None else 99)
    model, models = Net("adamw", warm_up=True), Models()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    runner = pipeline(2, devices, STRATEGY, callbacks=[models, saving], enable_checkpointing=True)
    runner.fit(model, ResumableLoader(Net, 56, 8), loader(Net, 16, 8), ckpt_path=path)
    predictions = runner.predict(model, loader(Net, 16, 8))
    return {
        "models": models.models,
        "left": state(model),
        "metrics": {name: value.item() for name, value in runner.callback_metrics.items()},
        "predictions": predictions,
        "steps": runner.global_step,
    }


def fit_tied(devices: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = TiedTransformer("adamw")
    strategy = {**STRATEGY, "averaging": Averaging(outer_lr=1.0)}
    runner = pipeline(3 if devices == 1 else 4, devices, strategy, max_epochs=1, gradient_clip_val=0.1)
    runner.fit(model, loader(TiedTransformer, 28, 4))
    return state(model)


def fit_poisoned(devices: int) -> Any:
    """A model is skipped whose gradient is NaN; by default all stop."""
    torch.manual_seed(0)
    model, options = Poisoned(), {"num_pipelines": 2, "num_microbatches": 2}
    runner = pipeline(2, devices, {**options, "averaging": Averaging(on_nonfinite="skip")}, max_epochs=1)
    runner.fit(model, data(3))
    with pytest.raises(AvgPipeError, match=r"pipeline 1, batch_idx 1: the gradient of 'layers\.0\.weight'"):
        pipeline(2, devices, options, max_epochs=1).fit(Poisoned(), data(3))
    return state(model), runner.strategy.skipped_models


class Counting(torch.utils.data.Dataset[Any]):
    """Counts the samples that are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return torch.ones(8), torch.zeros(8)


def reads(devices: int) -> list[int]:
    """Return how many batches were read at the beginning of each of three steps of two models, of twenty batches."""
    samples, seen = Counting(), list[int]()
    callback = LambdaCallback(on_train_batch_start=lambda *_: seen.append(samples.reads // 2))
    options = {"num_pipelines": 2, "num_microbatches": 2}
    runner = pipeline(2, devices, options, max_epochs=1, callbacks=[callback], limit_train_batches=3)
    runner.fit(MLP(), torch.utils.data.DataLoader(samples, 2))
    return seen


def all_of(folder: Path) -> Any:
    through = fit(folder / "two", 2)
    resumed = fit(folder / "again", 2, folder / "two" / "step=2.ckpt")
    moved = fit_late(2, devices=2, moves=["last"], averaging=LATE).left
    return through, resumed, fit_tied(2), moved, fit_poisoned(2), reads(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def in_two(folder: Path) -> list[Any]:
    return processes.everywhere(2, all_of, folder, folder=folder)


def test_two_processes_train_the_models_of_one(in_two: list[Any], folder: Path) -> None:
    expected = fit(folder / "one", 1)
    assert expected["steps"] == 6
    for found, resumed, *_ in in_two:
        assert found["steps"] == resumed["steps"] == 6
        assert_equal(found["left"], expected["left"])
        assert_equal(resumed["left"], expected["left"])
        assert found["metrics"] == expected["metrics"]
    assert_equal(in_two[0][0]["predictions"], expected["predictions"])

    for name in ("step=2", "step=6"):
        one, two = (torch.load(folder / d / f"{name}.ckpt", weights_only=True) for d in ("one", "two"))
        for key in ("state_dict", "optimizer_states"):
            assert_equal(two[key], one[key], key)
        ours, theirs = (saved["AvgPipeStrategy"]["ensemble"] for saved in (one, two))
        for key in ("models", "optimizers"):
            assert_equal(theirs[key], ours[key], key)


def test_so_they_do_with_a_weight_that_two_stages_use(in_two: list[Any]) -> None:
    expected = fit_tied(1)
    for _, _, found, *_ in in_two:
        assert_close(found, expected)


def test_stages_that_move_while_fragments_are_under_way_change_no_bit(in_two: list[Any]) -> None:
    expected = fit_late(2, averaging=LATE).left
    for *_, found, _, _ in in_two:
        assert_equal(found, expected)


def test_two_processes_skip_a_gradient_that_is_no_number_as_one_does(in_two: list[Any]) -> None:
    weights, _ = fit_poisoned(1)
    for *_, found, _ in in_two:
        assert_equal(found, (weights, 1))


def test_each_batch_of_a_limited_epoch_is_sent_while_the_one_before_it_is_used(in_two: list[Any]) -> None:
    assert reads(1) == [2, 4, 6]
    assert in_two[0][-1] == [3, 5, 6]


# -- several processes on each device train the parallel models of one -----------------------------------------------


class Divided(Net):
    """Reads its group's part of eight batches: what its parallel models would read in one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("sum", loss, reduce_fx="sum", on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        models, here = strategy.num_models, strategy.group_number
        batches = list(loader(Net, 64, 8))
        return Batches([b for i, b in enumerate(batches) if i % models // strategy.num_pipelines == here])

    def val_dataloader(self) -> Any:
        return loader(Net, 16, 8)


class Places(L.Callback):
    """Which process has which place, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        place = [strategy.group_number, strategy.device_layout.device_of(trainer.local_rank), *strategy.cluster.stages]
        (self.folder / f"place-{trainer.global_rank}").write_text(json.dumps(place))


def divided(folder: Path, devices: int, num_stages: int = 2, **strategy: Any) -> Any:
    """Train two models, and give the module, the numbers in its log, and where each process was."""
    torch.manual_seed(4)
    model = Divided("momentum", warm_up=True)
    folder.mkdir()
    logger = CSVLogger(folder, name="", version="")
    options = {"num_microbatches": 2, **strategy}
    pipeline(
        num_stages, devices, options, logger=logger, log_every_n_steps=1, callbacks=[Places(folder)],
        gradient_clip_val=0.5, use_distributed_sampler=False,
    ).fit(model)  # fmt: skip
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    places = {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("place-*")}
    return model, rows, places


def test_two_processes_on_each_of_two_devices_are_two_pipelines(tmp_path: Path) -> None:
    expected, numbers, _ = divided(tmp_path / "one", 1, num_pipelines=2)
    found, logged, places = divided(
        tmp_path / "four", 2, averaging=Averaging(processes_per_device=2), start_method="fork"
    )
    assert places == {0: [0, 0, 1], 1: [0, 1, 0], 2: [1, 0, 1], 3: [1, 1, 0]}  # group, device, stage
    assert logged == numbers
    assert len(logged) == 4 * 2 + 2 * 2
    assert_equal(state(found), state(expected))


@pytest.mark.parametrize(("local_rank", "device"), [(0, 0), (3, 1)])
def test_a_local_rank_has_the_device_that_its_group_needs(
    local_rank: int, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    strategy = AvgPipeStrategy(
        averaging=Averaging(processes_per_device=2),
        parallel_devices=[torch.device("cuda", 0), torch.device("cuda", 1)],
        cluster_environment=LightningEnvironment(),
    )
    strategy.set_world_ranks()
    assert strategy.root_device == torch.device("cuda", device)
    assert (strategy.num_processes, strategy.world_size, strategy.num_stages) == (4, 4, 2)
    assert (strategy.num_groups, strategy.group_number) == (2, local_rank // 2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": local_rank // 2}


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
SLURM = {
    "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_JOB_NAME": "train", "SLURM_NNODES": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "devices", "num_nodes", "message"),
    [
        (
            TORCHRUN, 2, 1,
            "TorchElasticEnvironment says that 2 processes were started, but devices=2, processes_per_device=2 need 4: "
            "start 4 on each node",
        ),
        (TORCHRUN, 1, 2, "devices=1, num_nodes=2, processes_per_device=2 need 4: start 2 on each node"),
        (SLURM, 2, 2, r"process 0 of node 1 has rank 1, but .* it must have rank 4: .*--distribution=block"),
    ],
)  # fmt: skip
def test_processes_that_do_not_fit_are_refused(
    environment: dict[str, str], devices: int, num_nodes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy = AvgPipeStrategy(averaging=Averaging(processes_per_device=2))
    with pytest.raises(ConfigurationError, match=message):
        trainer(strategy=strategy, devices=devices, num_nodes=num_nodes)


class Outside(Tensor):
    """As on a device: what the host works on is a copy."""

    def cpu(self, *_: Any) -> Tensor:
        return self.clone().as_subclass(Tensor)


class Together:
    """Siblings without processes."""

    process_group, party = None, Party("groups", (0, 1))
    world_size, rank = 2, 0

    def wait_for(self, work: Any, what: str) -> None:
        work.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_what_processes_of_one_device_sum_meets_on_the_host(dtype: torch.dtype, monkeypatch: Any) -> None:
    tensors = [torch.arange(4).to(dtype).as_subclass(Outside), torch.ones(2, 2, dtype=dtype).as_subclass(Outside)]
    places = []

    def twice(flat: Tensor, **_: Any) -> Any:
        places.append(type(flat))
        return SimpleNamespace(is_completed=lambda: False, wait=lambda: flat.mul_(2))

    monkeypatch.setattr(torch.distributed, "all_reduce", twice)
    members: Any = Together()
    TensorCollectives(members).sum(tensors)
    assert places == [Tensor]
    assert tensors[0].tolist() == [0, 2, 4, 6]
    assert tensors[1].tolist() == [[2, 2], [2, 2]]
