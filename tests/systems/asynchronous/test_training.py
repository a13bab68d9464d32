"""Weight policies in training: the weights of a plain loop that keeps all versions, and hooks as without."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_avgpipe import Averaging, AvgPipeStrategy, AvgPipeTuner, Links, PipelineTimeline, PipeOptim
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.systems.asynchronous.versions import Place, VersionPolicy
from tests import processes
from tests.averaging.models import Batches, Net
from tests.comparing import assert_close, assert_equal, state
from tests.driver import by_hand
from tests.models import loader
from tests.strategy.test_rolling import (
    Changing,
    Heated,
    Interrupts,
    ReadsOptimizers,
    ReadsRate,
    Recorder,
    Scaled,
    StepsSometimes,
)
from tests.systems.asynchronous.policies import POLICIES, Attention, Recurrent, Stage, go_on
from tests.trainers import Reconfigures, pipeline

K = 3
MOMENTUM = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
PLAIN_SGD = partial(torch.optim.SGD, lr=0.3)
ADAMW = partial(torch.optim.AdamW, lr=0.05)
SLOW = pytest.mark.slow
ASYNCHRONOUS = [name for name in POLICIES if name != "flush"]
INEXACT, INCREMENT = PipeOptim(exact_backward=False), PipeOptim(delta="increment", staleness="constant")


class Chain(L.LightningModule):
    """One part for each stage."""

    def __init__(self, kind: type[nn.Module], make: Any, learning_rates: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind() for _ in range(K))
        self.make, self.learning_rates = make, learning_rates

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        for part in self.parts:
            x = part(x)
        return F.mse_loss(x, target)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def batches(count: int, size: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, size, 4, 6, generator=generator)) for _ in range(count)]


def resolved(policy: str | PipeOptim) -> VersionPolicy:
    return POLICIES[policy] if isinstance(policy, str) else policy.policy


def by_versions(module: Chain, policy: str | PipeOptim, streams: list[list[Any]], *counts: int) -> dict[str, Tensor]:
    """What a plain loop makes of the batches from one drain to the next, of so many micro-batches each."""
    stages = [Stage(part, module.make(part.parameters()), Place(k, K)) for k, part in enumerate(module.parts)]
    for stream, count in zip(streams, counts, strict=True):
        for k, stage in enumerate(stages):
            stage.place = Place(k, K, count)
        micro_batches = [part for x, y in stream for part in zip(x.chunk(count), y.chunk(count), strict=True)]
        go_on(stages, resolved(policy), micro_batches, F.mse_loss, count)
    return dict(module.named_parameters())


def fit(module: Any, data: Any, policy: str | PipeOptim, count: int, num_stages: int = K, **options: Any) -> L.Trainer:
    strategy = {"weight_policy": policy, "num_microbatches": count, **options.pop("strategy", {})}
    if isinstance(module, Chain) and num_stages == K:
        strategy["split_points"] = ["parts.1", "parts.2"]
    runner = pipeline(num_stages, options.pop("devices", 1), strategy, **options)
    runner.fit(module, data, options.pop("validation", None))
    return runner


CASES: list[tuple[str | PipeOptim, int, Any]] = [
    *((name, 1, MOMENTUM) for name in ASYNCHRONOUS if name != "2bw"),
    ("2bw", 3, MOMENTUM), ("stash", 2, ADAMW), ("spectrain", 2, ADAMW), ("none", 3, PLAIN_SGD),
    (INEXACT, 1, ADAMW), (INCREMENT, 1, PLAIN_SGD),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "count", "make"), CASES)
def test_weights_are_those_of_a_loop_that_keeps_all_versions(policy: str | PipeOptim, count: int, make: Any) -> None:
    torch.manual_seed(0)
    model, data = Chain(Recurrent, make), batches(5, 2 * count)
    plain, untrained = copy.deepcopy(model), copy.deepcopy(model)
    fit(model, Batches(data), policy, count)
    expected = by_versions(plain, policy, [data, data], count, count)  # an epoch ends with a drain
    assert_close(dict(model.named_parameters()), expected)
    synchronous = by_versions(untrained, "flush", [data, data], count, count)
    assert any((p - synchronous[name]).abs().max() > 1e-4 for name, p in model.named_parameters())


@pytest.mark.parametrize(("policy", "frozen"), [("stash", 0), ("stash", 1), ("2bw", 0), ("spectrain", 0)])
def test_a_stage_may_have_nothing_to_train(policy: str, frozen: int) -> None:
    torch.manual_seed(0)
    count = 3 if policy == "2bw" else 1
    model, data = Chain(Recurrent, MOMENTUM), batches(5, 2 * count)
    model.parts[frozen].requires_grad_(False)
    plain = copy.deepcopy(model)
    fit(model, Batches(data), policy, count, max_epochs=1)
    assert_close(dict(model.named_parameters()), by_versions(plain, policy, [data], count))


class OfTheLast(Chain):
    """Trains its last part; the gradients of the others are no optimizer's."""

    def configure_optimizers(self) -> Any:
        return self.make(self.parts[-1].parameters())


