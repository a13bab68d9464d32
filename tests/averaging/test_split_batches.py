"""Parallel models that divide each batch among them: the numbers of smaller batches, and the steps of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor

from lightning_avgpipe import Averaging, AvgPipeTuner
from tests import processes
from tests.averaging.models import Batches, Models, Net, train
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import pipeline


class Logs(Net):
    def __init__(self) -> None:
        super().__init__("adamw", warm_up=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "inputs": batch[0]}


def batches(sizes: list[int]) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(5)
    return [MLP.example(size) for size in sizes]


def halves(whole: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    return [part for batch in whole for part in zip(*(t.tensor_split(2) for t in batch), strict=True)]


def fit(data: list[Any], num_stages: int = 2, **options: Any) -> tuple[Any, Models]:
    torch.manual_seed(3)
    model = Logs()
    return model, train(model, Batches(data), num_stages, **options)


@pytest.mark.parametrize("rolling", [False, True])
def test_a_batch_that_two_models_divide_is_two_batches_of_half_the_size(rolling: bool) -> None:
    whole = batches([16] * 5)
    given = Averaging(rolling=rolling, split_batches=True)
    other = Averaging(rolling=rolling, alpha=1.0, outer_lr=1.0)
    model, models = fit(whole, averaging=given)
    expected, small = fit(halves(whole), averaging=other)
    assert models.trainer.global_step == small.trainer.global_step == 5
    assert_equal(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert_equal(models.models, small.models)
    assert models.trainer.callback_metrics == small.trainer.callback_metrics


def test_with_sgd_and_momentum_they_train_as_one_model_does_on_whole_batches() -> None:
    data = batches([16, 13, 7])  # shares of unequal size
    torch.manual_seed(3)
    split, one = (MLP("sgd") for _ in range(2))
    one.load_state_dict(split.state_dict())
    weights = {"loss_weight": lambda batch: float(batch[0].abs().sum())}
    train(split, Batches(data), 2, averaging=Averaging(split_batches=True), **weights)
    train(one, Batches(data), 2, num_pipelines=1, num_microbatches=4, **weights)
    assert_close(split.state_dict(), one.state_dict())


def test_hooks_are_given_whole_batches_and_their_results() -> None:
    data, seen = batches([16, 16, 12]), list[Any]()
    sees = LambdaCallback(on_train_batch_end=lambda trainer, module, *given: seen.append(given))
    _, models = fit(data, averaging=Averaging(split_batches=True), trainer={"callbacks": [sees]})
    assert models.trainer.num_training_batches == len(seen) == 3
    for number, (outputs, batch, batch_idx) in enumerate(seen):
        assert batch_idx == number
        assert torch.equal(batch[0], data[number][0])
        assert torch.equal(outputs["inputs"], data[number][0])


@pytest.mark.parametrize("rolling", [False, True])
def test_of_a_batch_with_too_few_samples_some_models_have_none(rolling: bool) -> None:
    data = batches([8, 2, 3])  # batch normalisation needs two samples, so the second batch is one micro-batch
    given = Averaging(split_batches=True, rolling=rolling)
    model, models = fit(data, averaging=given, num_microbatches="auto")
    assert models.trainer.global_step == 3
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def fit_rolling(folder: Path, devices: int, ckpt_path: Path | None = None) -> Any:
    torch.manual_seed(3 if ckpt_path is None else 99)
    model = Logs()
    strategy = {
        "num_pipelines": 3, "num_microbatches": 2, "averaging": Averaging(split_batches=True, rolling=True),
    }  # fmt: skip
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    runner = pipeline(2, devices, strategy, max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    runner.fit(model, loader(Net, 54, 18), ckpt_path=ckpt_path)
    assert runner.global_step == 6
    return dict(model.state_dict())


def in_two(folder: Path) -> Any:
    return fit_rolling(folder / "two", 2), fit_rolling(folder / "again", 2, folder / "two" / "step=3.ckpt")


def test_two_processes_divide_batches_as_one_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    expected = fit_rolling(tmp_path / "one", 1)
    assert_equal(processes.everywhere(2, in_two, tmp_path, folder=tmp_path), [(expected, expected)] * 2)


def in_groups() -> Any:
    found = []
    dividing = {"num_pipelines": 2, "averaging": Averaging(groups=2, split_batches=True, outer_lr=1.0)}
    for strategy in ({"replicas": 2, "num_microbatches": 4}, {**dividing, "num_microbatches": 2}):
        torch.manual_seed(3)
        model = MLP("sgd")
        pipeline(2, 4, strategy, max_epochs=1).fit(model, loader(MLP, 32, 8))
        found.append(state(model))
    return found


@pytest.mark.slow
def test_groups_whose_models_divide_batches_train_as_replicas(tmp_path: Path) -> None:
    for expected, found in processes.everywhere(4, in_groups, folder=tmp_path):
        assert_close(found, expected)


def of_replica(rank: int | None) -> Any:
    data = batches([13, 16, 7, 5, 9, 1])  # with unequal shares, of which the last replica has one only at the end
    if rank is None:
        data = [tuple(map(torch.cat, zip(*data[i : i + 2], strict=True))) for i in range(0, len(data), 2)]
    torch.manual_seed(3)
    model, devices, strategy = MLP("sgd"), 1, {"num_pipelines": 1, "num_microbatches": 4}
    if rank is not None:
        devices, data, averaging = 2, data[rank::2], Averaging(split_batches=True)
        strategy = {"num_pipelines": 2, "num_microbatches": 2, "replicas": 2, "averaging": averaging}
    pipeline(1, devices, strategy, max_epochs=1, use_distributed_sampler=False).fit(model, Batches(data))
    return state(model)


def test_models_of_replicas_count_samples_as_one_model_does(tmp_path: Path) -> None:
    expected = of_replica(None)
    for found in processes.each(2, of_replica, folder=tmp_path):
        assert_close(found, expected)


def test_the_first_step_of_each_model_is_compared_with_a_plain_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning_avgpipe")
    fit(batches([16, 16]), averaging=Averaging(split_batches=True), verify=True)
    assert "verified 1 optimizer steps: 4 losses, 13 gradients, 13 weights, 3 buffers equal bit for bit" in caplog.text


def test_the_tuner_divides_batches_and_keeps_the_number_of_steps(tmp_path: Path) -> None:
    tuner = AvgPipeTuner(2, samples_factor=0.01, dirpath=tmp_path)
    strategy = {"averaging": Averaging(split_batches=True, rolling="auto")}
    runner = pipeline(2, 1, strategy, max_epochs=1, callbacks=[tuner])
    runner.fit(MLP(), Batches(batches([16] * 3)))
    assert tuner.result is not None
    settings = [candidate.setting for candidate in tuner.result.candidates]
    assert {setting.parts for setting in settings} == {1, 2, 4, 8, 16}
    assert tuner.result.choice.setting.num_pipelines == 2
    assert runner.global_step == 3


def test_models_that_wait_for_each_other_are_said_to_save_no_time() -> None:
    with pytest.warns(UserWarning, match=r"split_batches=True\) saves no time .* Use rolling=True with it"):
        fit(batches([8]), averaging=Averaging(split_batches=True))
    with pytest.warns(UserWarning, match=r"split_batches=True\) without effect: there is one pipeline"):
        fit(batches([8]), averaging=Averaging(split_batches=True), num_pipelines=1)
