"""The tuner measures, chooses and leaves no trace: training goes on as if its choice had been given by hand."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_avgpipe import Averaging, AvgPipeTuner
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.errors import ConfigurationError, TuningError
from lightning_avgpipe.planning.memory import Need
from lightning_avgpipe.schedule import FORWARD, Action
from lightning_avgpipe.strategy import profiler
from lightning_avgpipe.tuning.predictors import Prediction, Predictor, memory_at
from lightning_avgpipe.tuning.profile import Setting, from_json
from lightning_avgpipe.tuning.search import Result
from lightning_avgpipe.utils.patching import replaced
from tests import processes
from tests.comparing import assert_equal
from tests.comparing import state as weights_of
from tests.models import MLP, Regression, loader
from tests.strategy.test_rolling import Changing, Clears, Measured
from tests.trainers import pipeline, trainer


def like(*settings: Setting) -> None:
    """Let the tuner like some settings, in this order, and the others less, whatever the machine measures."""

    def predict(self: Predictor, setting: Setting) -> Prediction:
        memory = tuple(needed.total for needed in memory_at(self._profile, setting))
        per_batch_s = 1.0 + settings.index(setting) if setting in settings else 100.0 - setting.num_pipelines
        return Prediction(per_batch_s * setting.num_pipelines, per_batch_s, memory)

    Predictor.predict = Predictor.bound = predict  # type: ignore[method-assign]


@pytest.fixture
def liking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the choice independent of the machine."""
    for name in ("predict", "bound"):
        monkeypatch.setattr(Predictor, name, getattr(Predictor, name))  # put back at the end
    return like


class Eventful(Regression):
    """Everything that an iteration may change: buffers, attributes, metrics, random numbers of all kinds, its batch."""

    instances = 0

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout, self.three = nn.Dropout(0.3), nn.Linear(8, 8)
        self.error = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.calls = {"step": 0, "transfer": 0, "start": 0, "backward": 0}

    @staticmethod
    def example(size: int) -> Any:
        return {"x": torch.randn(size, 8), "y": torch.randn(size, 8)}

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.dropout(torch.relu(self.two(self.norm(torch.relu(self.one(x)))))))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls["transfer"] += 1
        batch["x"] += random.random() + np.random.rand()
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls["start"] += 1
        self.log("started", float(self.calls["start"]))

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls["backward"] += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls["step"] += 1
        type(self).instances += 1
        y = batch.pop("y")
        loss = (self(batch["x"]) - y).square().mean()
        self.losses.append(1.0)
        self.error(loss.detach())
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


class Stream(IterableDataset[Any]):
    """Without a length, and every sample is drawn once."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._samples):
            self.drawn += 1
            yield {"x": torch.randn(8), "y": torch.randn(8)}


class Witness(L.Callback):
    """What there is when each iteration begins, by name, and the order in which hooks are called."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({**state(trainer, pl_module), "batch": {name: t.clone() for name, t in batch.items()}})


def state(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    """Everything by name."""
    return {
        "tensors": weights_of(module),
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()},
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "attributes of optimizers": [sorted(vars(optimizer)) for optimizer in trainer.optimizers],
        "generators": (torch.get_rng_state(), repr(np.random.get_state()), repr(random.getstate())),
        "progress": (repr(trainer.fit_loop.state_dict()), trainer.global_step),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "attributes": repr([module.losses, module.calls, module._current_fx_name]),
        "names": sorted(vars(module)),
        "metric": repr((module.error._update_count, module.error.mean_value, module.error.weight)),
        "class": type(module).instances,
    }