def test_what_no_optimizer_has_is_predicted_to_stay() -> None:
    torch.manual_seed(0)
    model, data = OfTheLast(Recurrent, MOMENTUM), batches(5, 2)
    plain = copy.deepcopy(model)
    plain.parts[:-1].requires_grad_(False)
    fit(model, Batches(data), "spectrain", 1, max_epochs=1)
    assert_close(dict(model.named_parameters()), by_versions(plain, "spectrain", [data], 1))


@pytest.mark.parametrize("policy", ["stash", "2bw"])
def test_a_smaller_batch_at_the_end_begins_after_a_drain(policy: str) -> None:
    torch.manual_seed(0)
    model, data = Chain(Recurrent, MOMENTUM), [*batches(3, 6), *batches(1, 2)]
    plain = copy.deepcopy(model)
    fit(model, Batches(data), policy, 3, max_epochs=1)
    assert_close(dict(model.named_parameters()), by_versions(plain, policy, [data[:3], data[3:]], 3, 2))


class Problem:
    """What kind of targets a model has, which its first step finds out: so do classifiers of transformers."""

    kind: str | None = None


class Settling(Chain):
    """Its first step changes what every step reads."""

    def __init__(self) -> None:
        super().__init__(Recurrent, MOMENTUM)
        self.problem = Problem()
        self.hook = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.problem.kind is None:
            self.problem.kind = "regression" if batch[1].is_floating_point() else "classification"
        return loss if self.problem.kind == "regression" else -loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.hook == "on_before_zero_grad":
            self.problem.kind = "classification"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_train_batch_end" and batch_idx == 0:
            self.problem.kind = "classification"


@pytest.mark.parametrize("policy", ["stash", "2bw"])
def test_what_the_first_step_settles_for_all_is_no_change_by_a_hook(policy: str) -> None:
    torch.manual_seed(0)
    plain, data = Chain(Recurrent, MOMENTUM), batches(4, 6)
    model = Settling()
    model.load_state_dict(plain.state_dict())
    for module in (plain, model):
        fit(module, Batches(data), policy, 3)
    assert_equal(state(model), state(plain))
    assert model.problem.kind == "regression"

    hooks = "on_train_batch_end", "on_before_zero_grad"
    for trained, kind, hook in itertools.product((model, Settling()), ("regression", None), hooks):
        trained.problem.kind, trained.hook = kind, hook
        with pytest.raises(ConfigurationError, match=r"a hook of a batch.* has changed 'problem'"):
            fit(trained, Batches(data), policy, 3)


class Heating(Chain):
    """Its hook between the micro-batches of the first batch of the second epoch changes what every step reads."""

    def __init__(self) -> None:
        super().__init__(Recurrent, MOMENTUM)
        self.temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        return super().training_step((x / self.temperature, target), batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        if self.current_epoch:
            self.temperature = 2.0


def test_a_hook_within_the_first_batch_after_a_drain_changes_nothing_that_steps_read() -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=r"a hook of a batch.* has changed 'temperature'"):
        fit(Heating(), Batches(batches(4, 6)), "stash", 3)


@pytest.mark.parametrize("policy", ["stash", *(pytest.param(p, marks=SLOW) for p in ("2bw", INEXACT))])
def test_one_stage_is_trained_plainly(policy: str | PipeOptim) -> None:
    torch.manual_seed(0)
    model, data = Chain(Recurrent, MOMENTUM), batches(4, 4)
    expected = by_hand(copy.deepcopy(model), data, 2)
    fit(model, Batches(data), policy, 2, num_stages=1, max_epochs=1)
    assert_equal(state(model), state(expected))


def train(policy: str = "stash", module: Callable[[], Any] = Scaled, size: int = 56, **options: Any) -> Any:
    """Batches of eight samples, and a ragged end."""
    torch.manual_seed(3)
    model = module()
    options = {"num_stages": 3, "strategy": {"schedule": "1f1b"}, **options}
    validation = loader(Net, 16, 8) if "val_check_interval" in options else None
    ckpt_path = options.pop("ckpt_path", None)
    strategy = {"weight_policy": policy, "num_microbatches": options.pop("count", 4), **options.pop("strategy")}
    runner = pipeline(options.pop("num_stages"), options.pop("devices", 1), strategy, **options)
    runner.fit(model, loader(Net, size, 8), validation, ckpt_path=ckpt_path)
    return model, runner


