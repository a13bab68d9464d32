"""A second plain run decides where the first contradicts the pipeline: what differs by nature is no error."""

from __future__ import annotations

import itertools
import os
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.utils.device import DevicePort
from tests.models import MLP
from tests.verify.test_verifier import Remembering, fit, logged, said

__all__ = ["logged", "said"]  # fixtures

_NOT_COMPARED = "not compared with a plain run: "


# -- what differs by nature ------------------------------------------------------------------------------------------


class Timed(MLP):
    """Keeps when its step has begun."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun = time.perf_counter()
        return super().training_step(batch, batch_idx)


class TimedLayer(nn.Linear):
    """Keeps how long it has taken."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        begun = time.perf_counter()
        y = super().forward(x)
        self.seconds = time.perf_counter() - begun
        return y


class Times(Timed):
    """Keeps times in a list and in its layers, and logs one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(TimedLayer(8, 8) for _ in range(4)))
        self.times: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.times.append(time.perf_counter() - self.begun)
        self.log("elapsed", self.times[-1])
        return loss


class Stamped(MLP):
    """Keeps a name of its run and a date, which are texts, and a set of names, one for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.run: str | None = None
        self.seen: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.run = self.run or uuid.uuid4().hex
        self.date = datetime.now().isoformat()
        self.seen.add(uuid.uuid4().hex)
        return super().training_step(batch, batch_idx)


class Unseeded(MLP):
    """Its loss has a random part without a seed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + os.urandom(1)[0] / 256 + os.urandom(4)[0] / 1e4)


BY_NATURE: list[tuple[Callable[[], MLP], list[str]]] = [
    (
        Times,
        [
            "the attribute of 'begun'",
            "the attribute of 'times[0]'",
            "the attribute of 'layers.0.seconds'",
            "the logged value of 'elapsed'",
        ],
    ),
    (Stamped, ["the attribute of 'run'", "the attribute of 'seen has ", "the attribute of 'date'"]),
    (Unseeded, ["the loss of 'micro-batch 0'"]),
]


@pytest.mark.filterwarnings("error:the loss of the first batch")
@pytest.mark.parametrize(("model", "names"), BY_NATURE)
def test_what_two_plain_runs_differ_in_is_named_once_and_is_no_error(
    model: Callable[[], MLP], names: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", _NOT_COMPARED)
        assert fit(model(), verify="auto").global_step == 4
    (told,) = (str(warning.message) for warning in caught if _NOT_COMPARED in str(warning.message))
    assert all(name in told for name in names)


@pytest.mark.filterwarnings(f"ignore:{_NOT_COMPARED}")
def test_the_rest_is_compared_and_the_verdict_says_what_is_not(said: list[str]) -> None:
    fit(Timed())
    assert said == [
        "verified 2 optimizer steps: 6 losses, 10 gradients, 10 weights equal bit for bit; 1 logged values up to "
        "rounding; not compared: what differs between two plain runs (the attribute of 'begun')"
    ]


class TimedRemembering(Remembering, Timed):
    """Keeps a time, and depends on how often a function was called."""


def test_what_both_plain_runs_agree_on_remains_an_error() -> None:
    with pytest.raises(VerificationError, match="the loss of 'micro-batch"):
        fit(TimedRemembering(), verify="auto")


@pytest.mark.filterwarnings(f"ignore:{_NOT_COMPARED}")
@pytest.mark.parametrize(("model", "is_kept"), [(Timed, True), (Unseeded, False)])
def test_a_verdict_is_kept_only_where_losses_and_weights_were_compared(
    model: Callable[[], MLP], is_kept: bool, logged: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        logged.clear()
        fit(model(), verify="auto")
    assert ("they were equal in an earlier run" in logged.text) == is_kept


class Choosing(Remembering):
    """Depends on how often a function was called if an attribute says so."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.remembers = remembers

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.remembers else MLP.forward(self, x)


def test_a_verdict_holds_for_what_the_step_does_and_not_for_its_code_alone() -> None:
    fit(Choosing(False), verify="auto")
    with pytest.raises(VerificationError, match="the loss of 'micro-batch"):
        fit(Choosing(True), verify="auto")