def fitted(callbacks: list[Any], data: Any, strategy: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Train an eventful model; what was there at each iteration and at the end."""
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    Eventful.instances = 0
    model, witness = Eventful(), Witness()
    options = {"max_epochs": 2, "limit_val_batches": 0, **options}
    runner = pipeline(2, strategy=strategy, callbacks=[*callbacks, witness], **options)
    runner.fit(model, data())
    return {"iterations": witness.seen, "end": state(runner, model)}


def sized() -> Any:
    return loader(Eventful, 40, 8, shuffle=True)


def unsized() -> Any:
    return DataLoader(Stream(40), 8)


def by_hand(setting: Setting) -> dict[str, Any]:
    return {
        "num_pipelines": setting.num_pipelines,
        "num_microbatches": setting.num_microbatches,
        "advance": setting.advance,
    }


ALONE, TOGETHER = Setting(4, 1, 0), Setting(2, 3, 0)


@pytest.mark.parametrize(
    ("setting", "data", "limit"),
    [
        pytest.param(ALONE, sized, None, marks=pytest.mark.slow),
        pytest.param(TOGETHER, unsized, None, marks=pytest.mark.slow),
        (TOGETHER, sized, 1),
    ],
)
def test_training_goes_on_as_if_the_choice_had_been_given_by_hand(
    setting: Setting, data: Any, limit: int | None, liking: Callable[..., None], tmp_path: Path
) -> None:
    liking(setting)
    tuner = AvgPipeTuner(3, [2, 4], profile_batches=6, dirpath=tmp_path)
    options = {} if limit is None else {"limit_train_batches": limit}
    found = fitted([tuner], data, **options)
    expected = fitted([], data, by_hand(tuner.result.choice.setting), **options)
    assert len(found["iterations"]) > 1
    assert_equal(found, expected)


@pytest.mark.parametrize("rolls", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_tuner_chooses_whether_to_roll_where_that_is_open(rolls: bool, liking: Any, tmp_path: Path) -> None:
    setting = Setting(4, 2, 1, rolling=rolls)
    liking(setting)
    tuner = AvgPipeTuner(3, [2, 4], profile_batches=6, dirpath=tmp_path)
    found, runner = mlp(
        tuner,
        {"averaging": Averaging(rolling="auto")},
        max_epochs=2,
        callbacks=[ModelCheckpoint(tmp_path)],
        enable_checkpointing=True,
    )
    assert tuner.result.choice.setting == setting and runner.strategy.rolls == rolls
    expected, _ = mlp(None, {"averaging": Averaging(rolling=rolls), **by_hand(setting)}, max_epochs=2)
    assert_equal(found.state_dict(), expected.state_dict())
    # a run that goes on does as the one that was saved
    (saved,) = tmp_path.glob("*.ckpt")
    liking(Setting(2, 2, 0, rolling=not rolls))
    _, runner = mlp(
        AvgPipeTuner(dirpath=tmp_path), {"averaging": Averaging(rolling="auto")}, max_epochs=3, ckpt_path=saved
    )
    assert runner.strategy.rolls == rolls and runner.global_step == 6


@pytest.mark.slow
def test_what_cannot_roll_is_tuned_without(liking: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    liking(Setting(4, 2, 0, rolling=True), Setting(4, 2, 0))
    for module, why in (
        (Measured, "the metric object 'mean'"),
        (Clears, "on_before_zero_grad"),
        (Changing, "changes 'calls'"),
    ):
        tuner = AvgPipeTuner(2, [4], profile_batches=4, dirpath=tmp_path)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            pipeline(2, strategy={"averaging": Averaging(rolling="auto")}, callbacks=[tuner], max_epochs=1).fit(
                module(), loader(module, 16, 8)
            )
        assert not any(candidate.setting.rolling for candidate in tuner.result.candidates)
        (said,) = [record.message for record in caplog.records if "do not roll" in record.message]
        assert why in said


def test_what_does_not_roll_is_refused_before_it_is_tuned(tmp_path: Path) -> None:
    tuner, rolling = AvgPipeTuner(2, dirpath=tmp_path), {"averaging": Averaging(rolling=True)}
    with pytest.raises(ConfigurationError, match=r"Averaging\(rolling=True\) and Clears\.on_before_zero_grad"):
        pipeline(2, strategy=rolling, callbacks=[tuner]).fit(Clears(), loader(MLP, 16, 8))
    assert not [*tmp_path.iterdir()]


def test_a_larger_factor_prefers_one_pipeline(tmp_path: Path) -> None:
    for factor, chosen in ((0.01, 2), ({2: 100.0}, 1)):
        tuner = AvgPipeTuner(2, [4], profile_batches=4, samples_factor=factor, dirpath=tmp_path)
        _, runner = mlp(tuner)
        assert runner.strategy.num_pipelines == chosen


# -- memory ------------------------------------------------------------------------------------------------------------


@contextmanager
def scarce(stage: int, too_few: int, error: Callable[[str], BaseException] = torch.OutOfMemoryError) -> Iterator[None]:
    """A stage has no room for batches in so few micro-batches."""
    perform = Stage.perform

    def limited(self: Stage, action: Action, task: Any, message: Any) -> Any:
        short = self.program.stage == stage and len(task.args) <= too_few
        if task.trains and short and action == Action(FORWARD, 1):  # others are under way by then
            raise error("tried to allocate 3.00 GiB")
        return perform(self, action, task, message)

    with replaced(Stage, "perform", limited):
        yield


def mlp(tuner: Any, strategy: dict[str, Any] | None = None, devices: int = 1, **options: Any) -> tuple[Any, L.Trainer]:
    torch.manual_seed(3)
    model, path = MLP("adamw"), options.pop("ckpt_path", None)
    callbacks = [*options.pop("callbacks", []), *([] if tuner is None else [tuner])]
    runner = pipeline(2, devices, strategy, callbacks=callbacks, **{"max_epochs": 1, **options})
    runner.fit(model, loader(MLP, 32, 8), ckpt_path=path)
    return model, runner


def host_allocator(text: str) -> RuntimeError:
    return RuntimeError(f"[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: {text}")


@pytest.mark.parametrize(("stage", "error"), [(0, torch.OutOfMemoryError), (1, host_allocator)])
def test_what_does_not_fit_while_profiling_is_not_chosen(stage: int, error: Any, liking: Any, tmp_path: Path) -> None:
    liking(Setting(2), Setting(4))
    tuner = AvgPipeTuner(2, [2, 4, 8], profile_batches=8, dirpath=tmp_path)
    with scarce(stage, 2, error):
        mlp(tuner)
    assert {c.setting.num_microbatches for c in tuner.result.candidates} == {4, 8}
    assert tuner.result.choice.setting == Setting(4)


def test_profiling_goes_on_with_more_micro_batches_where_the_first_do_not_fit(liking: Any, tmp_path: Path) -> None:
    tuner = AvgPipeTuner(1, [4, 16, 32], profile_batches=6, dirpath=tmp_path)
    with scarce(1, 16):
        pipeline(2, callbacks=[tuner], max_epochs=1).fit(MLP(), loader(MLP, 64, 32))
    counts = {c.setting.num_microbatches for c in tuner.result.candidates}
    assert counts == {tuner.result.profile.num_microbatches} == {32}


def test_where_nothing_fits_the_error_says_where_and_what_would_help(tmp_path: Path) -> None:
    with scarce(1, 8), pytest.raises(TuningError) as raised:
        mlp(AvgPipeTuner(1, [2, 4, 8], dirpath=tmp_path))
    said = str(raised.value)
    for part in (
        "8 micro-batches",
        "rank 0, stage 1 in F1: tried to allocate 3.00 GiB",
        "more stages",
        "recompute=True",
    ):
        assert part in said
    with pytest.raises(TuningError, match=r"none of .* fits memory_limit=1000 B.* on stage \d.*too much.*would help"):
        mlp(AvgPipeTuner(1, memory_limit=1000, dirpath=tmp_path))


def test_where_no_kernels_are_seen_the_device_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        profiler.Profiler, "_curves", lambda self, setting, _, times: self._kernel_curves(setting, times)
    )
    tuner = AvgPipeTuner(2, [2, 4], profile_batches=6, dirpath=tmp_path)
    with pytest.warns(UserWarning, match=r"torch.profiler shows no kernels of the device, so it counts as full"):
        mlp(tuner)
    assert {c.utilisation for stage in tuner.result.profile.stages for c in (stage.forward, stage.backward)} == {(1.0,)}


def test_the_profile_tells_times_sizes_and_memory_and_lies_beside_the_checkpoints(tmp_path: Path) -> None:
    logger, saving = TensorBoardLogger(tmp_path), ModelCheckpoint(tmp_path / "kept")
    tuner = AvgPipeTuner(2, [1, 2, 4, 8], profile_batches=12)
    _, runner = mlp(tuner, {"costs": "measured"}, callbacks=[saving], enable_checkpointing=True, logger=logger)
    profile = tuner.result.profile
    assert (profile.num_microbatches, profile.batch_size) == (8, 8)
    assert profile.in_turns and profile.devices == (0, 0)
    for stage, plan in zip(profile.stages, runner.strategy.plan.stages, strict=True):
        assert [other.num_microbatches for other in stage.others] == [4, 2, 1]
        for curve in (stage.forward, stage.backward):
            assert curve.total_s > 0 and 0 < curve.utilisation[0] <= 1
        assert stage.step_s > 0 and stage.averaging_s > 0
        weights = 4 * plan.num_parameters
        batch = 8 * 8 * 4  # stage 0 needs the inputs of 8 samples, stage 1 the targets
        # weights, gradients, and two moments with a count of steps for each parameter
        assert stage.memory.model == 4 * weights + 4 * len(plan.parameters) + batch
        assert stage.memory.reference == weights
        assert stage.memory.activations >= 8 * 8 * 4
    assert profile.hops[0].forward_bytes == profile.hops[0].backward_bytes == 8 * 4
    assert profile.tied_s == 0
    assert [trial.setting for trial in profile.trials] == [Setting(m) for m in (8, 4, 2, 1)]
    assert all(trial.span_s > 0 for trial in profile.trials)
    assert from_json(Result, (tmp_path / "kept" / "avgpipe_tuning.json").read_text()) == tuner.result
    assert (tmp_path / "kept" / "avgpipe_tuning.png").stat().st_size > 1000
    events = b"".join(path.read_bytes() for path in Path(logger.log_dir).glob("events*"))
    assert events.count(b"avgpipe/tuning") == 1 and b"train_loss" in events


# -- processes ---------------------------------------------------------------------------------------------------------


def tuned(folder: Path) -> dict[str, Any]:
    """Tune with a stage that is short of memory; resume; and train by hand."""
    found: dict[str, Any] = {}
    like(Setting(2, 2, 1), Setting(4, 2, 1))
    tuner = AvgPipeTuner(2, [2, 4, 8], profile_batches=8, dirpath=folder)
    saving = ModelCheckpoint(folder, filename="half", every_n_train_steps=1, save_top_k=1)
    with scarce(0, 2):
        model, runner = mlp(tuner, devices=2, callbacks=[saving], enable_checkpointing=True)
    found["tuned"] = (weights_of(model), runner.global_step)
    found["result"] = tuner.result
    by = by_hand(tuner.result.choice.setting)
    model, runner = mlp(None, by, devices=2)
    found["by hand"] = (weights_of(model), runner.global_step)
    again = AvgPipeTuner(2, [2, 4, 8], dirpath=folder / "again")
    model, runner = mlp(again, devices=2, ckpt_path=saving.best_model_path, max_epochs=2)
    found["resumed"] = (weights_of(model), runner.global_step)
    found["reused"] = again.result
    model, runner = mlp(None, by, devices=2, ckpt_path=saving.best_model_path, max_epochs=2)
    found["resumed by hand"] = (weights_of(model), runner.global_step)
    like(Setting(4, 2, 1, rolling=True))
    for rolling, tuning in (("auto", AvgPipeTuner(2, [4], profile_batches=4, dirpath=folder)), (True, None)):
        model, runner = mlp(
            tuning, {"averaging": Averaging(rolling=rolling), **({} if tuning else by)}, devices=2, max_epochs=2
        )
        found[f"rolling {rolling}"] = (weights_of(model), runner.strategy.rolls)
    return found


@pytest.mark.slow
def test_two_processes_tune_recover_from_lack_of_memory_and_train_as_by_hand(tmp_path: Path) -> None:
    outcomes = processes.everywhere(2, tuned, tmp_path, folder=tmp_path)
    for found in outcomes:
        assert found["result"] == outcomes[0]["result"] == found["reused"]
        setting = found["result"].choice.setting
        assert (setting.num_microbatches, setting.num_pipelines) == (4, 2)
        assert {c.setting.num_microbatches for c in found["result"].candidates} == {4, 8}
        assert_equal(found["tuned"], found["by hand"])
        assert_equal(found["resumed"], found["resumed by hand"])
        assert found["resumed"][1] > found["tuned"][1]
        assert found["rolling auto"][1]
        assert_equal(found["rolling auto"], found["rolling True"])
    assert found["result"].profile.hops[0].link.per_byte > 0
    assert found["result"].profile.devices == (1, 0)
    assert not (tmp_path / "again").exists()


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Drawn(MLP):
    """A buffer with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def drawn(rank: int, folder: Path) -> dict[str, Tensor]:
    """What a replica that began with random numbers of its own is left with."""
    torch.manual_seed(rank)
    module, tuner = Drawn(), AvgPipeTuner(microbatch_candidates=[2], dirpath=folder)
    strategy = {"replicas": 2, "schedule": "1f1b"}
    pipeline(1, 2, strategy, max_epochs=1, callbacks=[tuner]).fit(module, loader(MLP, 32, 8))
    return weights_of(module)


def test_replicas_that_were_tuned_begin_with_the_same_buffers(tmp_path: Path) -> None:
    assert_equal(*processes.each(2, drawn, tmp_path, folder=tmp_path))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"num_microbatches": 4}, "AvgPipeTuner chooses .* the strategy was given num_microbatches=4; remove"),
        ({"num_pipelines": 2, "advance": 1}, "was given num_pipelines=2, advance=1; remove"),
        (None, r"microbatch_candidates=\[4, 16\]: give numbers from 1 to 8"),
    ],
)
def test_counts_that_cannot_be_chosen_are_refused(strategy: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, TuningError), match=message):
        mlp(AvgPipeTuner(1, [4] if strategy else [4, 16], dirpath=tmp_path), strategy)


