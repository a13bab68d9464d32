"""Effects that a step begins to have after it was captured train as in one process, or end training with their line."""

from __future__ import annotations

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
from tests.strategy.steps import (
    NUM_MICROBATCHES,
    Layers,
    assert_same,
    assert_two_processes_equal,
    by_hand,
    errors_of_two_processes,
    piped,
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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        begun = batch_idx >= BEGIN
        if begun:
            self.first(self, None)
        loss = self.loss((batch[0] / self.number, batch[1]))
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


LATE: dict[str, Any] = {"split_points": ["c"], "costs": "flops"}


def assert_as_by_hand(make: Callable[[], Any]) -> Any:
    module = piped(make(), **LATE)
    assert_same(module, by_hand(make()))
    return module


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (nothing, alpha, r"assigns 'b.alpha' at test_late_effects.py:\d+ in alpha, .* an earlier stage would not see"),
        (alpha, nothing, r"assigns 'b.alpha' at test_late_effects.py:\d+ in alpha, .* each stage in this process"),
        (nothing, number, r"assigns 'number' at test_late_effects.py:\d+ in number, .* an earlier stage would not see"),
        (nothing, factor, r"changes an object in 'box', which submodules of other stages hold too"),
        (factor, nothing, r"changes what 'box' holds, .* which each stage in this process would do again"),
        (notes, history, r"changes what 'history' holds, .* which each stage in this process would do again"),
        (
            nothing,
            lambda m, loss: loss / (1 + m.b.seen.mean()),
            r"reads the buffer 'b.seen' in mean\(\) at",
        ),
    ],
)
def test_what_only_one_stage_would_do_ends_training_with_its_name(first: Any, last: Any, says: str) -> None:
    with pytest.raises(StepChangedError, match=says):
        piped(Late(first, last), **LATE)


def frozen(module: Any, loss: Any) -> None:
    module.b.alpha, module.number = 0.5, 2.0


def test_what_each_stage_does_alike_at_the_beginning_may_begin_late() -> None:
    assert_as_by_hand(lambda: Late(frozen, nothing))


def measured(module: Any, loss: Any) -> None:
    module.metric.update(1.0)


def test_a_metric_may_hear_of_something_late() -> None:
    module = Late(measured, nothing)
    module.metric = MeanMetric()
    piped(module, **LATE)
    assert module.metric.weight == NUM_MICROBATCHES * (STEPS - BEGIN)


class Collects(Late):
    """Each micro-batch fills a dict from hooks, uses it, and empties it again."""

    def __init__(self) -> None:
        super().__init__(nothing, nothing)
        self.found = dict[str, Tensor]()
        for name in ("a", "b", "c"):
            getattr(self, name).register_forward_hook(partial(self.collect, name))

    def collect(self, name: str, module: Any, args: Any, result: Tensor) -> None:
        self.found[name] = result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + sum(one.square().mean() for one in self.found.values())
        self.found.clear()
        return loss


def test_what_each_micro_batch_collects_and_drops_again_is_not_late() -> None:
    assert_as_by_hand(Collects)


def test_a_number_that_a_submodule_of_another_stage_counts_is_not_read_late() -> None:
    with pytest.raises(AbsentValueError, match=r"uses 'b.calls', which a submodule of another stage changes"):
        piped(Late(nothing, lambda module, loss: loss / module.b.calls), **LATE)


def test_a_submodule_does_not_begin_to_change_what_others_hold() -> None:
    module = Late(nothing, nothing)
    module.b.writes = True  # type: ignore[assignment]
    with pytest.raises(StepChangedError, match=r"changes an object in 'box', .*\(stage 0\)"):
        piped(module, **LATE)


def test_what_the_last_stage_alone_keeps_may_begin_late() -> None:
    module = assert_as_by_hand(lambda: Late(nothing, history))
    assert len(module.history) == NUM_MICROBATCHES * (STEPS - BEGIN)


class Warms(Layers):
    """The end of the step begins late to change what the first layer, in another process, is given."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change, self.array, self.plain = change, np.ones(8), torch.ones(8)
        self.register_buffer("bank", torch.ones(8))
        self.register_buffer("scale", torch.ones(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] / self.scale * float(self.array[0]) * self.plain
        loss = self.loss((x, batch[1] * self.bank))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reassigned, "changes the buffer 'scale', which it did not do when it was captured, and an earlier"),
        (in_place, "changes what 'array' holds, which it did not do when it was captured, and which an earlier"),
        (of_a_tensor, "changes what 'plain' holds, which it did not do when it was captured, and which an earlier"),
    ],
)
def test_what_a_stage_of_another_process_would_not_see_ends_training(change: Any, says: str, tmp_path: Path) -> None:
    assert says in errors_of_two_processes(lambda: Warms(change), tmp_path, **LATE)[0]


@pytest.mark.slow
def test_what_the_last_process_alone_reads_it_may_begin_to_change(tmp_path: Path) -> None:
    module = by_hand(Warms(read_at_the_end))
    torch.testing.assert_close(module.bank, torch.full((8,), 0.9 ** (NUM_MICROBATCHES * (STEPS - BEGIN))))
    assert_two_processes_equal(module, lambda: Warms(read_at_the_end), tmp_path, **LATE)
