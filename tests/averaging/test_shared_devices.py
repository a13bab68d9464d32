"""Several processes on each device train the parallel models of one."""

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
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.comm.topology import Party
from lightning_avgpipe.errors import ConfigurationError
from tests.averaging.models import Batches, Net
from tests.comparing import assert_equal, state
from tests.models import loader
from tests.trainers import pipeline, trainer


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


def fit(folder: Path, devices: int, num_stages: int = 2, **strategy: Any) -> Any:
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
    expected, numbers, _ = fit(tmp_path / "one", 1, num_pipelines=2)
    found, logged, places = fit(tmp_path / "four", 2, averaging=Averaging(processes_per_device=2), start_method="fork")
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
