"""Checkpoints of parallel models: the reference for everybody, all of them to go on with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_avgpipe import Averaging, AvgPipeStrategy
from tests.averaging.models import Models, Net
from tests.averaging.test_equations import NESTEROV
from tests.comparing import assert_equal, state
from tests.strategy.test_resume import ResumableLoader
from tests.trainers import Reconfigures, SavesAtStart, pipeline, trainer

TOGETHER = Averaging(every=3, outer_optimizer=NESTEROV)
LATE = Averaging(every=3, outer_optimizer=NESTEROV, alpha=1.0, fragments=2, delay=2)


def fit(
    num_stages: int,
    seed: int = 4,
    path: Path | None = None,
    folder: Path | None = None,
    devices: int = 1,
    moves: Sequence[str] = (),
    optimizer: str = "adamw",
    **strategy: Any,
) -> Any:
    """Two epochs of seven batches: with two pipelines four iterations each, the last of which is ragged."""
    torch.manual_seed(seed)
    model, models = Net(optimizer, warm_up=True), Models()
    callbacks: list[Any] = [models, Reconfigures({2: {"split_points": moves}} if moves else {})]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    strategy = {"num_pipelines": 2, "num_microbatches": 2, "averaging": TOGETHER, **strategy}
    strategy |= {"split_points": ["lstm"]} if moves else {}
    runner = pipeline(num_stages, devices, strategy, callbacks=callbacks, enable_checkpointing=folder is not None)
    runner.fit(model, ResumableLoader(Net, 56, 8), ckpt_path=path)
    return SimpleNamespace(
        left=state(model), models=models.models, reference=models.reference, steps=runner.global_step
    )


def through(averaging: Averaging, folder: Path) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    return fit(2, folder=folder, averaging=averaging), folder


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return through(TOGETHER, tmp_path_factory.mktemp("through"))


@pytest.fixture(scope="module")
def never_stopped_late(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return through(LATE, tmp_path_factory.mktemp("late"))


def assert_goes_on(run: tuple[Any, Path], step: int, num_stages: int, averaging: Averaging) -> None:
    expected, folder = run
    found = fit(num_stages, 99, folder / f"step={step}.ckpt", averaging=averaging)
    assert found.steps == expected.steps == 8
    assert_equal((found.left, found.models), (expected.left, expected.models))


@pytest.mark.parametrize(("step", "num_stages"), [(1, 3), (2, 1), (4, 3), (6, 1)])
def test_a_resume_after_any_iteration_is_bitwise(never_stopped: Any, step: int, num_stages: int) -> None:
    assert_goes_on(never_stopped, step, num_stages, TOGETHER)


def test_so_it_is_with_what_steps_count_in_the_groups_of_an_optimizer(tmp_path: Path) -> None:
    expected, found = (fit(1, folder=tmp_path, path=p, optimizer="slowing") for p in (None, tmp_path / "step=5.ckpt"))
    assert_equal((found.left, found.models), (expected.left, expected.models))


@pytest.mark.parametrize(("step", "num_stages"), [(1, 2), (3, 1), (6, 3)])
def test_so_it_is_while_fragments_are_under_way(never_stopped_late: Any, step: int, num_stages: int) -> None:
    saved = torch.load(never_stopped_late[1] / f"step={step}.ckpt", weights_only=True)
    assert saved["AvgPipeStrategy"]["ensemble"]["late"]
    assert_goes_on(never_stopped_late, step, num_stages, LATE)


def test_a_checkpoint_is_an_ordinary_one_of_the_reference(never_stopped: Any) -> None:
    expected, folder = never_stopped
    path = folder / "step=8.ckpt"
    assert_equal(state(Net.load_from_checkpoint(path, weights_only=True)), expected.reference)
    plain, piped = (Net("adamw", dropout=0.0, warm_up=True) for _ in range(2))
    runners = trainer(max_epochs=3), pipeline(strategy={"num_microbatches": 1}, max_epochs=3)
    for model, runner in zip((plain, piped), runners, strict=True):
        runner.fit(model, ResumableLoader(Net, 56, 8), ckpt_path=path)
        assert runner.global_step > 8
    assert_equal(plain, piped)
    assert not torch.equal(plain.scale, expected.reference["scale"])


def test_a_checkpoint_before_the_first_batch_of_a_resume_has_all_models(never_stopped: Any, tmp_path: Path) -> None:
    path = never_stopped[1] / "step=2.ckpt"
    strategy = {"num_pipelines": 2, "num_microbatches": 2, "averaging": TOGETHER}
    runner = pipeline(2, strategy=strategy, callbacks=[SavesAtStart(tmp_path / "start.ckpt")], max_steps=3)
    runner.fit(Net("adamw", warm_up=True), ResumableLoader(Net, 56, 8), ckpt_path=path)
    found, expected = (
        torch.load(p, weights_only=True)["AvgPipeStrategy"]["ensemble"] for p in (tmp_path / "start.ckpt", path)
    )
    assert_equal(found, expected)


@pytest.fixture(scope="module")
def reference_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    fit(2, folder=folder, averaging=Averaging(save_models=False))
    return folder


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"num_pipelines": 3}, "num_pipelines=3, but the checkpoint holds 2 parallel models: all pipelines start"),
        ({"num_pipelines": 2, "saved": False}, "num_pipelines=2, but the checkpoint holds one model: all pipelines"),
        ({"num_pipelines": 1}, "num_pipelines=1, but the checkpoint holds 2 parallel models: training goes on"),
        ({"num_pipelines": 1, "saved": False}, ""),
    ],
)
def test_other_parallel_models_start_from_the_reference(
    option: dict[str, Any], says: str, never_stopped: Any, reference_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    option = dict(option)
    saves = option.pop("saved", True)
    path = (never_stopped[1] if saves else reference_only) / "step=5.ckpt"
    saved = torch.load(path, weights_only=True)
    assert ("ensemble" in saved["AvgPipeStrategy"]) == saves

    class Begin(Models):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            now = {name: p.detach().clone() for name, p in module.named_parameters()}
            self.first = getattr(self, "first", now)

    caplog.clear()
    begin, model = Begin(), Net("adamw", warm_up=True)
    strategy = AvgPipeStrategy(num_stages=2, costs="flops", num_microbatches=2, **option)
    trainer(strategy=strategy, callbacks=[begin]).fit(model, ResumableLoader(Net, 56, 8), ckpt_path=path)
    assert_equal(begin.first, {name: saved["state_dict"][name] for name in begin.first})
    assert says in caplog.text
    assert len(begin.models) == option["num_pipelines"]
    assert bool(says) == ("from its weights and optimizer states" in caplog.text)


def test_shards_hold_parallel_models_too(never_stopped: Any, tmp_path: Path) -> None:
    expected, _ = never_stopped
    fit(2, folder=tmp_path, save_distributed_checkpoint=True)
    found = fit(3, 99, tmp_path / "step=3.ckpt")
    assert_equal(found.left, expected.left)
