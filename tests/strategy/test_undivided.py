"""Steps that no stages divide: on one device the strategy is Lightning's; others run whole, and evaluate on rank 0."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.comparing import assert_equal, assert_same_parameters, state
from tests.manual_models import MODELS, Gan
from tests.models import MLP, MadeOnMeta, loader
from tests.strategy.steps import NUM_MICROBATCHES, Layers
from tests.trainers import pipeline, trainer, twins
from tests.zoo import transformers_models
from tests.zoo.transformers_models import HuggingFace


class Noisy(MLP):
    """Draws random numbers, in a layer and in the order of its data."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(nn.functional.dropout(x, 0.2, self.training))


class Skips(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch) if batch_idx else None


class OwnBackward(MLP):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class Lbfgs(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


def both(module: Any, **options: Any) -> list[L.Trainer]:
    """Train it on one device, and its twin under the strategy."""
    runners = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PL_GLOBAL_SEED", "7")
        for each, strategy in zip(twins(module), ("auto", "avgpipe"), strict=True):
            runners.append(trainer(strategy=strategy, **copy.deepcopy(options)))
            torch.manual_seed(7)
            torch.rand(3)  # a run does not begin where the seed was set
            runners[-1].fit(each, loader(MLP, 20, 8), loader(MLP, 8, 4, seed=1))
    return runners


def test_checkpoints_equal_those_of_one_device_with_progress_and_random_numbers(tmp_path: Path) -> None:
    plain, ours = both(partial(Noisy, "adam"))
    for runner, name in ((plain, "plain"), (ours, "ours")):
        runner.save_checkpoint(tmp_path / name)
    expected, found = (torch.load(tmp_path / name, weights_only=False) for name in ("plain", "ours"))
    assert expected["loops"] and expected["optimizer_states"][0]["state"]
    assert_equal(expected, found)
    assert_equal(dict(plain.callback_metrics), dict(ours.callback_metrics))


@pytest.mark.parametrize("module", [Gan, OwnBackward, Skips, Lbfgs])
def test_what_a_pipeline_refuses_works(module: type[MLP]) -> None:
    plain, ours = both(module)
    assert_same_parameters(plain.lightning_module, ours.lightning_module)
    assert ours.global_step == plain.global_step > 0


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"num_microbatches": 1}, True), ({"num_microbatches": 2}, False), ({"num_stages": 2}, False)],
)
def test_only_what_cannot_be_pipelined_is_plain(options: dict[str, int], plain: bool) -> None:
    runner = trainer(strategy=AvgPipeStrategy(costs="flops", **options), max_steps=1)
    runner.fit(MLP(), loader(MLP, 8, 8))
    assert (runner.strategy.plan is None) is plain is runner.strategy.passthrough


