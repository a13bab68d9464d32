"""Training that stops and goes on equals training that never stopped, whatever the number of stages."""

from __future__ import annotations

import copy
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn

from lightning_avgpipe import Links
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.strategy.checkpoint_files import LocalCheckpointIO
from tests import processes
from tests.comparing import assert_equal, assert_same_parameters
from tests.models import MLP, MadeOnMeta, Regression, TiedTransformer, TinyTransformer, loader
from tests.trainers import pipeline, trainer

MICRO = {"num_microbatches": 4}


class ResumableLoader:
    """A new random order in every epoch; knows where it is."""

    def __init__(self, model: type[Regression], samples: int = 32, batch_size: int = 8) -> None:
        self.batches = list(loader(model, samples, batch_size))
        self.state = {"epoch": 0, "next": 0}

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self.state["next"] == len(self):
            self.state = {"epoch": self.state["epoch"] + 1, "next": 0}
        generator = torch.Generator().manual_seed(self.state["epoch"])
        order = torch.randperm(len(self), generator=generator).tolist()
        for i in range(self.state["next"], len(self)):
            self.state["next"] = i + 1
            yield self.batches[order[i]]

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class Positions(L.LightningDataModule):
    """Saves the position of its dataloader, which has no state of its own."""

    def __init__(self, source: ResumableLoader | None = None) -> None:
        super().__init__()
        self.source = source or ResumableLoader(Scheduled)

    def train_dataloader(self) -> Any:
        source = self.source

        class Batches:
            def __len__(self) -> int:
                return len(source)

            def __iter__(self) -> Iterator[Any]:
                return iter(source)

        return Batches()

    def state_dict(self) -> dict[str, int]:
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.source.load_state_dict(state)


class Scheduled(TinyTransformer):
    """What a resume must bring back: dropout's random numbers, Adam's averages, and a learning rate that falls."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__("adamw", dropout)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def through(folder: Path, devices: int = 1, plugins: Any = (), data: Any = None, **options: Any) -> Regression:
    """Train two epochs of four batches, with a checkpoint after each batch."""
    torch.manual_seed(4)
    model, saving = Scheduled(), {"enable_checkpointing": True, "callbacks": [every_step(folder)]}
    runner = pipeline(2, devices, {**MICRO, **options}, plugins=list(plugins), **saving)
    runner.fit(model, data or ResumableLoader(Scheduled))
    return model


def resumed(
    path: Path | str,
    num_stages: int,
    devices: int = 1,
    weights_only: bool | None = None,
    data: Any = None,
    **options: Any,
) -> Regression:
    """Do the rest of it, in a process that has drawn other random numbers since."""
    torch.manual_seed(99)
    model, runner = Scheduled(), pipeline(num_stages, devices, MICRO, **options)
    runner.fit(model, data or ResumableLoader(Scheduled), ckpt_path=path, weights_only=weights_only)
    return model


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Regression, Path]:
    folder = tmp_path_factory.mktemp("through")
    torch.set_num_threads(1)
    return through(folder), folder


@pytest.mark.parametrize(("step", "num_stages", "weights_only"), [(3, 2, True), (4, 1, None), (6, 3, None)])
def test_a_resume_after_any_batch_is_bitwise(
    never_stopped: Any, step: int, num_stages: int, weights_only: bool | None
) -> None:
    model, folder = never_stopped
    assert_same_parameters(model, resumed(folder / f"step={step}.ckpt", num_stages, weights_only=weights_only))


class Fails(Callback):
    """Raises in the middle of a batch, on one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == self.rank:
            raise RuntimeError("the machine is taken away")


