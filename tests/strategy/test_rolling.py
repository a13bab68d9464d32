"""Rolling iterations: the same numbers whatever runs ahead, and hooks that find what they would find without."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.engine.executor import Lane
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.strategy.checks import can_roll
from lightning_avgpipe.strategy.combinations import Facts
from tests import processes
from tests.averaging.models import Batches, Models, Net, Unsized, train
from tests.averaging.test_lightning import Finetuned
from tests.comparing import assert_close, assert_equal, state
from tests.driver import accumulate
from tests.models import loader
from tests.strategy.test_resume import Positions, ResumableLoader
from tests.threads import alone
from tests.trainers import Reconfigures, pipeline


def newest_first(lane: Lane) -> Any:
    """As if everything that is ahead were quick, and all else slow."""
    return -lane.task.key.iteration, lane.task.key.pipeline, lane.urgency()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes run ahead as much as they can: in one process there is always something to run."""
    monkeypatch.setattr(Lane, "seniority", newest_first)


class Scaled(Net):
    """A loss that depends on the trainer's counters."""

    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("counted", float(self.global_step + 100 * batch_idx), on_step=True, on_epoch=False)
        return loss * (1 + self.global_step + 3 * batch_idx + 7 * self.trainer.fit_loop.epoch_loop.batch_idx)


def values(module: Any) -> list[Tensor]:
    """Its parameters as of now."""
    return [parameter.detach().clone() for parameter in module.parameters()]


@torch.no_grad()
def end_of_turn(
    model: Any, began: list[Tensor], known: list[Tensor], centres: Any, alpha: float, outer_lr: float, count: int
) -> None:
    """The rule for the end of a model's iteration, as the documentation has it.

    Args:
        model: that has stepped.
        began: its parameters when the iteration began.
        known: the reference after the previous iteration.
        centres: to which the model's share in the reference is added.
        alpha: of averaging.
        outer_lr: of averaging.
        count: number N of models that add to the centres.
    """
    for x, before, z, centre in zip(model.parameters(), began, known, centres, strict=True):
        delta = x - before
        x.add_(delta, alpha=outer_lr - 1).add_(z - before, alpha=alpha)
        centre.add_(delta, alpha=outer_lr / count)


