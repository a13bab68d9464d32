"""Effects that a step begins to have after its first batch: seen by all stages, or training ends with their name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_avgpipe.errors import AbsentValueError, StepChangedError
from tests.comparing import assert_equal
from tests.engine.test_programs import Tracks
from tests.strategy.steps import (
    NUM_MICROBATCHES,
    Layers,
    by_hand,
    errors_of_two_processes,
    piped,
    states_of_two_processes,
)

STEPS, BEGIN = 4, 2


class Scaled(nn.Module):
    """A layer with an attribute, a counter, and an object that another one holds too."""

    alpha = 1.0

    def __init__(self, box: dict[str, float]) -> None:
        super().__init__()
        self.linear, self.box, self.calls, self.writes = nn.Linear(8, 8), box, 0, False
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.writes and self.calls > 5:
            self.box["factor"] *= 0.9
        self.seen += x.detach().mean(0)
        return self.linear(x) * self.alpha * self.box["factor"]


class Late(Layers):
    """Some statement before the first layer and one at the end, both only from some step on."""

    def __init__(self, first: Callable[[Any, Any], Any], last: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.box = {"factor": 1.0}
        self.b, self.c = Scaled(self.box), Scaled(self.box)  # type: ignore[assignment]
        self.first, self.last, self.number, self.history = first, last, 1.0, list[float]()
        self.plain = torch.ones(8)
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        begun = batch_idx >= BEGIN
        if begun:
            self.first(self, None)
        loss = self.loss((batch[0] / self.number * self.plain, batch[1]))
        return loss if not begun or (found := self.last(self, loss)) is None else found


def nothing(module: Any, loss: Any) -> None:
    """Do nothing."""


def alpha(module: Any, loss: Any) -> None:
    module.b.alpha = 0.5 * module.b.alpha


def number(module: Any, loss: Any) -> None:
    module.number = 2.0 * module.number


def factor(module: Any, loss: Any) -> None:
    module.box["factor"] *= 0.9


def history(module: Any, loss: Any) -> Any:
    module.history.append(loss.item())
    return loss / len(module.history)


def notes(module: Any, loss: Any) -> None:
    module.history.append(1.0)


COUNT = 0


def count(module: Any, loss: Any) -> None:
    global COUNT
    COUNT += 1


def counted(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        run.calls += 1
        return function(*args)

    run.calls = 0
    return run


decorated = counted(nothing)


class Hidden(Late):
    """Holds a layer that is not a submodule."""

    def __init__(self, first: Any, last: Any) -> None:
        super().__init__(first, last)
        self.kept, self.mask = [Scaled(self.box)], torch.ones(8)


def hidden(module: Any, loss: Any) -> None:
    module.kept[0].alpha *= 0.9


def plain(module: Any, loss: Any) -> None:
    module.plain = module.plain * 0.9


def clip(module: Any, loss: Any) -> None:
    module.d.weight.data.clamp_(-0.1, 0.1)


def hook(module: Any, loss: Any) -> None:
    module.b.register_forward_hook(lambda layer, args, result: None)


class LateBetween(Hidden):
    """The statement comes between layers, with an operation that the captured step did not have."""

    def through(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.begun:
            x = x * 0.9
            self.first(self, None)
        return self.d(self.c(self.b(x)))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun = batch_idx >= BEGIN
        return self.loss(batch)


def made_again(module: Any, loss: Any) -> None:
    module.mask = torch.arange(8) > 2


LATE: dict[str, Any] = {"split_points": ["c"], "costs": "flops"}
LINE = r"test_late_effects\.py:\d+ in"


BY_ONE_STAGE: list[tuple[Any, Any, str]] = [
    (nothing, alpha, rf"assigns 'b.alpha' at {LINE} alpha, .* an earlier stage would not see"),
    (alpha, nothing, rf"assigns 'b.alpha' at {LINE} alpha, .* each stage in this process"),
    (nothing, number, rf"assigns 'number' at {LINE} number, .* an earlier stage would not see"),
    (nothing, plain, rf"assigns 'plain' at {LINE} plain, .* an earlier stage would not see"),
    (nothing, factor, r"changes an object in 'box', which submodules of other stages hold too"),
    (factor, nothing, r"changes what 'box' holds, .* which each stage in this process would do again"),
    (notes, history, r"changes what 'history' holds, .* which each stage in this process would do again"),
    (nothing, lambda m, loss: loss / (1 + m.b.seen.mean()), r"reads the buffer 'b.seen' in mean\(\) at"),
    (nothing, hook, r"registers a hook of 'b', .* an earlier stage would not see"),
    (nothing, clip, "writes into a weight"),  # between its use and its backward
    *(
        (change, nothing, r"when (it|training_step) was captured")
        for change in (
            clip,
            lambda m, loss: m.a.bias.data.clamp_(-0.1, 0.1),
            lambda m, loss: m.mean.mul_(0.9).add_(0.1),
            lambda m, loss: setattr(m, "mean", m.mean + 1.0),
        )
    ),
]
BY_SEVERAL_STAGES: list[tuple[Any, str]] = [
    (count, r"changes what 'global [\w.]*COUNT' holds"),
    (decorated, "changes what 'first' holds"),
    (notes, "changes what 'history' holds"),
    (hook, "registers a hook of 'b'"),
    (hidden, rf"assigns 'Scaled.alpha' at {LINE} hidden"),
    (plain, rf"assigns 'plain' at {LINE} plain"),
]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((partial(Late, first, last), says) for first, last, says in BY_ONE_STAGE),
        *(
            (partial(kind, first, nothing), f"{says}, .* which each stage in this process would do again")
            for kind in (Hidden, LateBetween)
            for first, says in BY_SEVERAL_STAGES
        ),
    ],
)
def test_what_begins_late_and_not_all_stages_do_once_ends_training_with_its_name(make: Any, says: str) -> None:
    with pytest.raises(StepChangedError, match=says):
        piped(make(), **LATE)


def frozen(module: Any, loss: Any) -> None:
    module.b.alpha, module.number = 0.5, 2.0


def measured(module: Any, loss: Any) -> None:
    module.metric.update(1.0)


def test_a_metric_may_hear_of_something_late() -> None:
    module = Late(measured, nothing)
    module.metric = MeanMetric()
    piped(module, **LATE)
    assert module.metric.weight == NUM_MICROBATCHES * (STEPS - BEGIN)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(Late, frozen, nothing), id="what each stage does alike at the beginning"),
        pytest.param(partial(Hidden, made_again, nothing), id="a tensor that each stage makes alike"),
        pytest.param(partial(LateBetween, made_again, nothing), id="such a tensor between layers"),
        pytest.param(partial(Late, nothing, history), id="what the last stage alone keeps"),
    ],
)
def test_what_no_stage_misses_may_begin_late(make: Callable[[], Late]) -> None:
    module, expected = piped(make(), **LATE), by_hand(make())
    assert_equal(module, expected)
    assert module.history == expected.history


def test_a_number_that_a_submodule_of_another_stage_counts_is_not_read_late() -> None:
    with pytest.raises(AbsentValueError, match=r"uses 'b.calls', which a submodule of another stage changes"):
        piped(Late(nothing, lambda module, loss: loss / module.b.calls), **LATE)


class Tally:
    """What a layer holds: its step, and how often it was called."""

    def __init__(self) -> None:
        self.step, self.calls = 0.5, 0


class Tallies(nn.Linear):
    """A layer whose own __call__ reads a part of an object that its forward does not change."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.tally = Tally()

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * self.tally.step)

    def forward(self, x: Tensor) -> Tensor:
        self.tally.calls += 1
        return super().forward(x)