def test_the_batch_that_an_exception_interrupted_draws_the_same_numbers_again(tmp_path: Path) -> None:
    data = loader(Scheduled, 32, 8)
    torch.manual_seed(4)
    model = Scheduled()
    expected, again = copy.deepcopy(model), copy.deepcopy(model)
    pipeline(2, strategy=MICRO, max_epochs=1).fit(expected, data)
    stopping = [OnExceptionCheckpoint(tmp_path), Fails()]
    with pytest.raises(RuntimeError, match="taken away"):
        pipeline(2, strategy=MICRO, max_epochs=1, enable_checkpointing=True, callbacks=stopping).fit(model, data)

    class Rest:  # the batches that are left, as a resumable loader gives them
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            return iter(list(data)[3:])

    torch.manual_seed(99)
    pipeline(3, strategy=MICRO, max_epochs=1).fit(again, Rest(), ckpt_path=tmp_path / "on_exception.ckpt")
    assert_same_parameters(expected, again)


def failing_on_rank_1(save_last: Any, folder: Path) -> None:
    saves = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=save_last, save_on_exception=True
    )
    saves.CHECKPOINT_NAME_LAST = "last" if save_last == "link" else "last-{step}"
    runner = pipeline(2, 2, MICRO, max_epochs=1, enable_checkpointing=True, callbacks=[saves, Fails(1)])
    with pytest.raises((RuntimeError, PeerError)):
        runner.fit(Scheduled(), loader(Scheduled, 32, 8))