@pytest.mark.parametrize(
    ("policy", "count"), [("stash", 1), *(pytest.param(*case, marks=SLOW) for case in (("stash", 4), ("pipeoptim", 2)))]
)
def test_hooks_and_logs_come_as_without(policy: str, count: int) -> None:
    found = []
    for one in ("flush", policy):
        recorder = Recorder()
        _, runner = train(one, callbacks=[recorder], count=count, size=60 if count < 4 else 56)
        counted = [logged.get("counted") for name, _, _, logged in recorder.calls if name == "on_train_batch_end"]
        assert counted[:3] == [0.0, 101.0, 202.0]
        found.append([call[:3] for call in recorder.calls] + [runner.global_step])
    assert found[0] == found[1]


class Halved(Chain):
    """Changes each batch on its way to the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, target = batch
        return x / 2, target


def test_each_of_several_batches_read_ahead_goes_through_its_transfer_hooks() -> None:
    found = []
    for kind, factor in ((Halved, 1.0), (Chain, 0.5)):
        torch.manual_seed(2)
        module = kind(Recurrent, PLAIN_SGD)
        fit(module, Batches([(x * factor, y) for x, y in batches(8, 1)]), "stash", 1, max_epochs=1)
        found.append(dict(module.named_parameters()))
    assert_equal(*found)


@pytest.mark.parametrize("policy", ["stash", pytest.param("pipeoptim", marks=SLOW)])
def test_what_is_not_foreseen_drains_as_what_is(policy: str, tmp_path: Path) -> None:
    """With batch norm, whose statistics run ahead, and dropout."""

    def save(trainer: L.Trainer) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    sudden, _ = train(policy, lambda: Net("momentum"), callbacks=[Interrupts(save, (1, 3, 5))], count=2, max_epochs=1)
    foreseen = ModelCheckpoint(tmp_path / "foreseen", "{step}", every_n_train_steps=2, save_top_k=-1)
    expected, _ = train(
        policy, lambda: Net("momentum"), callbacks=[foreseen], enable_checkpointing=True, count=2, max_epochs=1
    )
    assert_equal(state(sudden), state(expected))
    for step in (2, 4):
        one = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)
        other = torch.load(tmp_path / "foreseen" / f"step={step}.ckpt", weights_only=True)
        assert_equal(one["state_dict"], other["state_dict"])
    through, _ = train(policy, lambda: Net("momentum"), count=2, max_epochs=1)
    assert not torch.equal(through.scale, expected.scale)


@pytest.mark.parametrize("policy", ["2bw", pytest.param(PipeOptim(delta="increment"), marks=SLOW)])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(policy: Any, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)
    options = {"module": lambda: Net("adam", warm_up=True), "size": 48}
    through, _ = train(policy, callbacks=[saving], enable_checkpointing=True, **options)
    resumed, _ = train(policy, ckpt_path=tmp_path / "step=6.ckpt", **options)
    assert_equal(state(through), state(resumed))


@pytest.mark.slow
def test_validation_drains_and_sees_the_weights_of_its_batch() -> None:
    found = []
    for options in ({"val_check_interval": 2}, {}):
        saving = ModelCheckpoint(every_n_train_steps=2, save_top_k=0)
        model, _ = train("stash", callbacks=[saving], enable_checkpointing=True, size=48, max_epochs=1, **options)
        found.append(state(model))
    assert_equal(*found)


def test_training_that_is_stopped_or_reconfigured_drops_what_ran_ahead() -> None:
    def stop(trainer: L.Trainer) -> None:
        trainer.should_stop = True

    model, runner = train("stash", callbacks=[Interrupts(stop, (1,))], count=2)
    assert runner.global_step == 2
    assert_equal(state(model), state(train("stash", max_steps=2, count=2)[0]))

    _, runner = train("stash", callbacks=[Reconfigures({1: {"num_stages": 2}})], count=2)
    assert runner.global_step == 14 and runner.strategy.num_stages == 2


def test_plan_and_meter_count_the_versions() -> None:
    plans, peaks = {}, {}
    for policy in ("flush", "stash", "2bw"):
        torch.manual_seed(0)
        model, measured = Chain(Attention, MOMENTUM), {"costs": "measured", "costs_cache": None}
        strategy: Any = fit(model, Batches(batches(3, 6)), policy, 3, max_epochs=1, strategy=measured).strategy
        plans[policy], peaks[policy] = strategy.plan, strategy.peak_memory_bytes
    bytes_of = [sum(p.nbytes for p in part.parameters()) for part in model.parts]
    held = {policy: [stage.memory.persistent for stage in plan.stages] for policy, plan in plans.items()}
    assert [s - f for s, f in zip(held["stash"], held["flush"], strict=True)] == [bytes_of[0], bytes_of[1], 0]
    assert [s - f for s, f in zip(held["2bw"], held["flush"], strict=True)] == bytes_of
    assert "weight_policy='2bw' with 2 2 2 copies of the weights" in str(plans["2bw"])
    assert all(peaks["2bw"][k] - peaks["flush"][k] >= bytes_of[k] for k in range(K))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [
        {"num_pipelines": 2},
        {"replicas": 2},
        {"averaging": Averaging(rolling=True)},
        {"schedule": "zb_h1"},
        {"advance": 1, "schedule": "advance_forward"},
        {"averaging": Averaging(on_nonfinite="skip")},
        {"verify": True},
        {"links": Links(reader="first")},
    ],
)
def test_options_that_stages_would_follow_together_are_refused(option: dict[str, Any]) -> None:
    name, value = next(iter(option.items()))
    named = rf"{type(value).__name__}\(" if name in ("averaging", "links") else f"{name}="
    with pytest.raises(ConfigurationError, match=f"weight_policy='stash' with {named}"):
        AvgPipeStrategy(weight_policy="stash", **option)


def test_repeating_units_and_stages_is_refused() -> None:
    AvgPipeStrategy(weight_policy="stash", recompute=["layers.*"])
    with pytest.raises(ConfigurationError, match="recompute"):
        AvgPipeStrategy(weight_policy="pipeoptim", recompute=["layers.*"])


@pytest.mark.parametrize("wrong", [{"delta": "momentum"}, {"staleness": 2}, {"exact_backward": "yes"}])
def test_a_pipeoptim_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"PipeOptim: {next(iter(wrong))}="):
        PipeOptim(**wrong)
    with pytest.raises(ConfigurationError, match="weight_policy="):
        AvgPipeStrategy(weight_policy="swift")  # type: ignore[arg-type]


class Held(Net):
    """Uses a parameter that no module holds."""

    def __init__(self) -> None:
        super().__init__("momentum")
        weight = self.scale
        self.scaled = lambda x: x * weight

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.scaled(batch[0]).mean()


class Tied(Net):
    """Two stages use one parameter."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.last[2].weight = self.first[0].weight


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"module": StepsSometimes}, r"StepsSometimes\.optimizer_step does not step after each batch"),
        ({"module": Held}, "the parameter 'scale' from a place"),
        ({"module": Tied}, r"'first\.0\.weight'.*stages 0 and 2"),
        ({"module": Changing}, "weight_policy='stash' micro-batches of two"),
        ({"module": ReadsRate}, "reads trainer.optimizers"),
        ({"module": ReadsOptimizers}, r"reads optimizers\(\)"),
        ({"module": Heated}, "changed 'temperature'"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, "accumulate_grad_batches"),
        ({"callbacks": [AvgPipeTuner()]}, "AvgPipeTuner"),
        ({"callbacks": [PipelineTimeline()]}, "PipelineTimeline"),
        ({"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}, "loss scaler"),
        ({"policy": "2bw", "count": 2}, "num_microbatches=3 or more"),
        ({"policy": "spectrain", "module": lambda: Net("sgd")}, "increment"),
    ],
)
def test_what_cannot_be_is_refused_before_a_step(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        train(**options)


def test_a_gradient_that_is_no_number_ends_training_if_asked() -> None:
    model, data = Chain(Recurrent, MOMENTUM), batches(4, 2)
    data[2][0].fill_(float("nan"))
    raises = {"averaging": Averaging(on_nonfinite="raise")}
    with pytest.raises(Exception, match=r"batch_idx 2: the gradient of 'parts.0.*Other models and stages may"):
        fit(model, Batches(data), "stash", 1, strategy=raises)


# -- several processes -----------------------------------------------------------------------------------------------

RUNS: list[Any] = [("stash", 1), ("2bw", 3), ("pipeoptim", 2), (INEXACT, 1)]


def fit_some(devices: int, count: int) -> Any:
    found = []
    for policy, num_microbatches in RUNS[:count]:
        recorder = Recorder()
        model, runner = train(
            policy, lambda: Net("adamw", warm_up=True), devices=devices, count=num_microbatches, callbacks=[recorder],
            val_check_interval=3, num_stages=2, gradient_clip_val=0.5, max_epochs=1,
        )  # fmt: skip
        metrics = {k: float(v) for k, v in runner.callback_metrics.items()}
        found.append((state(model), [call[:3] for call in recorder.calls], metrics))
    return found


@pytest.mark.parametrize("count", [1, pytest.param(len(RUNS), marks=SLOW)])
def test_two_processes_train_the_model_of_one(count: int, tmp_path: Path) -> None:
    expected = fit_some(1, count)
    for results in processes.everywhere(2, fit_some, 2, count, folder=tmp_path):
        for found, (weights, calls, metrics) in zip(results, expected, strict=True):
            assert_equal(found[0], weights)
            assert found[2] == metrics
            told = [call for call in calls if call[0] != "on_before_backward"]
            assert [call for call in found[1] if call[0] != "on_before_backward"] == told
