"""Processes start in every way that Lightning knows, train the same, and leave none behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import launch
from tests import processes
from tests.commands import LIMIT_S, Command, started
from tests.comparing import assert_equal, state
from tests.models import MLP, loader
from tests.processes import free_port, until
from tests.simulated.accelerator import SimulatedAccelerator
from tests.trainers import pipeline, trainer

SCRIPT = Path(__file__).parents[1] / "script.py"


def options(folder: Path, **given: Any) -> list[str]:
    return [str(folder), json.dumps({"devices": 2, **given})]


def expected(data: Any = None, **strategy: Any) -> dict[str, torch.Tensor]:
    """The same training in this process."""
    torch.manual_seed(5)
    model, data = MLP(), data or loader(MLP, 24, 8, shuffle=True)
    pipeline(2, strategy={"num_microbatches": 2, **strategy}, max_epochs=2).fit(model, data)
    return model.state_dict()


def commands(way: str, folder: Path, **given: Any) -> list[Command]:
    port = free_port()
    if way == "script":
        return [([str(SCRIPT), *options(folder, **given)], {})]
    if way == "torchrun":
        run = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
        return [([*run, str(SCRIPT), *options(folder, **given)], {})]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        (
            [str(SCRIPT), *options(folder, **{**given, "devices": 1, "num_nodes": 2})],
            {**address, "NODE_RANK": str(node)},
        )
        for node in range(2)
    ]


def ended(process: Any) -> str:
    """What a script has said that ends well."""
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert "No handlers" not in errors
    return str(errors)


def assert_trained(folder: Path, world_size: int, weights: dict[str, torch.Tensor]) -> None:
    assert_equal([torch.load(folder / f"weights-{rank}.pt") for rank in range(world_size)], [weights] * world_size)


SHARING = {"devices": 1, "sharing": 2, "model": "Divided", "use_distributed_sampler": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "given", "world_size"),
    [
        *((way, {}, 2) for way in ("script", "torchrun", "two nodes")),
        *((way, SHARING, size) for way, size in (("script", 2), ("torchrun", 2), ("two nodes", 4))),
    ],
)
def test_every_way_to_start_processes_trains_the_same(
    way: str, given: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    with started(*commands(way, tmp_path, **given)) as running:  # on two nodes both groups are on both
        for process in running:
            ended(process)
    assert_trained(tmp_path, world_size, expected(loader(MLP, 24, 6), num_pipelines=2) if given else expected())


@pytest.mark.slow
def test_processes_agree_to_split_no_batches_for_a_step_that_takes_no_part_of_one(tmp_path: Path) -> None:
    with started(*commands("script", tmp_path, model="AllAtOnce", microbatches="auto")) as (process,):
        errors = ended(process)
    assert errors.count("batches are not split into micro-batches for training_step") == 1
    assert_trained(tmp_path, 2, expected(num_microbatches=1))


@pytest.mark.slow
@pytest.mark.timeout(240)  # the strategy's timeout, and then that of its watch
def test_a_script_takes_its_stuck_process_with_it(tmp_path: Path) -> None:
    with started(([str(SCRIPT), *options(tmp_path, model="Stuck", timeout_s=40)], {})) as (process,):
        _, errors = process.communicate(timeout=2 * LIMIT_S)
        assert process.returncode != 0
        assert "rank 0 (stage 1) waits for " in errors
        assert "in on_train_batch_start" in errors


@pytest.mark.slow
def test_sigterm_to_a_script_saves_and_ends_all_its_processes(tmp_path: Path) -> None:
    with started(([str(SCRIPT), *options(tmp_path, epochs=10_000)], {})) as (process,):
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2 or process.poll() is not None, "training")
        process.send_signal(signal.SIGTERM)
        ended(process)
        saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
        assert saved["global_step"] > 0
        assert not any(value.is_meta for value in saved["state_dict"].values())


DEATHS = {  # which process is killed by which signal, when -> how the first ends, and what is said
    (0, "SIGKILL", "connecting"): r"rank 1 was started by process \d+, which ended or was killed before the",
    (0, "SIGTERM", "starting"): r"PeerError: rank 1 was started by process \d+, which ended or was killed before",
    (0, "SIGKILL", "training"): r"PeerError: rank 0 (\(stage 1\) is gone|broke)",
    (1, "SIGKILL", "training"): r"PeerError: .*rank 1 (\(stage 0\) was killed by SIGKILL|broke)",
}


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "by", "moment"), DEATHS)
def test_a_killed_process_is_named_and_leaves_no_other_behind(
    victim: int, by: str, moment: str, tmp_path: Path
) -> None:
    """The other process ends long before its timeout; it closes the pipe that ``communicate`` reads."""
    given = options(tmp_path, epochs=10_000, timeout_s=1800, dies=[by, moment], victim=victim)
    with started(([str(SCRIPT), *given], {})) as (process,):
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == (1 if victim else -signal.Signals[by])
        assert re.search(DEATHS[victim, by, moment], errors), errors


@pytest.mark.parametrize(
    "name",
    ["avgpipe_notebook", *(pytest.param(name, marks=pytest.mark.slow) for name in ("avgpipe_fork", "avgpipe_spawn"))],
)
def test_a_function_in_a_notebook_trains_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "avgpipe_spawn":
        monkeypatch.setattr(launch, "_IS_INTERACTIVE", True)
        monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    torch.manual_seed(5)
    model = MLP()
    runner = trainer(strategy=name, devices=2, max_epochs=2)
    runner.strategy.reconfigure(num_microbatches=2)
    runner.fit(model, loader(MLP, 24, 8, shuffle=True))
    assert_equal(state(model), expected())


def training_until(rank: int, may_end: Path) -> int:
    """Trains, and waits at its second batch until a file is there."""
    model = MLP()

    def wait_at_second(batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            (may_end.parent / f"trains-{rank}").touch()
            until(may_end.exists, "the end", LIMIT_S / 2)

    model.on_train_batch_start = wait_at_second  # type: ignore[method-assign]
    runner = pipeline(2, 2, max_epochs=1)
    runner.fit(model, loader(MLP, 32, 8))
    return runner.global_step


def train_in_two(may_end: Path, folder: Path, port: int) -> None:
    steps = processes.results(processes.run(2, training_until, may_end, folder=folder, port=port))
    (folder / "steps").write_text(json.dumps(steps))


def of_another_run(rank: int, world_size: int) -> None:
    pipeline(world_size, world_size, max_epochs=1).fit(MLP(), loader(MLP, 32, 8))


def test_a_process_of_another_run_with_the_same_port_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    port, may_end = free_port(), tmp_path / "may end"
    beside = multiprocessing.get_context("fork").Process(target=train_in_two, args=(may_end, tmp_path, port))
    beside.start()
    try:
        until(lambda: len(list(tmp_path.glob("trains-*"))) == 2 or not beside.is_alive(), "training", LIMIT_S / 2)
        assert beside.is_alive(), "training has ended"
        for size, found in ((2, r"process \d+ on .* as rank 1"), (3, "2 processes")):
            (folder := tmp_path / str(size)).mkdir()
            (stranger,) = processes.run(size, of_another_run, size, folder=folder, ranks=[size - 1], port=port)
            assert re.search(rf"another run at 127.0.0.1:{port}, with {found}", stranger.error or ""), stranger.error
    finally:
        may_end.touch()
        beside.join(processes.LIMIT_S)
    assert json.loads((tmp_path / "steps").read_text()) == [4, 4]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (dist.DistStoreError("wait timeout"), r"PeerError: rank 1 could not connect .* not all were started"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection refused"), "PeerError: rank 1 could not connect"),
        (RuntimeError("can't start new thread"), "^RuntimeError: can't start new thread$"),
    ],
)
def test_only_what_the_rendezvous_says_is_called_a_failure_to_connect(error: RuntimeError, found: str) -> None:
    with pytest.raises(Exception) as caught, launch.connecting(1, 2):
        raise error
    assert re.search(found, f"{type(caught.value).__name__}: {caught.value}")


def test_the_names_choose_the_start_method() -> None:
    found = {name: StrategyRegistry[name]["init_params"].get("start_method") for name in StrategyRegistry}
    assert {name: method for name, method in found.items() if name.startswith("avgpipe")} == {
        "avgpipe": None, "avgpipe_spawn": "spawn", "avgpipe_fork": "fork", "avgpipe_notebook": "fork",
    }  # fmt: skip


def test_a_notebook_is_told_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_IS_INTERACTIVE", True)
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(ConfigurationError, match=r"Use strategy='avgpipe_notebook'.* or devices=1"):
        trainer(strategy="avgpipe", devices=2)
    trainer(strategy="avgpipe", devices=1)
    pipeline(4, devices=1, max_steps=1).fit(MLP(), loader(MLP, 8, 8))


class Gpus(SimulatedAccelerator):
    """Has devices of a kind that need not be here."""

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", number) for number in devices]


@pytest.mark.parametrize(
    ("in_use", "given", "found", "warned"),
    [(False, None, "32", False), (True, None, "32", True), (True, "8", "8", False)],
)
def test_processes_inherit_what_cuda_reads_at_its_start_and_one_that_has_begun_is_warned(
    in_use: bool, given: str | None, found: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, given or "")  # so that what is set here is undone
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(strategy="avgpipe", accelerator=Gpus(), devices=2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == found
    assert any("was in use before the Trainer was made" in str(one.message) for one in said) == warned


def test_processes_that_exist_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="LightningEnvironment says that they exist already"):
        trainer(strategy="avgpipe_spawn", devices=2)


_RESTARTED = """
import os, signal, sys
import lightning as L, torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning_avgpipe import AvgPipeStrategy
from tests.models import MLP, loader

def kill(trainer, *_):
    if trainer.global_step == 3 and os.environ["LOCAL_RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

every_epoch = ModelCheckpoint(".", save_last=True)
often = ModelCheckpoint(sys.argv[1], save_last="link", every_n_train_steps=2)
trainer = L.Trainer(
    strategy=AvgPipeStrategy(timeout="30s"), accelerator="cpu", devices=2, max_steps=4, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[LambdaCallback(on_train_batch_end=kill), every_epoch, often],
)
torch.manual_seed(0)
model = MLP()
trainer.fit(model, loader(model, 64, 8), ckpt_path="last")
if trainer.is_global_zero:
    print("ended at", trainer.global_step, "after", trainer.fit_loop.epoch_loop.batch_progress.total.completed)
    print("began at", trainer.ckpt_path)
"""


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A folder of a file system that is none of a disk's."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("has no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_starts_again_and_training_goes_on_from_the_last_checkpoint(tmp_path: Path, in_memory: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RESTARTED)
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1")
    with started(((*module, script, in_memory), {}), folder=tmp_path) as (process,):
        printed, errors = process.communicate(timeout=280)
    assert "ended at 4 after 4" in printed, errors
    assert f"began at {in_memory}" in printed