@pytest.mark.parametrize("save_last", [True, "link"])
def test_after_a_failure_the_last_checkpoint_is_the_one_before_it(save_last: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    processes.everywhere(2, failing_on_rank_1, save_last, tmp_path / "saved", folder=tmp_path)
    (last,) = (tmp_path / "saved").glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2


def test_without_a_resumable_loader_a_resume_does_what_it_does_on_one_device(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = MLP("adamw")
    models = {}
    for name, make in (("plain", trainer), ("piped", pipeline)):
        options = {} if make is trainer else {"strategy": {"num_microbatches": 1}}
        saving = {"enable_checkpointing": True, "callbacks": [every_step(tmp_path / name)], "max_epochs": 1}
        make(**options, **saving).fit(copy.deepcopy(model), loader(MLP, 40, 8))
        models[name] = copy.deepcopy(model)
        make(**options).fit(models[name], loader(MLP, 40, 8), ckpt_path=tmp_path / name / "step=3.ckpt")
    assert_same_parameters(models["plain"], models["piped"])


def test_best_and_last_are_found(tmp_path: Path) -> None:
    data = loader(MLP, 32, 8), loader(MLP, 16, 8, seed=1)

    def run(epochs: int, **options: Any) -> tuple[Regression, Any]:
        torch.manual_seed(4)
        model = MLP("adamw")
        checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, enable_version_counter=False)
        runner = pipeline(2, strategy=MICRO, max_epochs=epochs, enable_checkpointing=True, callbacks=[checkpoint])
        runner.fit(model, *data, **options)
        return model, runner

    expected, _ = run(3)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    run(1)
    model, runner = run(3, ckpt_path="last")
    assert_same_parameters(expected, model)
    best = runner.checkpoint_callback
    assert best.best_model_score == runner.validate(model, data[1], ckpt_path="best", verbose=False)[0]["val_loss"]
    assert_same_parameters(MLP.load_from_checkpoint(best.best_model_path), model)


def test_weights_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    model = MLP("adamw")
    runner = pipeline(2, max_epochs=1)
    runner.fit(model, loader(MLP, 16, 8))
    runner.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not {"optimizer_states", "AvgPipeStrategy"} & torch.load(tmp_path / "weights.ckpt").keys()
    other = MLP("adamw")
    pipeline(3).validate(other, loader(MLP, 16, 8), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert_same_parameters(model, other)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        pipeline(2).fit(other, loader(MLP, 16, 8), ckpt_path=tmp_path / "weights.ckpt")


def test_a_checkpoint_is_an_ordinary_one_that_one_device_goes_on_from(never_stopped: Any) -> None:
    model, folder = never_stopped
    opened = Scheduled.load_from_checkpoint(folder / "step=8.ckpt")
    assert_same_parameters(model, opened)
    saved = torch.load(folder / "step=4.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == model.state_dict().keys()
    assert len(saved["optimizer_states"][0]["state"]) == len(list(model.parameters()))
    plain, piped = (Scheduled(dropout=0.0) for _ in range(2))
    for opened, runner in ((plain, trainer()), (piped, pipeline(2, strategy={"num_microbatches": 1}))):
        runner.fit(opened, ResumableLoader(Scheduled), ckpt_path=folder / "step=4.ckpt")
        assert runner.global_step == 8
    assert_equal(plain, piped)


class Larger(MLP):
    def __init__(self, optimizer: str = "sgd", strict: bool = True) -> None:
        super().__init__(optimizer)
        self.strict_loading = strict
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(super().forward(x))


def test_missing_weights_are_an_error_unless_loading_is_not_strict(tmp_path: Path) -> None:
    model = MLP()
    runner = pipeline(2, max_epochs=1)
    runner.fit(model, loader(MLP, 16, 8))
    runner.save_checkpoint(tmp_path / "small.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key.*extra\.weight"):
        pipeline(2).validate(Larger(), loader(MLP, 16, 8), ckpt_path=tmp_path / "small.ckpt", verbose=False)
    larger = Larger(strict=False)
    pipeline(2).validate(larger, loader(MLP, 16, 8), ckpt_path=tmp_path / "small.ckpt", verbose=False)
    assert torch.equal(larger.layers[0].weight, model.layers[0].weight)


class Elsewhere(CheckpointIO):
    """A plugin that keeps checkpoints in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.kept[str(path)] = copy.deepcopy(checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return copy.deepcopy(self.kept[str(path)])

    def remove_checkpoint(self, path: Any) -> None:
        del self.kept[str(path)]


def test_a_checkpoint_plugin_is_used(never_stopped: Any) -> None:
    model, _ = never_stopped
    plugin = Elsewhere()
    through(Path("in"), plugins=[plugin])
    assert not Path("in").exists() or not list(Path("in").iterdir())
    path = next(path for path in plugin.kept if path.endswith("step=3.ckpt"))
    assert_same_parameters(model, resumed(path, 3, plugins=[plugin]))


def test_checkpoints_written_in_the_background_are_those_of_their_step(never_stopped: Any, tmp_path: Path) -> None:
    model, folder = never_stopped
    plugin = AsyncCheckpointIO()
    through(tmp_path, plugins=[plugin])
    assert type(plugin.checkpoint_io) is LocalCheckpointIO
    for step in (1, 5, 8):
        one, other = (torch.load(place / f"step={step}.ckpt")["state_dict"] for place in (tmp_path, folder))
        assert_equal(one, other)
    assert_same_parameters(model, resumed(tmp_path / "step=3.ckpt", 2))


class Maps(Callback):
    """Looks whether a file, or one with such a name, is mapped into memory."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self.seen: dict[str, bool] = {}

    def look(self, when: str) -> None:
        self.seen[when] = self.path in Path("/proc/self/maps").read_text()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.look("loading")

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("training")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_mapped_while_it_is_loaded_and_no_longer(never_stopped: Any) -> None:
    path = never_stopped[1] / "step=3.ckpt"
    maps = Maps(path)
    resumed(path, 2, callbacks=[maps])
    assert maps.seen == {"loading": True, "training": False}


def mapped_after_search() -> dict[str, bool]:
    maps = Maps(".lr_find_")
    search = LearningRateFinder(num_training_steps=2, update_attr=False)
    pipeline(2, 2, MICRO, callbacks=[search, maps], max_epochs=1).fit(MadeOnMeta(), loader(MLP, 16, 8))
    return maps.seen


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_search_has_saved_is_mapped_no_longer_than_it_is_loaded(tmp_path: Path) -> None:
    for seen in processes.everywhere(2, mapped_after_search, folder=tmp_path):
        assert seen == {"loading": True, "training": False}


class Counts(nn.Linear):
    """Saves with its weights how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Counted(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[-2] = Counts(8, 8), Counts(8, 8)


def counted(folder: Path) -> list[Any]:
    """Train, and return what checkpoints of both kinds say of the two layers that count."""
    world_size = processes.num_processes()
    found: list[Any] = []
    for sharded in (False, True):
        strategy = {**MICRO, "save_distributed_checkpoint": sharded, "costs": "flops"}
        saving = {"enable_checkpointing": True, "callbacks": [every_step(folder / str(sharded))], "max_epochs": 1}
        runner = pipeline(2, world_size, strategy, **saving)
        runner.fit(Counted(), loader(Counted, 32, 8))
        for step in (1, 4):
            state = runner.strategy.load_checkpoint(folder / str(sharded) / f"step={step}.ckpt")["state_dict"]
            found.append([state[f"layers.{n}._extra_state"]["calls"] for n in (0, 8)])
    return found


def test_extra_states_of_submodules_are_those_of_their_process(tmp_path: Path) -> None:
    two, one = processes.two_and_one(counted, tmp_path)
    assert two == [one] * 2 and one[0] < one[1]


class Slowing(torch.optim.SGD):
    """Keeps the number of its steps beside the states of its parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.state["steps"] = self.state.get("steps", torch.tensor([0])) + 1
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[parameter]["last"] = parameter.grad.clone()
            parameter.data.sub_(parameter.grad, alpha=0.1 / self.state["steps"].item())
        return loss


class OfSlowing(MLP):
    def configure_optimizers(self) -> Any:
        return Slowing(self.parameters(), lr=0.1)


def slowing(folder: Path) -> Any:
    """Two epochs, also resumed after the first one, with checkpoints of both kinds and with parallel models."""
    found: list[Any] = []
    devices = processes.num_processes()
    for strategy in ({}, {"save_distributed_checkpoint": True}, {"num_pipelines": 2}):
        sub = folder / str(len(found))
        for start in (None, sub / f"step={4 // strategy.get('num_pipelines', 1)}.ckpt"):
            torch.manual_seed(4)
            model, saving = OfSlowing(), {"enable_checkpointing": True, "callbacks": [every_step(sub)]}
            runner = pipeline(2, devices, {**MICRO, **strategy}, **(saving if start is None else {}))
            runner.fit(model, loader(MLP, 32, 8), ckpt_path=start)
            found.append(model.state_dict())
        assert_equal(found[-2], found[-1])
    return found


def test_what_optimizers_keep_of_no_parameter_is_saved_and_resumed(tmp_path: Path) -> None:
    two, one = processes.two_and_one(slowing, tmp_path)
    assert_equal(two, [one] * 2)


# -- distributed checkpoints -----------------------------------------------------------------------------------------


def in_two(folder: Path) -> dict[str, Any]:
    """Train in two processes with shards and with files, and go on from both."""
    seen: dict[str, Any] = {}
    sharded = through(folder / "shards", 2, save_distributed_checkpoint=True)
    seen["sharded"] = sharded.state_dict()
    seen["files"] = through(folder / "files", 2).state_dict()
    for kind in ("shards", "files"):
        seen[f"resumed from {kind}"] = resumed(folder / kind / "step=3.ckpt", 2, 2).state_dict()
    for path in (None, folder / "tied" / "step=2.ckpt"):  # a parameter with a copy on each process
        torch.manual_seed(4)
        tied = TiedTransformer("adamw")
        saving = {"enable_checkpointing": True, "callbacks": [every_step(folder / "tied")]} if path is None else {}
        runner = pipeline(2, 2, {**MICRO, "save_distributed_checkpoint": True}, **saving)
        runner.fit(tied, loader(TiedTransformer, 16, 8), ckpt_path=path)
        seen[f"tied from {path and path.name}"] = tied.state_dict()
    return seen


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("two")
    return processes.everywhere(2, in_two, folder, folder=folder), folder


def test_two_processes_resume_mid_epoch_bitwise_from_files_and_shards(never_stopped: Any, two_processes: Any) -> None:
    expected = never_stopped[0].state_dict()
    for rank in two_processes[0]:
        assert_equal(rank.pop("tied from None"), rank.pop("tied from step=2.ckpt"))
        assert_equal(rank, dict.fromkeys(rank, expected))


def from_datamodule(folder: Path) -> dict[str, Any]:
    through(folder, 2, data=Positions())
    found = resumed(folder / "step=3.ckpt", 2, 2, data=Positions()).state_dict()
    with pytest.raises(ConfigurationError, match="with a Positions that saves its state"):
        through(folder, 2, data=Positions(), links=Links(reader="first"))
    return found


def test_two_processes_resume_mid_epoch_bitwise_where_the_datamodule_knows(never_stopped: Any, tmp_path: Path) -> None:
    for rank in processes.everywhere(2, from_datamodule, tmp_path, folder=tmp_path):
        assert_equal(rank, never_stopped[0].state_dict())


@pytest.mark.parametrize(("step", "num_stages"), [(3, 1), (4, 3)])
def test_shards_of_two_stages_are_resumed_in_any_number_of_them(
    never_stopped: Any, two_processes: Any, step: int, num_stages: int
) -> None:
    path = two_processes[1] / "shards" / f"step={step}.ckpt"
    assert path.is_dir()
    assert_same_parameters(never_stopped[0], resumed(path, num_stages))


def test_each_process_writes_each_of_its_tensors_once(two_processes: Any) -> None:
    folder = two_processes[1] / "shards" / "step=3.ckpt"
    written = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    held = defaultdict(set)
    for index, place in written.storage_data.items():
        held[place.relative_path].add(index.fqn)
    assert held.keys() == {"__0_0.distcp", "__1_0.distcp"}
    model, averages = (
        Scheduled().state_dict(),
        {f"optimizer_0.state.{name}.exp_avg" for name in Scheduled().state_dict()},
    )
    for names in held.values():  # both hold some weights, and the averages that belong to them
        weights = {name.removeprefix("model.") for name in names if name.startswith("model.")}
        assert weights
        assert {f"optimizer_0.state.{name}.exp_avg" for name in weights} == names & averages
    assert {name for names in held.values() for name in names if name.startswith("model.")} == {
        f"model.{name}" for name in model
    }
    on_disk = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert on_disk == sum(place.length for place in written.storage_data.values())


def test_shards_are_made_a_file_by_lightnings_tool(
    two_processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, files = (two_processes[1] / kind / "step=3.ckpt" for kind in ("shards", "files"))
    out = tmp_path / "one.ckpt"
    monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint", str(folder), "--output_file", str(out)])
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    one, other = torch.load(out), torch.load(files)
    assert one.keys() == other.keys()
    assert all(torch.equal(one["state_dict"][name], value) for name, value in other["state_dict"].items())
    plain = [Scheduled(), Scheduled()]
    for model, path in zip(plain, (out, files), strict=True):
        torch.manual_seed(7)
        trainer().fit(model, ResumableLoader(Scheduled), ckpt_path=path)
    assert_same_parameters(*plain)


def test_shards_are_evaluated_without_reading_the_optimizer(two_processes: Any) -> None:
    model = Scheduled()
    seen = []
    model.on_load_checkpoint = seen.append  # type: ignore[method-assign]
    path = two_processes[1] / "shards" / "step=8.ckpt"
    pipeline(2).validate(model, loader(Scheduled, 8, 8), ckpt_path=path, verbose=False)
    assert "optimizer_states" not in seen[0]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in two_processes[0][0]["sharded"].items())


def test_shards_and_a_checkpoint_plugin_are_not_combined() -> None:
    with pytest.raises(ConfigurationError, match="would not use Elsewhere"):
        pipeline(2, strategy={"save_distributed_checkpoint": True}, plugins=[Elsewhere()]).fit(MLP(), loader(MLP, 8, 8))
