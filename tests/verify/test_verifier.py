"""Whatever makes a pipeline compute something else than a plain run is found in the first iterations, by name."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.engine import randomness
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.errors import ConfigurationError, VerificationError
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action
from lightning_avgpipe.strategy import commands
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.utils.device import DevicePort
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.verify import comparison
from lightning_avgpipe.verify.__main__ import main
from lightning_avgpipe.verify.fingerprint import differences, fingerprint, how_different, usual_size
from tests import processes
from tests.comparing import assert_same_parameters
from tests.models import MLP, Normed, Regression, TiedTransformer, TinyTransformer, loader
from tests.strategy.test_precision import half_mixed
from tests.trainers import logged as logged_lines
from tests.trainers import pipeline


class Dropping(TinyTransformer):
    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.3, layers=1)


class Configured(Normed):
    """Its layers hold one configuration, which the code behind the last one completes when it is first needed.

    That code also counts in the first layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(kind=None, seen={})
        for layer in self.layers:
            layer.config = self.config
        self.layers[0].uses, self.layers[0].sizes = 0, []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.config.kind is None:
            self.config.kind, self.config.seen["labels"] = "regression", True
        self.layers[0].uses += 1
        self.layers[0].sizes.append(len(x))
        return y


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What verification says."""
    texts: list[str] = []
    monkeypatch.setattr(commands, "rank_zero_info", texts.append)
    return texts


def fit(
    module: Regression,
    num_stages: int = 2,
    verify: bool | int = True,
    runner: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:
    """Train on batches of which the last one is small."""
    strategy = {"num_microbatches": 3, "verify": verify, **options}
    running = pipeline(num_stages, strategy=strategy, **{"max_epochs": 1, **(runner or {})})
    running.fit(module, loader(type(module), 30, 8))
    return running


# -- what is equal ---------------------------------------------------------------------------------------------------


class Wrapping(torch.optim.Optimizer):
    """Wraps another optimizer, as people write it: without calling the constructor of the base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults, self.state, self.param_groups = optimizer.defaults, optimizer.state, optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Wrapped(MLP):
    def configure_optimizers(self) -> Any:
        return Wrapping(super().configure_optimizers())


class Norming(TiedTransformer):
    """Keeps a norm of gradients, which stages add in another order than one process does."""

    def on_after_backward(self) -> None:
        self.kept = float(self.embed.weight.grad.double().norm())


class Asking(MLP):
    """Its step and a hook of it read what has been logged, as a loss whose weights follow the validation does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        done = "val_loss" in self.trainer.callback_metrics
        return super().training_step(batch, batch_idx) * (0.5 if done else 2.0)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert "val_loss" not in self.trainer.logged_metrics


class Opaque(MLP):
    """Holds what nobody can look into, and a number that compares as an array does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.generator = itertools.count(), torch.Generator()
        self.number, self.objects = Unlike(2), np.array([self.calls, None], dtype=object)


class Unlike(int):
    def __eq__(self, other: object) -> Any:
        return np.ones(2) == other

    __hash__ = int.__hash__


VERIFIED = "^verified 2 optimizer steps: "


@pytest.mark.parametrize(
    ("make", "runner", "says"),
    [
        pytest.param(Wrapped, {}, f"{VERIFIED}(?!.*weights).*gradients", id="weights only if an optimizer has hooks"),
        # the step of the next batch could read what the hook keeps
        pytest.param(Norming, {"accumulate_grad_batches": 2}, VERIFIED, id="norms of tied weights up to rounding"),
        pytest.param(Asking, {}, f"{VERIFIED}6 losses", id="a step that reads logged metrics"),
        pytest.param(
            Opaque,
            {},
            r"not compared: 4 attributes \('calls', 'generator', 'number', 'objects'\)$",
            id="what cannot be compared is named and not called equal",
        ),
    ],
)
def test_it_is_said_what_is_verified(make: Any, runner: dict[str, Any], says: str, said: list[str]) -> None:
    fit(make(), runner=runner)
    assert re.search(says, said[0]), said