@pytest.mark.parametrize(("num_stages", "said"), [("auto", "there is nothing to pipeline"), (2, "sends to the next")])
def test_there_is_one_table_of_stages_or_it_is_said_once_why_not(
    num_stages: int | str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = trainer(strategy=AvgPipeStrategy(num_stages=num_stages, costs="flops"), max_steps=1)
        for run in (runner.fit, runner.validate):
            run(MLP(), loader(MLP, 8, 8))
    assert caplog.text.count(said) == 1
    assert ("validation_step: stage 0: " in caplog.text) == (num_stages == 2)


def test_a_module_on_meta_gets_its_contents() -> None:
    found = []
    piped = pipeline(2, strategy={"num_microbatches": 1}, max_epochs=1)
    for runner in (trainer(strategy="avgpipe", max_epochs=1), piped):
        torch.manual_seed(5)
        found.append(MadeOnMeta())
        runner.fit(found[-1], loader(MLP, 8, 8))
    assert_same_parameters(*found)


def test_a_pipeline_and_one_device_resume_from_each_other(tmp_path: Path) -> None:
    def plain(**options: Any) -> L.Trainer:
        return trainer(strategy=AvgPipeStrategy(save_distributed_checkpoint=True), **options)

    def piped(**options: Any) -> L.Trainer:
        return pipeline(2, strategy={"num_microbatches": 1, "save_distributed_checkpoint": False}, **options)

    def run(*makers: Callable[..., L.Trainer]) -> MLP:
        torch.manual_seed(3)
        for epoch, make in enumerate(makers, start=1):
            module, runner = MLP("adam"), make(max_epochs=epoch)
            last = tmp_path / f"{epoch - 1}" if epoch > 1 else None
            runner.fit(module, loader(MLP, 16, 8, shuffle=False), ckpt_path=last, weights_only=False)
            runner.save_checkpoint(tmp_path / f"{epoch}")
        return module

    expected = run(plain, plain, plain)
    assert_same_parameters(expected, run(plain, piped, plain), exact=False)
    assert_same_parameters(expected, run(piped, plain, piped), exact=False)


def test_a_timeline_of_no_pipeline_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = PipelineTimeline(every_n_steps=1, dirpath=tmp_path / "timelines")
    with pytest.warns(UserWarning, match="PipelineTimeline writes nothing"):
        trainer(strategy="avgpipe", max_steps=2, callbacks=[timeline]).fit(MLP(), loader(MLP, 16, 8))
    assert not (tmp_path / "timelines").exists()


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
    found["weights"] = state(module)
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
    one = everything(0, name, 1, tmp_path / "one")
    several = processes.each(devices, everything, name, devices, tmp_path / "several", folder=tmp_path)
    assert_equal(several, [one] * devices)
    one_file, other = (torch.load(tmp_path / sub / "last.ckpt", weights_only=False) for sub in ("one", "several"))
    assert_equal(one_file["optimizer_states"], other["optimizer_states"])
    assert_equal(one_file["loops"], other["loops"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 4}, r"OwnBackward overrides backward\(\); .* num_microbatches=4 .*: a batch stays whole"),
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


# -- steps of evaluation that stages cannot run, such as with generate(): rank 0 does, as on one device ---------------


class Twice(Layers):
    """Runs its layers twice in validation, and in prediction on two versions of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def through(self, x: Tensor) -> Tensor:
        return super().through(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", self.through(batch[0]).mean())
        self.log("val_loss", self.loss((batch[0] + 0.1, batch[1])))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0]) + self.through(-batch[0])) / 2

    @staticmethod
    def data() -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(TensorDataset(*torch.randn(2, 16, 8, generator=generator)), batch_size=8)


class Seeds(Twice):
    """Seeds torch's random numbers in validation, which the stages of a pipeline cannot do together."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(0)
        noise = torch.randn(batch[0].shape)
        self.log("val_loss", self.loss((batch[0] + noise, batch[1])))


class Collects(Seeds):
    """Logs what validation has collected when it ends, in the sanity check too, before there are stages."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(float(batch[0].mean()))

    def on_validation_epoch_end(self) -> None:
        self.log("val_seen", sum(self.seen))
        self.seen.clear()


class Scopes(Twice):
    """Tests with other weights for a while, such as averaged ones."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        kept = [parameter.clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.mul_(0.9)
        self.validation_step(batch, batch_idx)
        for parameter, before in zip(self.parameters(), kept, strict=True):
            parameter.data.copy_(before)


class OnMeta(Twice):
    """Its weights are made stage by stage, so that no process has all of them."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()

    def configure_model(self) -> None:
        """The weights are there already, on meta."""


class Generates(HuggingFace):
    """Generates text in validation, with a cache of keys and values."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(transformers_models.gpt2())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_tokens", self.predict_step(batch, batch_idx).double().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        prompt = batch["input_ids"]
        made: Tensor = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=4, max_new_tokens=4, do_sample=False
        )
        return made

    @staticmethod
    def data() -> Any:
        torch.manual_seed(4)
        return DataLoader([transformers_models.texts(8, 5) for _ in range(2)], batch_size=None)


def evaluated(make: Callable[[], Any], devices: int, num_stages: int = 2) -> Any:
    """What validation logs while a model trains, what a test says then, and what the model predicts."""
    torch.manual_seed(5)
    strategy = AvgPipeStrategy(num_stages=num_stages, num_microbatches=NUM_MICROBATCHES)
    runner, module = trainer(strategy=strategy, devices=devices, max_epochs=1), make()
    runner.fit(module, make.data(), make.data())  # type: ignore[attr-defined]
    logged = {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("val")}
    (tested,) = runner.test(module, make.data(), verbose=False)  # type: ignore[attr-defined]
    logged |= {f"tested {name}": value for name, value in tested.items()}
    return logged, runner.predict(module, make.data())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "makes", [(Twice, Seeds, Collects, Scopes, OnMeta), pytest.param((Generates,), marks=pytest.mark.slow)]
)
def test_what_stages_cannot_do_is_evaluated_as_on_one_device(makes: Any, tmp_path: Path) -> None:
    first, other = processes.everywhere(2, lambda: {make: evaluated(make, 2) for make in makes}, folder=tmp_path)
    for make in makes:
        with pytest.warns(UserWarning, match="So rank 0 runs it for all stages"):
            one = evaluated(make, 1)
        logged, predicted = evaluated(make, 1, num_stages=1) if make is not OnMeta else one  # whose stages draw weights
        for found in (one, first[make]):
            assert found[0] == pytest.approx(logged, rel=1e-6)
            torch.testing.assert_close(found[1], predicted)
        assert first[make][0] == other[make][0]  # all ranks know what was logged