def test_without_memory_for_a_second_run_training_goes_on_and_is_told_why(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    free = itertools.chain([1 << 40], itertools.repeat(100))
    monkeypatch.setattr(DevicePort, "free_bytes", lambda port: next(free))
    assert fit(Timed(), verify="auto").global_step == 4
    assert "the attribute of 'begun'" in logged.text and "a second plain run cannot be made" in logged.text


# -- what it costs ---------------------------------------------------------------------------------------------------


class Recording(torch.optim.SGD):
    """Notes in a file which processes step."""

    file = Path()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().step(closure)


def recorded(model: type[MLP], monkeypatch: pytest.MonkeyPatch, file: Path) -> tuple[set[int], list[int]]:
    """Train a model; return the processes that have made steps, and those that were forked."""
    forked: list[int] = []
    fork = os.fork

    def noting() -> int:
        pid = fork()
        if pid:
            forked.append(pid)
        return pid

    class Recorded(model):  # type: ignore[misc,valid-type]
        def configure_optimizers(self) -> Any:
            return Recording(self.parameters(), lr=0.1)

    monkeypatch.setattr(Recording, "file", file)
    monkeypatch.setattr(os, "fork", noting)
    fit(Recorded(), verify="auto")
    return {int(line) for line in file.read_text().split()}, forked


@pytest.mark.filterwarnings(f"ignore:{_NOT_COMPARED}")
@pytest.mark.parametrize(("model", "runs"), [(MLP, 1), (Timed, 2)])
def test_the_second_run_begins_only_where_something_differs_and_no_process_is_left(
    model: type[MLP], runs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stepping, forked = recorded(model, monkeypatch, tmp_path / "steps")
    assert len(stepping) == 1 + runs  # the pipeline's own process is one
    assert len(forked) >= 2
    for pid in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- optimizers that use their closure -------------------------------------------------------------------------------


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation: the gradient is taken where the loss is higher, in a second call of the closure."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(p.grad, alpha=0.05 / (float(p.grad.norm()) + 1e-12))
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        super().step()
        return loss


class Polyak(torch.optim.SGD):
    """The step is as long as the loss is large."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.1 * float(loss)
        super().step()
        return loss


class WithClosure(MLP):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("error:the loss of the first batch")
@pytest.mark.parametrize(
    ("optimizer", "calls", "options", "runner"),
    [
        (Sharpness, 2, {}, {"gradient_clip_val": 0.1}),
        (Sharpness, 2, {"loss_weight": lambda batch: 3.0 * len(batch[0])}, {}),
        (Polyak, 1, {"loss_reduction": "sum"}, {}),
        (Polyak, 1, {}, {"precision": "bf16-mixed"}),
    ],
)
def test_a_plain_run_does_what_the_closure_of_a_pipeline_promises(
    optimizer: type[torch.optim.Optimizer], calls: int, options: dict[str, Any], runner: dict[str, Any], said: list[str]
) -> None:
    fit(WithClosure(optimizer), verify=3, runner=runner, **options)
    assert said[0].startswith(f"verified 3 optimizer steps: {9 * calls} losses, 10 gradients, 10 weights equal")


class Late(Sharpness):
    """Calls its closure a second time from the second step on."""

    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure) if self.steps else torch.optim.SGD.step(self, closure)
        self.steps += 1
        return result


class Counting(torch.optim.SGD):
    """Counts its steps before it calls its closure, and steps less far each time."""

    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


class CountingItself(MLP):
    """Counts its steps in its own hook around them."""

    steps = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / self.steps
        optimizer.step(closure=optimizer_closure)


class Waiting(MLP):
    """Trains nothing with its first batch, and counts its micro-batches."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * self.calls if batch_idx else None


class Skipping(MLP):
    """Does not let its optimizer step for the first batch."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if batch_idx:
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.*`None`")
@pytest.mark.parametrize(
    ("make", "steps", "runner", "compared"),
    [
        # the loss of accumulated batches is that of the closure
        (lambda: WithClosure(Polyak), 2, {"accumulate_grad_batches": 2}, "12 losses, 10 gradients, 10 weights equal"),
        (lambda: WithClosure(Late), 3, {}, "15 losses, 10 gradients, 10 weights equal"),
        # what counts steps before the closure is called counts each once
        (lambda: WithClosure(Counting), 3, {}, "9 losses, 10 gradients, 10 weights equal"),
        (CountingItself, 3, {}, "9 losses, 10 gradients, 10 weights equal"),
        # a batch that is skipped whole comes before the first that is compared
        (Waiting, 2, {}, "6 losses, 10 gradients, 10 weights equal"),
        (Waiting, 2, {"callbacks": [LambdaCallback(on_train_batch_end=lambda *_: None)]}, "6 losses, 10 gradients"),
        (Skipping, 3, {}, "9 losses"),
    ],
)
def test_a_plain_run_makes_the_steps_that_user_code_makes(
    make: Callable[[], MLP], steps: int, runner: dict[str, Any], compared: str, said: list[str]
) -> None:
    fit(make(), verify=steps, runner=runner)
    assert said[0].startswith(f"verified {steps} optimizer steps: {compared}")