class HoldsTally(Late):
    def __init__(self, last: Callable[[Any, Any], Any]) -> None:
        super().__init__(nothing, last)
        self.a = Tallies()


def test_of_an_object_every_stage_reads_what_its_submodule_does_not_change() -> None:
    module, expected = piped(HoldsTally(nothing), **LATE), by_hand(HoldsTally(nothing))
    assert_equal(module, expected)
    assert module.a.tally.calls == expected.a.tally.calls
    with pytest.raises(AbsentValueError, match=r"uses 'a.tally.calls', which a submodule of another stage changes"):
        piped(HoldsTally(lambda module, loss: loss / module.a.tally.calls), **LATE)


def test_a_submodule_does_not_begin_to_change_what_others_hold() -> None:
    module = Late(nothing, nothing)
    module.b.writes = True  # type: ignore[assignment]
    with pytest.raises(StepChangedError, match=r"changes an object in 'box', .*\(stage 0\)"):
        piped(module, **LATE)


class Warms(Layers):
    """The end of the step begins late to change what the first layer, in another process, is given."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change, self.array, self.plain = change, np.ones(8), torch.ones(8)
        self.register_buffer("bank", torch.ones(8))
        self.register_buffer("scale", torch.ones(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] / self.scale * float(self.array[0]) * self.plain
        loss = (self.through(x) - batch[1] * self.bank).square().mean()  # which the end of the step alone reads
        if batch_idx >= BEGIN:
            self.change(self)
        return loss


def reassigned(module: Any) -> None:
    module.scale = module.scale * 0.9


def in_place(module: Any) -> None:
    module.array *= 0.9


def of_a_tensor(module: Any) -> None:
    module.plain.mul_(0.9)


def read_at_the_end(module: Any) -> None:
    module.bank.mul_(0.9)


LATER = "which it did not do when it was captured, and"


@pytest.mark.slow
def test_what_a_stage_of_another_process_would_not_see_ends_training(tmp_path: Path) -> None:
    says = {
        reassigned: f"changes the buffer 'scale', {LATER} an earlier",
        in_place: f"changes what 'array' holds, {LATER} which an earlier",
        of_a_tensor: f"changes what 'plain' holds, {LATER} which an earlier",
    }
    errors = errors_of_two_processes([(partial(Warms, change), LATE) for change in says], tmp_path)
    for expected, (first, _) in zip(says.values(), errors, strict=True):
        assert expected in first


@pytest.mark.slow
def test_what_the_last_process_alone_reads_it_may_begin_to_change(tmp_path: Path) -> None:
    state, _ = states_of_two_processes(lambda: Warms(read_at_the_end), tmp_path, **LATE)
    torch.testing.assert_close(state["bank"], torch.full((8,), 0.9 ** (NUM_MICROBATCHES * (STEPS - BEGIN))))


# -- submodules without parameters, which each stage runs that gets that far ------------------------------------------


class Normalises(Layers):
    """Trains from some step on a submodule that depends on the batch alone, which all stages run or the last one."""

    def __init__(self, norm: Callable[[], nn.Module], all_stages: bool = True) -> None:
        super().__init__()
        self.norm, self.all_stages = norm().eval(), all_stages

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.norm.train(batch_idx >= BEGIN)

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        if self.all_stages:
            return super().loss((self.norm(x), target))
        return (self.through(x) - self.norm(target)).square().mean()


NORMS = [Tracks, partial(nn.BatchNorm1d, 8, affine=False)]


@pytest.mark.parametrize("norm", NORMS)
def test_a_buffer_that_two_stages_of_a_process_would_change_ends_training(norm: Callable[[], nn.Module]) -> None:
    with pytest.raises(StepChangedError, match=r"changes the buffer 'norm\.\w+', .* each stage in this process"):
        piped(Normalises(norm), **LATE)


@pytest.mark.parametrize("norm", NORMS)
def test_a_buffer_of_what_the_last_stage_alone_calls_may_change_late(norm: Callable[[], nn.Module]) -> None:
    expected = piped(Normalises(norm, all_stages=False), num_stages=1)
    assert_equal(piped(Normalises(norm, all_stages=False), **LATE), expected)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_each_process_may_change_such_a_buffer_late(norm: Callable[[], nn.Module], tmp_path: Path) -> None:
    expected = piped(Normalises(norm), num_stages=1).state_dict()
    for state in states_of_two_processes(partial(Normalises, norm), tmp_path, **LATE):
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
