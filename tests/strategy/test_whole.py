"""Steps that run whole: manual optimization, an overridden backward, steps that read batches themselves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_avgpipe import AvgPipeTuner
from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.averaging.models import assert_equal
from tests.driver import assert_same_parameters
from tests.manual_models import MODELS, Gan
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer, twins


class OwnBackward(MLP):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class Iterates(MLP):
    """Reads two batches for each step."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        losses = [self.loss(next(dataloader_iter)[0]) for _ in range(2)]
        return sum(losses)  # type: ignore[return-value]


def fitted(module: Any, runner: L.Trainer) -> Any:
    torch.manual_seed(7)
    runner.fit(module, loader(MLP, 16, 4, shuffle=True), loader(MLP, 8, 4, seed=1))
    return runner.global_step, {name: float(value) for name, value in runner.callback_metrics.items()}


@pytest.mark.parametrize("model", [*MODELS, OwnBackward, Iterates])
def test_in_one_process_they_train_as_on_one_device(model: type[Any]) -> None:
    one, other = twins(model)
    assert fitted(one, trainer()) == fitted(other, pipeline(2))
    assert_same_parameters(one, other)
    assert getattr(one, "seen", None) == getattr(other, "seen", None)


def test_a_checkpoint_of_several_optimizers_resumes_as_on_one_device(tmp_path: Path) -> None:
    one, other = twins(Gan)
    for module, runner in ((one, trainer), (other, pipeline)):
        first = runner(max_epochs=1)
        fitted(module, first)
        first.save_checkpoint(tmp_path / "model.ckpt")
        torch.manual_seed(8)
        module.__init__()
        torch.manual_seed(9)
        runner(max_epochs=2).fit(module, loader(MLP, 16, 4), ckpt_path=tmp_path / "model.ckpt", weights_only=False)
    assert_same_parameters(one, other)


def everything(rank: int, name: str, devices: int, path: Path) -> dict[str, Any]:
    """Train, save, and train on from there; what each rank has then. With one device as Lightning does it alone."""
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(path, save_last=True)], "enable_checkpointing": True}
    found: dict[str, Any] = {}
    for epochs in (1, 2):
        torch.manual_seed(3)
        module = {model.__name__: model for model in (*MODELS, OwnBackward, Iterates)}[name]()
        torch.manual_seed(10 * rank + epochs)  # rank 0's random numbers count
        runner = trainer(**options) if devices == 1 else pipeline(devices, devices, **options)
        runner.fit_loop.max_epochs = epochs
        data = loader(MLP, 16, 4, shuffle=True), loader(MLP, 8, 4, seed=1)
        runner.fit(module, *data, ckpt_path=path / "last.ckpt" if epochs == 2 else None, weights_only=False)
        metrics = {key: float(value) for key, value in runner.callback_metrics.items()}
        found[f"after {epochs}"] = runner.global_step, metrics, getattr(module, "seen", None)
    found["weights"] = {key: value.clone() for key, value in module.state_dict().items()}
    return found


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("Gan", 2),
        *(pytest.param(m.__name__, 2, marks=pytest.mark.slow) for m in (*MODELS[1:], OwnBackward, Iterates)),
        *(pytest.param(m.__name__, 3, marks=pytest.mark.slow) for m in MODELS),
    ],
)
def test_on_several_processes_they_equal_one_device_bit_for_bit(name: str, devices: int, tmp_path: Path) -> None:
    one = processes.results(processes.run(1, everything, name, 1, tmp_path / "one", folder=tmp_path))[0]
    several = processes.run(devices, everything, name, devices, tmp_path / "several", folder=tmp_path)
    for rank in processes.results(several):
        weights, expected = rank.pop("weights"), one["weights"]
        assert rank == {key: value for key, value in one.items() if key != "weights"}
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    one_file, other = (torch.load(tmp_path / sub / "last.ckpt", weights_only=False) for sub in ("one", "several"))
    assert_equal(one_file["optimizer_states"], other["optimizer_states"])
    assert_equal(one_file["loops"], other["loops"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_microbatches": 4},
            r"OwnBackward overrides backward\(\); .* num_microbatches=4 .*: a batch stays whole",
        ),
        ({"num_pipelines": 2}, "with num_pipelines=2 that cannot be: there is one model"),
        ({"recompute": True}, "with recompute=True that cannot be: .* use torch.utils.checkpoint"),
    ],
)
def test_what_cannot_be_with_whole_steps_is_refused(options: dict[str, Any], message: str) -> None:
    runner = pipeline(2, strategy=options)
    with pytest.raises(ConfigurationError, match=message):
        runner.fit(OwnBackward(), loader(MLP, 16, 4))
    assert runner.global_step == 0


def test_there_is_nothing_to_tune() -> None:
    with pytest.raises(ConfigurationError, match="AvgPipeTuner: Gan uses manual optimization"):
        pipeline(2, callbacks=[AvgPipeTuner()]).fit(Gan(), loader(MLP, 16, 4))


def test_it_is_said_that_they_run_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pipeline(2, max_steps=1).fit(OwnBackward(), loader(MLP, 8, 4))
    assert "OwnBackward overrides backward(): its steps run whole, not in micro-batches" in caplog.text