def test_another_strategy_and_one_with_nothing_to_pipeline_are_refused() -> None:
    for strategy, message in (("auto", "is SingleDeviceStrategy; use Trainer"), ("avgpipe", "nothing to pipeline.*=2")):
        with pytest.raises(ConfigurationError, match=message):
            trainer(strategy=strategy, callbacks=[AvgPipeTuner()]).fit(MLP(), loader(MLP, 8, 4))


def test_nothing_is_tuned_with_fast_dev_run_or_without_training(tmp_path: Path) -> None:
    tuner = AvgPipeTuner(dirpath=tmp_path / "never")
    mlp(tuner, fast_dev_run=True)
    pipeline(2, callbacks=[tuner]).validate(MLP(), loader(MLP, 8, 4), verbose=False)
    pipeline(2, callbacks=[tuner]).predict(MLP(), loader(MLP, 8, 4))
    assert tuner.result is None
    assert not (tmp_path / "never").exists()


def test_another_fit_goes_on_with_the_choice_unless_it_does_not_fit_or_cannot_be_read(tmp_path: Path) -> None:
    tuner = AvgPipeTuner(1, [2, 4], profile_batches=4, dirpath=tmp_path)
    _, runner = mlp(tuner)
    chosen = tuner.result
    runner.fit_loop.max_epochs = 2
    runner.fit(MLP(), loader(MLP, 32, 8))
    mlp(tuner)
    assert tuner.result is chosen
    again = AvgPipeTuner(1, [4], profile_batches=4, dirpath=tmp_path)
    again.load_state_dict(tuner.state_dict())
    pipeline(3, callbacks=[again], max_epochs=1).fit(MLP(), loader(MLP, 32, 8))
    assert again.result.profile.num_stages == 3
    with pytest.warns(
        UserWarning, match="chooses anew, since the checkpoint's choice cannot be read: this is not a Result"
    ):
        again.load_state_dict({"result": "{}"})
    mlp(again)
    assert again.result.choice.setting.num_microbatches == 4 and again.result.profile.num_stages == 2