def in_turn(
    module: Any, batches: list[Any], num_pipelines: int, every: int, alpha: float, outer_lr: float
) -> dict[str, Tensor]:
    """What one process does without stages: the models take turns to step, after so many iterations, and at the end of
    the data. Gives the reference.
    """
    models = [copy.deepcopy(module) for _ in range(num_pipelines)]
    reference = copy.deepcopy(module)
    optimizers = [model.configure_optimizers() for model in models]
    iterations = [batches[i : i + num_pipelines] for i in range(0, len(batches), num_pipelines)]
    for t, bundle in enumerate(iterations):
        begins, steps = t % every == 0, (t + 1) % every == 0 or t + 1 == len(iterations)
        known = values(reference)
        for n, model in enumerate(models):
            if begins:
                optimizers[n].zero_grad()
            if n < len(bundle):
                factor = (1 + t // every + 10 * t) / every
                model.training_step = lambda part, i, model=model, factor=factor: model.loss(part) * factor
                accumulate(model, bundle[n], 2)
            if steps:  # what has no gradients stays as it is
                began = values(model)
                optimizers[n].step()
                end_of_turn(model, began, known, reference.parameters(), alpha, outer_lr, num_pipelines)
    return dict(reference.named_parameters())


@pytest.mark.parametrize(
    ("num_pipelines", "num_stages", "every", "seniority", "given"),
    [
        (2, 3, 1, newest_first, {}),
        (3, 2, 1, Lane.seniority, {"alpha": 0.3, "outer_lr": 1.7}),
        (2, 1, 1, newest_first, {}),
        (2, 2, 2, newest_first, {}),
    ],
)
def test_models_take_turns_as_in_a_plain_loop(
    num_pipelines: int, num_stages: int, every: int, seniority: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "seniority", seniority)
    torch.manual_seed(3)
    model = Scaled()
    expected = copy.deepcopy(model)
    data = [Net.example(8) for _ in range(7)]  # a ragged end
    numbers = {"alpha": 1 / num_pipelines, "outer_lr": num_pipelines**0.5, **given}
    reference = in_turn(expected, data, num_pipelines, every, **numbers)
    options = {"averaging": Averaging(rolling=True, **given), "trainer": {"accumulate_grad_batches": every}}
    train(model, Batches(data), num_stages, num_pipelines=num_pipelines, **options)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    assert_equal(dict(model.named_parameters()), reference)


class Ends(Scaled):
    """A matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first[1] = torch.nn.Identity()  # behind a norm the gradient of a bias is rounding only
        self.last[0].weight = self.first[0].weight


def test_a_model_without_a_last_batch_steps_with_the_sums_of_tied_parameters() -> None:
    torch.manual_seed(3)
    model, data = Ends(), [Net.example(8) for _ in range(7)]
    reference = in_turn(copy.deepcopy(model), data, 2, every=2, alpha=0.5, outer_lr=2**0.5)
    options = {"averaging": Averaging(rolling=True), "trainer": {"accumulate_grad_batches": 2}}
    train(model, Batches(data), 2, **options)
    assert_close(dict(model.named_parameters()), reference, 1e-4, 1e-5)


class Recorder(L.Callback):
    """Hooks as they come, with the trainer's counters, logged values and what the module shows."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.weights: list[dict[str, Tensor]] = []
        for name in ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end"):
            setattr(self, name, lambda trainer, module, *rest, name=name: self.note(name, trainer, module))

    def note(self, name: str, trainer: L.Trainer, module: L.LightningModule) -> None:
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.calls.append((name, trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx, logged))
        if name != "on_before_optimizer_step":
            self.weights.append({name: p.detach().clone() for name, p in module.named_parameters()})


def run(
    callbacks: Any = (), module: Callable[[], Any] = Scaled, size: int = 84, ckpt_path: Any = None, **options: Any
) -> Any:
    """Train two pipelines; the data ends raggedly."""
    torch.manual_seed(3)
    model, models = module(), Models()
    strategy = {
        "num_pipelines": 2,
        "num_microbatches": 2,
        "averaging": Averaging(rolling=True),
        **options.pop("strategy", {}),
    }
    options = {"max_epochs": 2, **options}
    runner = pipeline(options.pop("num_stages", 2), strategy=strategy, callbacks=[models, *callbacks], **options)
    validation = loader(Net, 16, 8) if "val_check_interval" in options else None
    runner.fit(model, loader(Net, size, 8), validation, ckpt_path=ckpt_path)
    return model, models, runner


def assert_same(one: Any, other: Any) -> None:
    """The same models, reference and progress."""
    assert_equal([*one[1].models, state(one[0])], [*other[1].models, state(other[0])])
    assert one[2].global_step == other[2].global_step


def test_hooks_find_the_same_whatever_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = [Recorder(), Recorder()]
    runs = [run([recorders[0]])]
    monkeypatch.setattr(Lane, "seniority", newest_first)
    runs.append(run([recorders[1]]))
    assert_same(*runs)
    assert recorders[0].calls == recorders[1].calls
    assert_equal(recorders[0].weights, recorders[1].weights)
    counted = [logged["counted"] for name, _, _, logged in recorders[0].calls if name == "on_train_batch_end"]
    assert counted[:3] == [0.0, 101.0, 202.0]


@pytest.mark.slow
def test_hooks_come_as_without_rolling(ahead: None) -> None:
    recorders = {rolling: Recorder() for rolling in (False, True)}
    for rolling, recorder in recorders.items():
        run([recorder], strategy={"averaging": Averaging(rolling=rolling)})
    found, expected = (
        [(name, step, index) for name, step, index, _ in recorder.calls if name != "on_before_optimizer_step"]
        for recorder in recorders.values()
    )
    assert found == expected


class Interrupts(L.Callback):
    """Something between two batches that nobody could foresee."""

    def __init__(self, what: Callable[[L.Trainer], None], batches: tuple[int, ...] = (1, 2)) -> None:
        self.what, self.batches = what, batches

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.batches:
            self.what(trainer)


def test_training_that_is_stopped_or_reconfigured_drops_what_ran_ahead(ahead: None) -> None:
    def stop(trainer: L.Trainer) -> None:
        trainer.should_stop = True

    model, _, runner = run([Interrupts(stop, (1,))])
    assert runner.global_step == 2
    expected = run(max_steps=2)
    assert_equal(state(model), state(expected[0]))

    _, _, runner = run([Reconfigures({1: {"num_pipelines": 1}})], max_epochs=1)
    assert runner.global_step == 2 + 7  # two of two batches, seven of one: none is lost, none comes twice


def test_data_of_unknown_length_is_read_to_its_end(ahead: None) -> None:
    found, batches = [], [Net.example(8) for _ in range(7)]
    for data in (DataLoader(Unsized(batches), batch_size=None), Batches(batches)):
        torch.manual_seed(3)
        model = Scaled()
        train(model, data, 2, averaging=Averaging(rolling=True))
        found.append(state(model))
    assert_equal(*found)


def test_an_error_ahead_names_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "seniority", newest_first)

    class Failing(Scaled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ValueError("the fuse has blown")
            return super().training_step(batch, batch_idx)

    recorder = Recorder()
    with pytest.raises(ValueError, match="the fuse has blown") as raised:
        run([recorder], module=Failing)
    assert raised.value.__notes__ == ["stage 0 of 2 (rank 0) failed in F0"]
    assert recorder.calls[-1][:3] == ("on_before_optimizer_step", 1, 1)  # of pipeline 0, while 1 ended batch 1


def test_a_gradient_that_is_no_number_ends_training_with_its_model() -> None:
    data = [Net.example(8) for _ in range(6)]
    data[3][0].fill_(float("nan"))
    with pytest.raises(Exception, match=r"pipeline 1, batch_idx 1: .* Other models and stages may"):
        train(Scaled(), Batches(data), 2, averaging=Averaging(rolling=True))


class Sets(Scaled):
    """Does not learn; a hook sets the weights of all models and of the reference."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def views(self) -> list[Any]:
        strategy: Any = self.trainer.strategy
        return [strategy.reference(), *map(strategy.parallel_model, range(strategy.num_pipelines))]

    def on_train_epoch_end(self) -> None:
        for view in self.views() if self.trainer.current_epoch == 0 else ():
            with view, torch.no_grad():
                self.scale.fill_(0.5)


class SetsModels(Sets):
    def views(self) -> list[Any]:
        return super().views()[1:]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("module", [Sets, SetsModels])
def test_weights_that_a_hook_sets_in_all_models_stay(module: type[Sets], num_stages: int) -> None:
    trained, models, _ = run(module=module, num_stages=num_stages)
    for weights in (*models.models, models.reference, state(trained)):
        assert_close(weights["scale"], torch.full_like(weights["scale"], 0.5))


# -- what is refused -------------------------------------------------------------------------------------------------


class Changing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch, batch_idx)


class ReadsRate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class ReadsOptimizers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class Heated(Net):
    def __init__(self) -> None:
        super().__init__("adamw")
        self.temperature = 1.0

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.temperature

    def on_train_batch_end(self, *args: Any) -> None:
        self.temperature *= 0.9


class Clamps(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        strategy: Any = self.trainer.strategy
        for n in range(strategy.num_pipelines):
            with strategy.parallel_model(n), torch.no_grad():
                self.scale.clamp_(-0.5, 0.5)


class Clears(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss


class MeasuredLater(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if batch_idx == 2 else Net.training_step(self, batch, batch_idx)


class StepsSometimes(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize(
    ("module", "rolling", "named"),
    [
        (Changing, True, "changes 'calls'"),
        (ReadsRate, True, "reads trainer.optimizers"),
        (ReadsOptimizers, True, r"reads optimizers\(\)"),
        (Heated, True, "changed 'temperature'"),
        (Clamps, True, "has changed 'scale', with which micro-batches of the next batch"),
        (Clears, True, "Clears.on_before_zero_grad"),
        (Measured, True, "updates the metric object 'mean'"),
        (StepsSometimes, True, r"StepsSometimes\.optimizer_step does not step after each batch"),
        # what is found later is an error that names the option
        (Heated, "auto", "'temperature'"),
        (MeasuredLater, "auto", "updates the metric object 'mean'"),
    ],
)
def test_what_would_depend_on_the_timing_is_refused_by_name(module: Any, rolling: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as raised:
        run(module=module, strategy={"averaging": Averaging(rolling=rolling)})
    if rolling == "auto":
        assert "with Averaging(rolling='auto')" in str(raised.value)
        assert "use Averaging(rolling=False)" in str(raised.value)


class Validated(Scaled):
    """Metric objects of validation, and of a hook of training."""

    def __init__(self) -> None:
        super().__init__()
        self.validated, self.hooked = MeanMetric(), MeanMetric()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated(self.loss(batch))
        self.log("validated", self.validated)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs["loss"])
        self.hooked(outputs["loss"])
        self.log("hooked", self.hooked, on_step=False, on_epoch=True)


def test_metric_objects_that_the_step_does_not_update_are_no_obstacle(ahead: None) -> None:
    found, expected = run(module=Validated, val_check_interval=2), run(val_check_interval=2)
    assert_same(found, expected)
    logged, losses = found[2].callback_metrics, expected[2].callback_metrics
    assert found[2].strategy.rolls
    with pytest.raises(ConfigurationError, match="set it before the first batch"):
        found[2].strategy.rolls = False
    torch.testing.assert_close(logged["validated"], losses["val_loss"])
    batches = len(found[0].outputs) // 2  # of an epoch
    torch.testing.assert_close(logged["hooked"], torch.stack(found[0].outputs[batches:]).mean())


@pytest.mark.parametrize(
    ("strategy", "tuned", "named"),
    [
        ({"replicas": 2}, False, r"2 groups of processes \(replicas\).*use Averaging\(rolling=False\)"),
        ({}, True, r"Averaging\(rolling=True\) with AvgPipeTuner in 2 groups.*use Averaging\(rolling=False\)"),
    ],
)
def test_groups_that_work_together_within_a_step_are_refused(strategy: Any, tuned: bool, named: str) -> None:
    given = AvgPipeStrategy(averaging=Averaging(rolling=True), num_pipelines=2, **strategy).options
    with pytest.raises(ConfigurationError, match=named):
        checks.overlapping(pipeline(1), given, Facts(2, 1, 2, 2, strategy.get("replicas", 1), tuned))


# -- rolling where nothing stands against it, or as without, and then it is said why --------------------------------


def left_open(
    caplog: pytest.LogCaptureFixture, module: Any = Scaled, data: Any = None, **options: Any
) -> tuple[Any, str]:
    """The models of a run that may roll or not, and what it says about that."""
    torch.manual_seed(3)
    model, data = module(), loader(Net, 84, 8) if data is None else data()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        models = train(model, data, 2, **{"averaging": Averaging(rolling="auto"), **options})
    return [*models.models, state(model)], "".join(r.message for r in caplog.records if "do not roll" in r.message)


def assert_drained(caplog: pytest.LogCaptureFixture, why: str, **options: Any) -> None:
    found, said = left_open(caplog, **options)
    averaging = replace(options.pop("averaging", Averaging()), rolling=False)
    expected, _ = left_open(caplog, **options, averaging=averaging)
    assert_equal(found, expected)
    assert said.count("Averaging(rolling='auto'): pipelines do not roll: ") == 1 and why in said


def test_what_nothing_stands_against_rolls(caplog: pytest.LogCaptureFixture) -> None:
    found, said = left_open(caplog)
    expected, _ = left_open(caplog, averaging=Averaging(rolling=True))
    drained, _ = left_open(caplog, averaging=Averaging(rolling=False))
    assert_equal(found, expected)
    assert not said and any(not torch.equal(t, drained[-1][name]) for name, t in found[-1].items())


@pytest.mark.parametrize(
    ("why", "options"),
    [
        (r"Averaging(every=2)", {"averaging": Averaging(rolling="auto", every=2)}),
        ("Clears.on_before_zero_grad", {"module": Clears}),
        ("weight_policy='stash'", {"weight_policy": "stash", "num_pipelines": 1}),
        # known with the first batch
        ("changes 'calls'", {"module": Changing}),
        ("the ResumableLoader saves its position", {"module": Net, "data": lambda: ResumableLoader(Net, 48, 8)}),
    ],
)
def test_what_would_be_refused_at_the_start_trains_as_without_rolling(
    why: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert_drained(caplog, why, **options)


def test_each_run_decides_anew() -> None:
    runner = pipeline(2, strategy={"num_pipelines": 2, "num_microbatches": 2, "averaging": Averaging(rolling="auto")})
    rolled = []
    for epochs, module in enumerate((Changing, Net), 1):
        runner.fit_loop.max_epochs = epochs
        runner.fit(module(), loader(Net, 32, 8))
        rolled.append(runner.strategy.rolls)
        assert runner.global_step == 2 * epochs
    assert rolled == [False, True]


@pytest.mark.slow
def test_more_pipelines_later_do_as_was_found_at_the_start() -> None:
    more = Reconfigures({1: {"num_pipelines": 2}})
    for module, rolls in ((Measured, False), (Changing, False), (Scaled, True)):
        found = [
            run([more], module=module, strategy={"num_pipelines": 1, "averaging": Averaging(rolling=rolling)})
            for rolling in ("auto", rolls)
        ]
        assert_same(*found)
        assert found[0][2].strategy.rolls == rolls


def test_groups_that_are_tuned_do_not_roll(caplog: pytest.LogCaptureFixture) -> None:
    runner = pipeline(1, strategy={"averaging": Averaging(rolling="auto"), "num_pipelines": 2})
    runner.strategy.connect(Net())
    with caplog.at_level(logging.INFO):
        assert not can_roll(runner, runner.strategy.options, alone(1), Facts(2, 1, 2, 2, 1, tuned=True))
    assert "do not roll: Averaging(rolling=True) with AvgPipeTuner in 2 groups of processes" in caplog.text


# -- several processes -----------------------------------------------------------------------------------------------


def fit(devices: int, rolling: Any) -> Any:
    """Three models; and two of a step of which the first batch tells that it does not bear rolling."""
    torch.manual_seed(4)
    model, recorder = Net("adamw", warm_up=True), Recorder()
    strategy = {"num_pipelines": 3, "num_microbatches": 2, "averaging": Averaging(rolling=True)}
    runner = pipeline(2, devices, strategy, callbacks=[recorder], gradient_clip_val=0.1, val_check_interval=2)
    runner.fit(model, loader(Net, 64, 8), loader(Net, 16, 8))
    calls = [call[:3] for call in recorder.calls if call[0] != "on_before_backward"]  # which rank 0 hears
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    torch.manual_seed(4)
    drained, strategy = Changing("adamw"), {**strategy, "num_pipelines": 2, "averaging": Averaging(rolling=rolling)}
    pipeline(2, devices, strategy, max_epochs=1).fit(drained, loader(Net, 40, 8))
    return state(model), calls, metrics, state(drained)


def fit_resumable(rank: int, known_by: str) -> None:
    strategy = {"num_pipelines": 2, "averaging": Averaging(rolling=True)}
    source = ResumableLoader(Net, 48, 8)
    data: Any = source if known_by == "ResumableLoader" else Positions(source)
    pipeline(2, 2, strategy).fit(Net(), data)


@pytest.mark.parametrize("known_by", ["ResumableLoader", "Positions"])
def test_each_process_names_what_saves_the_position_of_the_data(known_by: str, tmp_path: Path) -> None:
    for outcome in processes.run(2, fit_resumable, known_by, folder=tmp_path):
        assert outcome.error is not None and f"the {known_by} saves its position" in outcome.error


def fit_frozen(devices: int) -> list[dict[str, Tensor]]:
    """The first stage has nothing to train in the first epoch."""
    found = []
    for schedule in ("1f1b", "zb_h1"):
        torch.manual_seed(4)
        model, rolling = Finetuned(), {"averaging": Averaging(rolling=True), "schedule": schedule}
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-2)
        strategy = {"num_pipelines": 2, "num_microbatches": 2, **rolling}
        pipeline(2, devices, strategy, callbacks=[unfreezing]).fit(model, loader(Finetuned, 56, 8))
        found.append(state(model))
    return found


@pytest.mark.slow
def test_stages_that_begin_to_train_and_split_backwards_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = processes.everywhere(2, fit_frozen, 2, folder=tmp_path)
    for order in (Lane.seniority, newest_first):
        monkeypatch.setattr(Lane, "seniority", order)
        assert_equal(results, [fit_frozen(1)] * 2)


def test_two_processes_train_the_models_of_one(tmp_path: Path) -> None:
    expected = fit(1, False)
    assert_equal(processes.everywhere(2, fit, 2, "auto", folder=tmp_path), [expected] * 2)