@pytest.mark.parametrize(
    ("model", "options", "runner"),
    [
        (Dropping, {"num_stages": 3, "recompute": True}, {"gradient_clip_val": 0.1}),
        (Normed, {"loss_reduction": "sum"}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        (Normed, {"num_pipelines": 2}, {"accumulate_grad_batches": 2}),
        (Dropping, {"schedule": "afab"}, {"precision": "bf16-mixed"}),
        (MLP, {"num_stages": 3}, {"plugins": [half_mixed()], "gradient_clip_val": 0.1}),
    ],
)
def test_training_is_equal_and_verification_says_so(
    model: Callable[[], Regression], options: dict[str, Any], runner: dict[str, Any], said: list[str]
) -> None:
    fit(model(), runner=runner, **options)
    (text,) = said
    assert text.startswith(f"verified {1 if 'num_pipelines' in options else 2} optimizer steps: ")
    assert "equal bit for bit" in text


@pytest.mark.parametrize("options", [{}, {"num_pipelines": 2}])
def test_verification_leaves_no_trace(options: dict[str, Any]) -> None:
    found = []
    for verify in (False, 3):
        torch.manual_seed(3)
        module = Normed()
        running = fit(module, verify=verify, **options)
        found.append((module, running.callback_metrics, torch.get_rng_state()))
    (plain, metrics, state), (verified, same_metrics, same_state) = found
    assert_same_parameters(plain, verified)
    assert all(torch.equal(b, verified.get_buffer(name)) for name, b in plain.named_buffers())
    assert metrics == same_metrics
    assert torch.equal(state, same_state)


class Scale(L.Callback):
    """A callback that the step asks, and that counts how often."""

    def __init__(self) -> None:
        self.scale, self.asked, self.heard = 1.0, 0, 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.scale /= 2

    def on_before_backward(self, *args: Any) -> None:
        self.heard += 1


class AsksCallbacks(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = next(callback for callback in self.trainer.callbacks if isinstance(callback, Scale))
        scale.asked += 1
        assert self.trainer.early_stopping_callback in self.trainer.callbacks
        return super().training_step(batch, batch_idx) * scale.scale


def test_a_step_finds_callbacks_and_the_plain_run_does_not_change_them(said: list[str]) -> None:
    found = []
    for verify in (False, True):
        scale = Scale()
        fit(AsksCallbacks(), verify=verify, runner={"callbacks": [scale, EarlyStopping("train_loss")]})
        found.append((scale.scale, scale.asked, scale.heard))
    assert found[0] == found[1] and min(found[0]) > 0
    assert "equal bit for bit" in said[0]


def test_a_model_that_does_not_fit_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DevicePort, "free_bytes", lambda port: 100)
    with pytest.raises(ConfigurationError, match="100 B are free on cpu"):
        fit(MLP())


# -- what the engine may do wrong ------------------------------------------------------------------------------------


def lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = Stage.perform

    def lossy(stage: Stage, action: Action, task: Any, message: Any) -> Any:
        if stage.program.stage == 0 and action == Action(BACKWARD, 1):
            stage.stash.pop(1)
            return None
        return perform(stage, action, task, message)

    monkeypatch.setattr(Stage, "perform", lossy)


def executed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = Stage.perform

    def twice(stage: Stage, action: Action, task: Any, message: Any) -> Any:
        if stage.program.stage == 0 and action == Action(FORWARD, 2):
            perform(stage, action, task, message)
        return perform(stage, action, task, message)

    monkeypatch.setattr(Stage, "perform", twice)


def equal_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    derive = randomness.RandomKey.derive

    def without_pipeline(key: randomness.RandomKey, *args: Any) -> int:
        return derive(randomness.RandomKey(key.seed, key.iteration, 0, key.micro_batch), *args)

    monkeypatch.setattr(randomness.RandomKey, "derive", without_pipeline)


def mean_of_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = StepLog._merged
    monkeypatch.setattr(StepLog, "_merged", lambda log, entries, alike: merged(log, entries[:1], alike))


@pytest.mark.parametrize(
    ("fault", "model", "options", "found"),
    [
        (lost_gradient, MLP, {}, r"the gradient of 'layers.*stage 0, used at .*models\.py:\d+ in "),
        (executed_twice, Normed, {}, "the buffer of 'layers.1.running_mean'"),
        (equal_masks, Dropping, {"num_pipelines": 2}, "the loss of 'micro-batch 0'.*pipeline 1"),
        (mean_of_logged, MLP, {}, "the logged value of 'train_loss'"),
    ],
)
def test_a_fault_of_the_engine_is_named(
    fault: Callable[[pytest.MonkeyPatch], None],
    model: Callable[[], Regression],
    options: dict[str, Any],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(VerificationError, match=found):
        fit(model(), **options)


# -- what modules may do that nobody can see -------------------------------------------------------------------------


class Remembering(MLP):
    """The loss depends on how often a function was called, which only an iterator knows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1).__next__  # whose state nobody sees

    def forward(self, x: Tensor) -> Tensor:
        factor = np.full(1, 1 + 0.1 * self.calls(), np.float32)
        return self.layers(x * torch.from_numpy(factor))  # what NumPy makes is not attested


def test_a_hook_on_a_gradient_that_no_stage_has_whole_is_refused() -> None:
    module = TiedTransformer()
    module.head.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(ConfigurationError, match=r"'embed.weight' has a hook on its gradient"):
        fit(module)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "lightning_avgpipe")
    return caplog


def test_the_first_steps_are_compared_unless_somebody_says_no() -> None:
    with pytest.raises(VerificationError, match="the loss of 'micro-batch"):
        fit(Remembering(), verify="auto")
    fit(Remembering(), verify=False)


def test_models_that_roll_are_compared_up_to_their_first_averaging(logged: pytest.LogCaptureFixture) -> None:
    rolling = {"num_pipelines": 2, "averaging": Averaging(rolling=True)}
    fit(Dropping(), verify="auto", **rolling)
    assert "verified 1 optimizer steps: 3 losses" in logged.text
    with pytest.raises(VerificationError, match="the loss of 'micro-batch"):
        fit(Remembering(), verify="auto", **rolling)


def test_what_was_equal_is_not_compared_again(logged: pytest.LogCaptureFixture) -> None:
    for text in ("verified 2 optimizer steps", "they were equal in an earlier run of the same code"):
        logged.clear()
        fit(MLP(), verify="auto")
        assert text in logged.text


def doubled(loss: Tensor) -> Tensor:
    return 2 * loss


class ByFunction(MLP):
    def loss(self, batch: Any) -> Tensor:
        return doubled(super().loss(batch))


def test_it_is_compared_again_if_a_function_that_the_step_calls_is_another_one(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(ByFunction(), verify="auto")
    monkeypatch.setitem(globals(), "doubled", lambda loss: ("", 2 * loss)[1])
    logged.clear()
    fit(ByFunction(), verify="auto")
    assert "verified 2 optimizer steps" in logged.text


class CountingBetween(MLP):
    """A hook between the steps changes what the next one reads."""

    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def on_train_batch_end(self, *args: Any) -> None:
        self.scale += 1


def test_whoever_asks_for_a_verification_is_warned_of_steps_that_are_not_compared(caplog: Any) -> None:
    fit(CountingBetween(), verify=True)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("steps from number 2 on are not compared: hooks have changed something" in text for text in warned)


class Monitoring(MLP):
    """A scheduler lowers the learning rate after each step, which no plain run of the steps alone can know."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        config = {"scheduler": scheduler, "monitor": "train_loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Lowering(MLP):
    def on_train_batch_end(self, *args: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize(
    ("make", "why"), [(Monitoring, ""), (Lowering, ""), (CountingBetween, ": hooks have changed something")]
)
def test_what_changes_between_steps_ends_the_comparison(
    make: type[MLP], why: str, logged: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    fit(make(), verify="auto")
    assert f"steps from number 2 on are not compared{why}" in logged.text
    assert "verified 1 optimizer steps" in logged.text
    assert not any("plain run" in str(warning.message) for warning in recwarn)


def roughly(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler that rounds otherwise."""
    return lambda *args: tuple(value * (1 + 1e-6) for value in graph(*args))


class CompiledBetween(MLP):
    """Calls, between its layers, a function that it compiles, as torchvision's detectors do."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = torch.compile(torch.square, backend=roughly)(first(x))
        for layer in others:
            x = layer(x)
        return x


@pytest.mark.slow  # imports the compiler
@pytest.mark.filterwarnings("ignore")
def test_what_a_compiler_rounds_otherwise_is_said_to_be_so(said: list[str]) -> None:
    with pytest.raises(VerificationError, match="verify again with TORCH_COMPILE_DISABLE=1"):
        fit(CompiledBetween())
    torch.compiler.reset()
    assert not said
    with torch._dynamo.config.patch(disable=True):  # pytest's patch would leave it deleted
        fit(CompiledBetween())
    assert "equal bit for bit" in said[0]


# -- several processes -----------------------------------------------------------------------------------------------


def fit_in_stages(rank: int) -> tuple[list[str], str]:
    """What is said of a training, and how one ends in which a gradient of the first stage is halved."""
    texts: list[str] = []
    perform = Stage.perform

    def train(module: Regression) -> None:
        running = pipeline(2, 2, {"num_microbatches": 4, "verify": True}, max_epochs=1, gradient_clip_val=0.1)
        running.fit(module, loader(Normed, 32, 8))

    torch.manual_seed(3)
    right, wrong = Configured(), Configured()

    def lossy(stage: Stage, action: Action, task: Any, message: Any) -> Any:
        result = perform(stage, action, task, message)
        if stage.program.stage == 0 and action == Action(BACKWARD, 1):
            wrong.layers[0].weight.grad.mul_(0.5)
        return result

    with replaced(commands, "rank_zero_info", texts.append) if rank == 0 else nullcontext():
        train(right)
    with mock.patch.object(Stage, "perform", lossy), pytest.raises(Exception) as caught:
        train(wrong)
    return texts, f"{caught.type.__name__}: {caught.value}"


def fit_in_replicas() -> tuple[str, list[str]]:
    """The log of a training in two replicas, and warnings of one whose step does what nobody sees."""
    warned = list[str]()
    with logged_lines() as lines:
        for module in (Normed(), Remembering()):
            torch.manual_seed(3)
            options = {"num_microbatches": 4, "replicas": 2, "split_points": ["layers.2"]}
            with replaced(comparison, "rank_zero_warn", warned.append):
                pipeline(2, 2, options, max_epochs=1).fit(module, loader(Normed, 32, 8))
    return "\n".join(lines), warned


def all_of_it(rank: int) -> tuple[Any, Any]:
    return fit_in_replicas(), fit_in_stages(rank)


def test_two_processes_are_verified_together_and_a_fault_in_another_one_is_named(tmp_path: Path) -> None:
    (replicas, stages), (other_replicas, other_stages) = processes.each(2, all_of_it, folder=tmp_path)
    (texts, error), (others, other) = stages, other_stages
    assert texts == [
        "verified 2 optimizer steps: 8 losses, 10 gradients, 10 weights, 6 buffers equal bit for bit; "
        "1 logged values up to rounding"
    ]
    assert not others
    assert "the gradient of 'layers.0.weight'" in error
    assert "VerificationError" in other
    # a replica is compared up to the sum of gradients
    text, warned = replicas
    assert "verified 1 optimizer steps: 4 losses, 6 buffers equal bit for bit" in text
    assert len(warned) == 1 and "the loss of 'micro-batch" in warned[0]
    assert not other_replicas[1]


class WithGaps(Regression):
    """The second stage takes a mean over a part of the columns, which reach another process without the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 96), nn.Linear(4, 96)

    @staticmethod
    def example(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8), torch.randn(size)

    def forward(self, x: Tensor) -> Tensor:
        part = self.first(x)[:, :4]
        return self.last(part).mean(1) * part.mean()


def verify_with_gaps() -> list[str]:
    torch.manual_seed(1)
    texts: list[str] = []
    with replaced(commands, "rank_zero_info", texts.append):
        running = pipeline(2, 2, {"num_microbatches": 2, "verify": True, "split_points": ["last"]}, max_epochs=1)
        running.fit(WithGaps(), loader(WithGaps, 512, 128))
    return texts


def test_views_with_gaps_that_cross_between_processes_are_compared_up_to_rounding(tmp_path: Path) -> None:
    texts, _ = processes.everywhere(2, verify_with_gaps, folder=tmp_path)
    assert len(texts) == 1 and texts[0].startswith("verified 2 optimizer steps: ")


# -- units that begin to draw late -----------------------------------------------------------------------------------


class Noise(nn.Module):
    """Draws from its n-th call on, in code of its own, in that of a part, or both.

    Args:
        begins: n.
        draws: a number.
        parts: how many noises it holds.
    """

    def __init__(self, begins: int, draws: Callable[[], float], parts: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.parts = nn.ModuleList(Noise(begins, draws) for _ in range(parts))
        self.begins, self.draws, self.calls = begins, draws, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for part in self.parts:
            x = part(x)
        return x * self.scale * (self.draws() + 0.5 if self.calls >= self.begins else 1.0)


class Noisy(MLP):
    """Noises between layers, some of which draw from the start."""

    def __init__(self, begins: int, draws: Callable[[], float], parts: int) -> None:
        super().__init__()
        noises = Noise(begins, draws, parts), Noise(1, draws, parts), Noise(begins, draws, parts)
        noises[1].parts.extend([Noise(begins, draws), nn.Dropout(0.2)])
        self.layers = nn.Sequential(*(layer for noise in noises for layer in (nn.Linear(8, 8), noise)))


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(1).item(),
    "dropout": lambda: float(nn.functional.dropout(torch.ones(()), 0.5)),
    "Python": lambda: random.random(),
    "NumPy": lambda: float(np.random.rand()),
}
WITHIN, BETWEEN = ["layers.3.parts.0"], ["layers.2", "layers.4"]
# where stages begin, what draws, from which call on (in the second micro-batch, in the second batch), parts of a noise
LATE: list[Any] = [
    (WITHIN, "torch", 4, 2),
    (BETWEEN, "NumPy", 4, 0),
    *(pytest.param(WITHIN, draws, 4, 2, marks=pytest.mark.slow) for draws in ("dropout", "Python", "NumPy")),
    pytest.param(BETWEEN, "torch", 2, 0, marks=pytest.mark.slow),
    pytest.param(BETWEEN, "Python", 2, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("points", "draws", "begins", "parts"), LATE)
def test_units_that_begin_to_draw_late_are_no_false_alarm(
    points: list[str], draws: str, begins: int, parts: int, said: list[str]
) -> None:
    fit(Noisy(begins, DRAWS[draws], parts), num_stages=len(points) + 1, split_points=points, verify=3)
    assert "9 losses" in said[0]


# -- the batch in one piece ------------------------------------------------------------------------------------------


class Contrastive(MLP):
    """Compares each sample with all others of what it is given, and logs the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x) @ y.T, torch.arange(len(x)))
        self.log("train_loss", loss)
        return loss


class Shared(MLP):
    """Divides by a sum over all samples that it is given; its loss is a small number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = (self(x) - y).square()
        return 1e-3 * (found / found.detach().sum() * y.abs()).mean()


@pytest.mark.parametrize("kind", [Contrastive, Shared])
def test_a_loss_that_looks_across_the_batch_is_told_once_with_both_numbers(kind: type[MLP]) -> None:
    with pytest.warns(UserWarning, match=r"\d in one piece, and \d.* over its 3 micro") as told:
        fit(kind(), verify="auto")
    assert sum("in one piece" in str(warning.message) for warning in told) == 1


def test_it_is_told_again_where_the_first_steps_are_not_compared_again(logged: pytest.LogCaptureFixture) -> None:
    texts = []
    for _ in range(2):
        logged.clear()
        with pytest.warns(UserWarning, match=r"\d in one piece, and \d.* over its 3 micro") as told:
            fit(Contrastive(), verify="auto")
        texts += [text for warning in told if "in one piece" in (text := str(warning.message))]
    assert "they were equal in an earlier run of the same code" in logged.text
    assert texts == [texts[0], f"as in an earlier run of the same code, {texts[0]}"]
    for partial in ("{", ""):  # the disk was full
        for verdict in Path(os.environ["XDG_CACHE_HOME"]).rglob("verified-*"):
            verdict.write_text(partial)
        logged.clear()
        with pytest.warns(UserWarning, match="^the loss of the first batch"):
            fit(Contrastive(), verify="auto")
        assert "verified 2 optimizer steps" in logged.text


class Masked(MLP):
    """Its loss is a mean over the samples that a mask leaves, and much the same for all of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = (x[:, 0] > -0.5).float()
        found = 1 + 1e-3 * (self(x) - y).square().mean(1)
        return (found * mask).sum() / mask.sum()


def test_a_mean_over_a_mask_is_told_by_its_gradient() -> None:
    with pytest.warns(UserWarning, match=r"gradient of the first batch in one piece differs by \d+% .* loss_weight"):
        fit(Masked(), verify="auto")


@pytest.mark.parametrize("scaled", [False, True])
def test_a_mean_over_samples_is_not(scaled: bool, recwarn: pytest.WarningsRecorder) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    fit(MLP(), verify="auto", runner={"plugins": [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []})
    assert not any("in one piece" in str(warning.message) for warning in recwarn)


class DyingPlainly(MLP):
    """Its optimizer ends every other process than the one that trains."""

    def configure_optimizers(self) -> Any:
        home = os.getpid()

        class Dying(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                result = super().step(closure)
                if os.getpid() != home:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

        return Dying(self.parameters(), lr=0.1)


def test_training_goes_on_when_the_plain_run_dies(logged: pytest.LogCaptureFixture) -> None:
    assert fit(DyingPlainly(), verify="auto").global_step == 4
    assert "the plain run failed with ForkError" in logged.text


def test_a_plain_run_that_was_asked_for_and_dies_ends_training() -> None:
    with pytest.raises(VerificationError, match="the child that trains plainly, to verify the pipeline has died"):
        fit(DyingPlainly(), verify=True)


@contextmanager
def forking(most: int) -> Iterator[None]:
    """No more forks than these succeed, and no child is left."""
    children, fork = list[int](), os.fork

    def limited() -> int:
        if len(children) == most:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        children.append(fork())
        return children[-1]

    with replaced(os, "fork", limited):
        yield
    assert len(children) == most
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.parametrize("most", [0, 1])
def test_training_goes_on_when_no_plain_run_can_be_forked(most: int, logged: pytest.LogCaptureFixture) -> None:
    with forking(most):
        assert fit(MLP(), verify="auto").global_step == 4
    assert "the first steps are not compared with plain ones: the child that trains plainly" in logged.text


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_plain_run_that_was_asked_for_and_cannot_be_forked_ends_training(most: int) -> None:
    with forking(most), pytest.raises(ConfigurationError, match=r"could not be forked: .*use verify=False"):
        fit(MLP(), verify=True, num_pipelines=2)


def fit_without_forks() -> int:
    running = pipeline(2, 2, {"num_microbatches": 2, "verify": "auto"}, max_epochs=1)
    with forking(0):
        running.fit(MLP(), loader(MLP, 32, 8))
    return running.global_step


def test_two_processes_go_on_when_no_plain_run_can_be_forked(tmp_path: Path) -> None:
    assert processes.everywhere(2, fit_without_forks, folder=tmp_path) == [4, 4]


# -- fingerprints ----------------------------------------------------------------------------------------------------


def test_what_nearly_cancels_is_rounded_as_its_terms_were() -> None:
    first, second = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) / 100
    gradients = {"weight": fingerprint(first), "bias": fingerprint((first + second) - first - second)}  # only rounding
    other = {"weight": fingerprint(first), "bias": fingerprint((second + first) - second - first)}
    for scale, explained in ((0.0, False), (usual_size(gradients.values()), True)):
        found = list(differences("the gradient", gradients, other, lambda name: True, scale=scale))
        assert (not found) == explained


def test_a_lost_part_is_no_rounding() -> None:
    first, second = torch.randn(2, 64) / 100
    expected, found = fingerprint(first + second), fingerprint(first)
    assert how_different(expected, found, rounded=True, scale=usual_size([found])) is not None


def test_one_other_element_is_another_fingerprint_wherever_it_is() -> None:
    tensor = torch.randn(1 << 21)
    digests = {fingerprint(tensor).digest}
    for position in (0, 1, 1 << 20, (1 << 21) - 1):
        other = tensor.clone()
        other[position] = torch.nextafter(other[position], torch.tensor(math.inf))
        digests.add(fingerprint(other).digest)
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert len(digests | {fingerprint(swapped).digest}) == 6


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_tensors_whose_numbers_are_not_finite_have_equal_fingerprints(number: float) -> None:
    """Such as the mask of a language model, in a buffer of all processes."""
    tensor = torch.full((4, 4), number).triu(1)
    assert fingerprint(tensor) == fingerprint(tensor.clone()) != fingerprint(tensor + 1)


# -- python -m lightning_avgpipe.verify: a script is verified as it is -------------------------------------------------

SCRIPT = """
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from lightning_avgpipe import AvgPipeStrategy
from tests.models import MLP, loader
from tests.trainers import trainer


class Counting(MLP):
    def forward(self, x):
        factor = calls() if "wrong" in sys.argv else 1
        return super().forward(x * torch.from_numpy(np.full(1, factor, np.float32)))  # what NumPy makes is not attested


calls = itertools.count(1).__next__  # whose state nobody sees
if "none" not in sys.argv:
    strategy = AvgPipeStrategy(num_stages=2, num_microbatches=2, costs="flops")
    trainer(strategy=strategy, max_epochs=1000).fit(Counting(), loader(MLP, 24, 8))
    Path("trained").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [
        ("right", 0, "verified 3 optimizer steps"),
        ("wrong", 1, "its error is above"),
        ("none", 1, "nothing was verified"),
    ],
)
def test_a_script_is_verified_and_ends(
    argument: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["--steps", "3", "train.py", argument]) == code
    printed = "".join(capfd.readouterr())
    assert said in printed
    assert ("VerificationError" in printed) == (argument == "wrong")
    assert not Path("trained").exists()