class Annealed(MLP):
    """A learning rate that depends on the number of iterations."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_schedulers_logs_and_plan_are_those_of_the_choice_given_by_hand(liking: Any, tmp_path: Path) -> None:
    def train(callbacks: list[Any], strategy: dict[str, Any]) -> tuple[Any, Any]:
        torch.manual_seed(3)
        model, logger = Annealed(), CSVLogger(tmp_path, version=len(callbacks))
        runner = pipeline(2, strategy=strategy, callbacks=callbacks, logger=logger, log_every_n_steps=1, max_epochs=2)
        runner.fit(model, loader(MLP, 48, 8))
        rows = (Path(logger.log_dir) / "metrics.csv").read_text()
        steps = runner.global_step, runner.lr_scheduler_configs[0].scheduler.total_steps
        return (weights_of(model), steps, rows), runner.strategy.plan

    liking(TOGETHER)
    found, plan = train([AvgPipeTuner(3, [2, 8], profile_batches=4, dirpath=tmp_path)], {})
    expected, other = train([], by_hand(TOGETHER))
    assert found[1] == (4, 4)
    assert_equal(found, expected)
    # by hand an advance is asked for, which in one process is another schedule: it is named in the last line, and has
    # one more forward in flight
    nothing = Need(0, 0, 0)
    plan, other = (replace(p, stages=tuple(replace(s, memory=nothing) for s in p.stages)) for p in (plan, other))
    assert plan.stages == other.stages
    assert str(plan).splitlines()[:-1] == str(other).splitlines()[:-1]


def test_a_callback_that_knows_one_model_is_refused_unless_there_is_one(tmp_path: Path) -> None:
    averaging = L.pytorch.callbacks.StochasticWeightAveraging(0.1)
    with pytest.raises(ConfigurationError, match="num_pipelines=2 trains parallel ones"):
        mlp(AvgPipeTuner(2, dirpath=tmp_path), callbacks=[averaging])
    mlp(AvgPipeTuner(1, [4], profile_batches=4, dirpath=tmp_path), callbacks=[averaging])
