"""An interruption while saving never harms the checkpoint before."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from torch import nn

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import CheckpointError, ConfigurationError
from lightning_avgpipe.strategy import checkpoint_files
from lightning_avgpipe.strategy.checkpoint_files import LocalCheckpointIO, is_sharded, load_shards, replacing
from tests import processes
from tests.comparing import assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline


class Interrupted(BaseException):
    """As by Ctrl-C."""


@pytest.fixture(scope="module", params=["file", "shards"])
def trained(request: pytest.FixtureRequest) -> Any:
    """A trainer after one epoch, whose checkpoints are files or folders."""
    strategy = {"save_distributed_checkpoint": request.param == "shards"}
    runner = pipeline(2, strategy=strategy, max_epochs=1)
    runner.fit(MLP("adamw"), loader(MLP, 16, 8))
    return runner


def test_states_of_many_optimizers_are_read_in_their_order(tmp_path: Path) -> None:
    states = {f"optimizer_{n}": {"state": {"w": torch.tensor(float(n))}} for n in range(12)}
    dcp.save({"model": {"w": torch.zeros(2)}, **states}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({}, tmp_path / "meta.pt")
    read = load_shards(tmp_path, optimizers=True, weights_only=True)["optimizer_states"]
    assert [state["state"]["w"].item() for state in read] == [*range(12)]


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    dcp.save({"optimizer_0": {"state": {"w": torch.zeros(2)}}}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"epoch": 3}, tmp_path / "meta.pt")
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(tmp_path))} .*'model' nor 'state_dict'.* epoch"):
        load_shards(tmp_path, optimizers=True, weights_only=True)


class Keeps(nn.Linear):
    """Saves more than its weights."""

    def __init__(self, kept: Any) -> None:
        super().__init__(8, 8)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_shards_hold_extra_states_as_they_are(tmp_path: Path) -> None:
    kept = [{}, {0: 5, "list": []}, {"weights": torch.arange(3), 1: (1, {})}, [], None]

    def model(*kept: Any) -> MLP:
        made = MLP()
        made.layers = nn.Sequential(*map(Keeps, kept))
        return made

    runner = pipeline(2, strategy={"save_distributed_checkpoint": True}, max_epochs=1)
    runner.fit(model(*kept), loader(MLP, 8, 8))
    runner.save_checkpoint(tmp_path / "some.ckpt")
    read = model(*["nothing"] * 5)
    pipeline(2).validate(read, loader(MLP, 8, 8), ckpt_path=tmp_path / "some.ckpt", verbose=False)
    assert_equal([layer.kept for layer in read.layers], kept)


def test_shards_hold_states_of_optimizers_as_they_are(tmp_path: Path) -> None:
    states = {"w": {"step": torch.tensor(1.0), "factors": {0: torch.ones(2), "of": []}, "none": {}}}
    checkpoint = {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [{"state": states, "param_groups": []}]}
    runner = pipeline(2, strategy={"save_distributed_checkpoint": True}, max_epochs=1)
    runner.fit(MLP(), loader(MLP, 8, 8))
    runner.strategy.save_checkpoint(checkpoint, tmp_path / "some.ckpt")
    read = load_shards(tmp_path / "some.ckpt", optimizers=True, weights_only=True)
    assert_equal(read["optimizer_states"][0]["state"], states)


def half_written(checkpoint: Any, file: Any) -> None:
    """torch.save, ended in the middle."""
    file.write(b"half")
    raise Interrupted


def saved_once(runner: Any, path: Path) -> list[Any]:
    """Save, then change the weights; returns the weights that were saved."""
    runner.save_checkpoint(path)
    before = [parameter.clone() for parameter in runner.lightning_module.parameters()]
    with torch.no_grad():
        for parameter in runner.lightning_module.parameters():
            parameter.add_(1.0)
    return before


def holds(path: Path, weights: list[Any]) -> bool:
    """Whether a new model gets these weights from the checkpoint."""
    model = MLP("adamw")
    pipeline(3).validate(model, loader(MLP, 8, 8), ckpt_path=path, verbose=False)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_an_interrupted_writing_leaves_the_checkpoint_before(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    before = saved_once(trained, path)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(checkpoint_files.torch, "save", half_written)
        trained.save_checkpoint(path)
    assert holds(path, before)
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]
    trained.save_checkpoint(path)
    assert holds(path, list(trained.lightning_module.parameters()))


def test_what_killed_processes_left_half_written_is_removed_with_the_next_checkpoint(tmp_path: Path) -> None:
    dead = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    dead.start()
    dead.join(processes.LIMIT_S)
    assert dead.exitcode == 0
    here, living = platform.node(), os.getppid()
    (tmp_path / f".epoch=0.ckpt.{here}-{dead.pid}.saving").write_text("half a file")
    (tmp_path / f".epoch=1.ckpt.{here}-{dead.pid}.saving").mkdir()
    (tmp_path / f".last.ckpt.{here}-{os.getpid()}.saving").write_text("of the same checkpoint")
    kept = {
        f".{name}.ckpt.{writer}.saving" for name in ("epoch=2", "last") for writer in (f"{here}-{living}", "other-1")
    }
    for name in kept:
        (tmp_path / name).write_text("may still be written")
    LocalCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", *kept}


def put(new: Path, is_folder: bool, owner: str) -> None:
    if is_folder:
        new.mkdir()
    (new / owner if is_folder else new).write_text(owner)


def held(path: Path) -> list[str]:
    return [file.read_text() for file in (path.iterdir() if path.is_dir() else [path])]


def save(path: Path, is_folder: bool, owner: str) -> None:
    with replacing(path) as new:
        put(new, is_folder, owner)


@pytest.mark.parametrize(("is_folder", "moment"), [(False, "replace"), (True, "rename"), (True, "replace")])
def test_of_two_jobs_that_save_to_one_path_at_once_the_last_one_wins(
    is_folder: bool, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, move, others = tmp_path / "last.ckpt", getattr(os, moment), list[Any]()

    def after_another_job(source: Path, target: Path) -> None:
        if not others:
            others.append(multiprocessing.get_context("fork").Process(target=save, args=(path, is_folder, "other")))
            others[0].start()
            others[0].join(60)
            assert others[0].exitcode == 0 and (moment == "rename" or held(path) == ["other"])
        move(source, target)

    save(path, is_folder, "before")
    with replacing(path) as new:
        put(new, is_folder, "this")
        monkeypatch.setattr(os, moment, after_another_job)
    assert others and held(path) == ["this"]
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_is_named_with_the_path_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    io = LocalCheckpointIO()
    io.save_checkpoint({"state_dict": {}, "of": "before"}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write the checkpoint: File too large: '.*last.ckpt'"):
            io.save_checkpoint({"state_dict": {"w": torch.zeros(100_000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert io.load_checkpoint(path)["of"] == "before"
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_cannot_be_pickled_is_named_also_while_an_error_of_the_file_system_is_handled(tmp_path: Path) -> None:
    try:
        raise ConnectionResetError("the data is gone")
    except OSError:
        with pytest.raises(Exception, match=r"[Cc]an.t pickle"):
            LocalCheckpointIO().save_checkpoint({"of": lambda: None}, tmp_path / "last.ckpt")


def die_while_saving(runner: Any, path: Path) -> None:
    """In a process of its own: end without any cleaning up."""
    os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
    runner.save_checkpoint(path)


def test_a_process_that_dies_while_saving_leaves_the_checkpoint_before(trained: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    before = saved_once(trained, path)
    dying = multiprocessing.get_context("fork").Process(target=die_while_saving, args=(trained, path))
    dying.start()
    dying.join(60)
    assert dying.exitcode == 9
    dying.close()
    assert len(list(tmp_path.iterdir())) == 2  # the half of one, under a name that no search for checkpoints finds
    assert not [left for left in tmp_path.glob("*.ckpt") if left != path]
    assert holds(path, before)
    trained.save_checkpoint(path)
    assert holds(path, list(trained.lightning_module.parameters()))
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]


def save_with_one_failing(rank: int, path: Path) -> str:
    runner = pipeline(2, 2, {"save_distributed_checkpoint": True}, max_epochs=1)
    model = MLP("adamw")
    runner.fit(model, loader(MLP, 16, 8))
    runner.save_checkpoint(path)
    with torch.no_grad():
        model.layers[0].weight.zero_()
    if rank == 1:

        def full(*_: Any, **__: Any) -> None:
            raise OSError("No space left on device")

        dcp.FileSystemWriter.write_data = full  # type: ignore[method-assign]
    try:
        runner.strategy.save_checkpoint(runner._checkpoint_connector.dump_checkpoint(), path)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_cannot_write_is_an_error_on_all_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    errors = processes.each(2, save_with_one_failing, path, folder=tmp_path)
    assert all("rank 1 could not write" in e and "No space left on device" in e for e in errors), errors
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]
    assert is_sharded(path)
    model = MLP("adamw")
    pipeline(2).validate(model, loader(MLP, 8, 8), ckpt_path=path, verbose=False)
    assert model.layers[0].weight.abs().sum() > 0


def test_a_file_takes_the_place_of_a_folder_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for sharded in (True, False):
        runner = pipeline(2, strategy={"save_distributed_checkpoint": sharded}, max_epochs=1)
        runner.fit(MLP("adamw"), loader(MLP, 16, 8))
        runner.save_checkpoint(path)
        assert is_sharded(path) == sharded
        assert holds(path, list(runner.lightning_module.parameters()))
    assert [left.name for left in tmp_path.iterdir()] == ["last.ckpt"]


def test_files_of_any_age_are_read(tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"x": torch.arange(3)}, "callbacks": {"best": torch.tensor(1.5)}}
    torch.save(checkpoint, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    LocalCheckpointIO().save_checkpoint(checkpoint, tmp_path / "new" / "new.ckpt")
    for path in ("old.ckpt", "new/new.ckpt"):
        for io in (LocalCheckpointIO(), TorchCheckpointIO()):
            loaded = io.load_checkpoint(tmp_path / path)
            assert torch.equal(loaded["state_dict"]["x"], checkpoint["state_dict"]["x"])
            assert loaded["callbacks"] == checkpoint["callbacks"]


def test_other_file_systems_are_lightnings(tmp_path: Path) -> None:
    io = LocalCheckpointIO()
    io.save_checkpoint({"state_dict": {}, "epoch": 3}, "memory://folder/some.ckpt")
    assert io.load_checkpoint("memory://folder/some.ckpt")["epoch"] == 3
    assert not is_sharded("memory://folder/some.ckpt")
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*nowhere\.ckpt"):
        io.load_checkpoint(tmp_path / "nowhere.ckpt")


def test_a_process_in_which_nothing_trains_says_where_to_save() -> None:
    with pytest.raises(ConfigurationError, match=r"save before it ends \(ModelCheckpoint"):
        AvgPipeStrategy().lightning_module_state_dict()
