"""Micro-batches repeat the operations of the first one of their batch, where the step leaves nothing behind."""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import Averaging
from lightning_avgpipe.engine import stage_step
from lightning_avgpipe.engine.part import Part, Replayed
from lightning_avgpipe.engine.replay import replay
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils.patching import replaced
from tests import processes
from tests.comparing import assert_same_parameters
from tests.models import MLP, Regression, TinyTransformer, loader
from tests.trainers import pipeline, twins

BATCHES, MICRO = 4, 4
FIRST = MICRO  # of the first batch every micro-batch is followed


def trained(
    model: Any, data: Any = None, num_stages: int = 2, trainer: dict[str, Any] | None = None, **options: Any
) -> Any:
    torch.manual_seed(1)
    strategy = {"num_microbatches": MICRO, "verify": False, **options}
    runner = pipeline(num_stages, strategy=strategy, max_epochs=1, **(trainer or {}))
    runner.fit(model, data or loader(type(model), 8 * BATCHES, 8))
    return runner


def assert_repeats(make: Callable[[], Any], *args: Any, **options: Any) -> Any:
    """Train a module whose micro-batches may be repeated: weights and logs are those of its twin whose step is
    followed in every one. Gives the module.
    """
    followed, repeated = twins(make)
    one = trained(followed, *args, **{**options, "static_step": False})
    two = trained(repeated, *args, **options)
    assert_same_parameters(followed, repeated)
    assert one.callback_metrics == two.callback_metrics
    return repeated


@contextmanager
def following() -> Iterator[list[int]]:
    """The stages that follow a micro-batch, each as often as it does."""
    stages: list[int] = []

    def counted(part: Part, *args: Any) -> Replayed:
        stages.append(part.program.stage)
        return replay(part, *args)

    with replaced(stage_step, "replay", counted):
        yield stages


@pytest.fixture
def followed() -> Iterator[list[int]]:
    with following() as stages:
        yield stages


class Logged(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log_dict({"double": 2 * loss.detach()})
        return loss


@pytest.mark.parametrize(("static", "runs"), [(False, BATCHES * MICRO), ("auto", FIRST + BATCHES - 1), (True, FIRST)])
def test_a_step_is_followed_as_often_as_was_asked_for(static: Any, runs: int, followed: list[int]) -> None:
    trained(Logged(), static_step=static)
    assert sorted(followed) == [0] * runs + [1] * runs


def times_followed() -> int:
    """How often this process follows a micro-batch, one of two that have a stage each."""
    with following() as stages:
        trained(Logged(), trainer={"devices": 2})
    return len(stages)


def test_a_process_that_has_a_part_of_the_batch_repeats_too(tmp_path: Path) -> None:
    assert processes.everywhere(2, times_followed, folder=tmp_path) == [FIRST + BATCHES - 1] * 2


class Named(MLP):
    """Gets inputs and targets of one shape by their names."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["y"]))


class Alternating:
    """Splits batches into dicts, whose keys come in one order and in the other one from the second batch on."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: Any, num_microbatches: int) -> list[dict[str, Tensor]]:
        self.batches += 1
        parts = zip(*(tensor.chunk(num_microbatches) for tensor in batch), strict=True)
        turned = [self.batches > 1 and i % 2 == 1 for i in range(num_microbatches)]
        return [{"y": y, "x": x} if turn else {"x": x, "y": y} for turn, (x, y) in zip(turned, parts, strict=True)]


@pytest.mark.parametrize("static", ["auto", True])
def test_keys_of_a_dict_may_come_in_any_order(static: Any) -> None:
    model, other = twins(Named)
    for each, how in ((model, static), (other, False)):
        trained(each, loader(MLP, 32, 8), split_batch=Alternating(), static_step=how)
    assert_same_parameters(model, other)


class SharesDropout(MLP):
    """Calls one layer that draws on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x))
        return x


def test_a_layer_that_draws_on_several_stages_is_counted_and_not_followed(followed: list[int]) -> None:
    trained(SharesDropout())
    assert followed.count(1) == FIRST + BATCHES - 1


# -- the same bits ----------------------------------------------------------------------------------------------------


class Dropping(TinyTransformer):
    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.3)


class Memory:
    """What blocks leave for later ones, as a cache of keys and values does."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        memory.kept.append(self.linear(x))
        return torch.stack(memory.kept).sum(0).tanh()


class Caching(Regression):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.blocks = nn.ModuleList(Remembers() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        memory = Memory()
        for block in self.blocks:
            x = block(x, memory)
        return F.mse_loss(x, target)


class Neighbours(nn.Module):
    """Returns a sparse matrix, whose layout has no strides."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype).to_sparse_csr()


class OfGraph(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.neighbours = Neighbours()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x + 0.1 * (self.neighbours(x) @ torch.ones(8, 8))


class Logging(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss, "lr": 0.1}, on_epoch=True)
        return {"loss": loss, "others": [loss.detach()]}


class Replaces(nn.Module):
    """Keeps a mean in a buffer, which is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


class ReadsReplaced(MLP):
    """Computes with the mean that a layer has kept, in code between submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Replaces()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers(x))
        return x * torch.sqrt(self.norm.mean.abs() + 1)


class Noisy(MLP):
    """Draws between submodules."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, *others = self.layers
        noisy = F.dropout(first(x), 0.2) + 0.1 * torch.randn(8)
        return nn.Sequential(*others)(F.dropout(second(noisy), 0.2))


@pytest.mark.parametrize(
    ("model", "num_stages", "options"),
    [
        *((model, 3, {}) for model in (Noisy, Dropping, Caching, Logging, OfGraph, ReadsReplaced)),
        (Dropping, 1, {}),
        (Dropping, 3, {"static_step": True}),
        (Dropping, 2, {"recompute": True}),
        (Dropping, 2, {"num_pipelines": 2, "averaging": Averaging(rolling=True)}),
        (Dropping, 2, {"num_pipelines": 2, "num_microbatches": 2}),
        (Dropping, 2, {"schedule": "zb_h1"}),
        (Dropping, 2, {"weight_policy": "2bw"}),
        (Dropping, 2, {"trainer": {"precision": "bf16-mixed"}}),
        pytest.param(Dropping, 2, {"recompute": ["blocks.*"]}, marks=pytest.mark.slow),
        pytest.param(Dropping, 2, {"num_pipelines": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_and_logs_are_those_of_following_every_micro_batch(
    model: Any, num_stages: int, options: dict[str, Any]
) -> None:
    assert_repeats(model, None, num_stages, **options)


# -- steps that leave something behind --------------------------------------------------------------------------------

_seen: list[int] = []


class Leaves(Logged):
    """Leaves something behind before its loss.

    Args:
        leave: is given the module and the number of the batch.
    """

    last = 0

    def __init__(self, leave: Callable[[Leaves, int], object]) -> None:
        super().__init__()
        self.leave = leave
        self.save_hyperparameters(ignore="leave")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.leave(self, batch_idx)
        return super().training_step(batch, batch_idx)


def assigns(module: Leaves, batch_idx: int) -> None:
    module.last = batch_idx


def registers(module: Leaves, batch_idx: int) -> None:
    module.register_buffer("seen", torch.tensor(batch_idx))


class Branches(Logged):
    """Does so later only, by a function that it names."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx > 1:
            self.bump()
        return loss / (1 + self.count)

    def bump(self) -> None:
        self.count += 1


class CountsLate(Logged):
    """Counts micro-batches in later batches only, in a way that no store of its own shows.

    Args:
        count: counts in a list, dict or set.
    """

    def __init__(self, count: Callable[[CountsLate], object], holds: Any = None) -> None:
        super().__init__()
        self.count, self.seen = count, holds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx > 1:
            self.count(self)
        return loss


class Dispatches(Logged):
    """Counts later only, by a function that a dict leads to."""

    mode, calls = "first", 0

    def __init__(self) -> None:
        super().__init__()
        self.ways = {"first": lambda loss: loss, "later": self.weigh}

    def weigh(self, loss: Tensor) -> Tensor:
        self.calls += 1
        return loss / self.calls

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.ways[self.mode](super().training_step(batch, batch_idx))


class Timed(Logged):
    """Counts later only, by what Python calls of an object that the step names."""

    class Timer:
        count = 0

        def __enter__(self) -> None:
            self.count += 1

        def __exit__(self, *error: object) -> None:
            self.count += 1

    def __init__(self) -> None:
        super().__init__()
        self.timers = [Timed.Timer()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx > 1:
            with self.timers[0]:
                loss = loss + 0
        return loss / (1 + self.timers[0].count)


class Freezes(Logged):
    """A mode that the step sets from the third batch on, for a while."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 1:
            self.eval()
        loss = super().training_step(batch, batch_idx)
        self.train()
        return loss


class Decides(Logged):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.mean() > -100 else -y


class Cooling(nn.Linear):
    """Begins late to change a number of its own: with the first micro-batch of the third batch, or with another one."""

    factor, calls = 1.0, 0

    def __init__(self, micro_batch: int) -> None:
        super().__init__(8, 8)
        self.begins = 2 * MICRO + micro_batch

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.begins:
            self.cool()
        return super().forward(x)

    def cool(self) -> None:
        vars(self)["factor"] = 0.9 * self.factor


class CoolingByName(Cooling):
    """Assigns the number, as its code shows."""

    def cool(self) -> None:
        self.factor *= 0.9


class CoolingByDict(Cooling):
    """Keeps the number in a dict."""

    def __init__(self, micro_batch: int) -> None:
        super().__init__(micro_batch)
        self.numbers = {"factor": 1.0}

    def cool(self) -> None:
        self.numbers["factor"] *= 0.9

    @property
    def factor(self) -> float:  # type: ignore[override]
        return self.numbers["factor"]


class ReadsFactor(Logged):
    """Multiplies its loss by the number of a layer, from the first batch on or from a later one."""

    def __init__(self, layer: int, cooling: Cooling, begins: int = 0) -> None:
        super().__init__()
        self.layers[layer] = self.cooling = cooling
        self.begins = begins

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.cooling.factor if batch_idx >= self.begins else loss


class Mixes(Logged):
    """Begins late to draw from NumPy's generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        if batch_idx > 1:
            x = x + np.random.beta(0.8, 0.8)
        return super().training_step((x, target), batch_idx)


def test_what_is_drawn_late_is_drawn_for_every_micro_batch() -> None:
    assert_repeats(Mixes)


def test_a_first_batch_of_one_sample_tells_nothing() -> None:
    """Nothing is repeated before two micro-batches of one batch have been compared."""
    model = CountsLate(lambda module: module.seen.append(1), [])
    order = [[0], [*range(1, 9)], [*range(9, 17)]]
    trained(model, DataLoader(TensorDataset(*MLP.example(17)), batch_sampler=order), num_stages=1)
    assert len(model.seen) == MICRO


@pytest.mark.parametrize(
    "make",
    [
        lambda: ReadsFactor(1, Cooling(0)),
        lambda: ReadsFactor(7, Cooling(0)),
        lambda: ReadsFactor(1, Cooling(2)),
        lambda: ReadsFactor(7, CoolingByDict(0)),
        lambda: ReadsFactor(7, CoolingByName(2)),
        lambda: ReadsFactor(7, CoolingByName(2), begins=2),
        lambda: ReadsFactor(7, CoolingByName(-8), begins=2),
    ],
)
def test_what_a_submodule_begins_to_change_is_read_by_every_micro_batch(make: Callable[[], ReadsFactor]) -> None:
    assert assert_repeats(make).cooling.factor < 1


def test_what_it_changes_in_a_micro_batch_that_is_repeated_comes_too_late() -> None:
    with pytest.raises(StepChangedError, match=r"changes '(cooling|layers\.7)\.factor', .* static_step=False"):
        trained(ReadsFactor(7, Cooling(2)))


def test_a_mode_that_a_step_begins_to_set_late_ends_training() -> None:
    with pytest.raises(StepChangedError, match=r"assigns 'training' at test_programs\.py:\d+ in training_step"):
        trained(Freezes())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Leaves(lambda module, batch_idx: time.monotonic()),
        lambda: Leaves(lambda module, batch_idx: _seen.append(batch_idx)),
        lambda: Leaves(assigns),
        lambda: Leaves(registers),
        Branches,
        lambda: CountsLate(lambda module: module.seen.pop(), [*range(20)]),
        lambda: CountsLate(lambda module: module.seen.update(samples=1), Counter()),
        Dispatches,
        Timed,
        Decides,
    ],
)
def test_what_leaves_something_behind_or_decides_runs_for_every_micro_batch(
    make: Callable[[], Logged], followed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_avgpipe")
    trained(make())
    assert followed.count(1) == BATCHES * MICRO
    assert "stage 1 follows the Python of the step for each micro-batch: " in caplog.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Leaves(assigns), ["it changes attributes or objects (last)"]),
        (lambda: Leaves(lambda module, batch_idx: None), []),
    ],
)
def test_the_plan_says_what_lets_each_micro_batch_be_followed(make: Callable[[], Logged], said: list[str]) -> None:
    lines = str(trained(make()).strategy.plan).splitlines()
    follows = "the Python of your step runs for each micro-batch: "
    assert [line.removeprefix(follows) for line in lines if line.startswith(follows)] == said


# -- what has another form with another micro-batch -------------------------------------------------------------------


class Gives(nn.Linear):
    """Returns what a function says of whether a micro-batch is large."""

    def __init__(self, said: Callable[[bool], Any]) -> None:
        super().__init__(8, 8)
        self.said = said

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, self.said(bool(x.abs().max() > 1))


class Asks(Regression):
    """Doubles the loss of a large micro-batch."""

    def __init__(self, said: Callable[[bool], Any], heard: Callable[[Any], bool]) -> None:
        super().__init__("sgd")
        self.first, self.last, self.heard = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Gives(said), heard

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        y, said = self.last(self.first(x))
        return F.mse_loss(y, target) * (2 if self.heard(said) else 1)


class Keeps(MLP):
    """Divides by the number of rows that it keeps.

    Args:
        rows: rows of a micro-batch and of the result.
    """

    def __init__(self, rows: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> None:
        super().__init__(depth=3)
        self.layers.append(nn.BatchNorm1d(8) if norm else nn.Identity())
        self.rows = rows

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        y = self(x)
        return (y - target).square().sum() / (1 + len(self.rows(x, y)))


class KeepsWeights(Keeps):
    """Takes weights from a buffer for the rows that it keeps, behind a layer that changes its own buffers."""

    def __init__(self) -> None:
        super().__init__(lambda x, y: x[x > 1], norm=True)
        self.register_buffer("weights", torch.rand(8))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + self.weights[self.rows(*batch).long().clamp(0, 7)].mean().nan_to_num())


class KeepsPositions(Keeps):
    """Takes from a table that no submodule has the rows that it keeps, behind a layer that changes its own buffers."""

    def __init__(self) -> None:
        super().__init__(lambda x, y: y, norm=True)
        self.register_buffer("positions", torch.arange(8))

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        y = self(x)
        rows = self.positions[: len(x)][x.amax(1) > 1]
        return F.mse_loss(y, target) + y[rows].square().sum()


class NormalisesRows(Asks):
    """Normalises a number of rows that depends on the batch."""

    def __init__(self) -> None:
        super().__init__(bool, lambda kept: len(kept) > 1)
        self.last, self.norm = RowsOfUnit(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        y, kept = self.last(self.first(x))
        return F.mse_loss(self.norm(y), target) * (2 if self.heard(kept) else 1)


class RowsOfUnit(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x[x.abs().amax(1) > 1]


class KeepsRowsOfUnit(Asks):
    def __init__(self, norm: bool = False) -> None:
        super().__init__(bool, lambda said: len(said) > 1)
        self.last = RowsOfUnit(8, 8)
        if norm:
            self.first.append(nn.BatchNorm1d(8))


def late_differences() -> DataLoader[Any]:
    """Batches of which the first is small, and the others are small only in their first micro-batch."""
    torch.manual_seed(2)
    x, y = MLP.example(8 * BATCHES)
    x *= 0.01
    for first in range(8, 8 * BATCHES, 8):
        x[first + 2 : first + 8] *= 1000
    return DataLoader(TensorDataset(x, y), batch_size=8)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Asks(bool, bool),
        lambda: Asks(str, lambda said: said == "True"),
        lambda: Asks(lambda large: {"large" if large else "small": torch.ones(1)}, lambda said: "large" in said),
        lambda: Asks(lambda large: (torch.ones(1), None)[:: -1 if large else 1], lambda said: said[0] is None),
        lambda: Asks(lambda large: torch.ones(2 if large else 1), lambda said: len(said) == 2),
        lambda: Asks(lambda large: F.relu if large else F.gelu, lambda said: said is F.relu),
        lambda: Asks(lambda large: {1} if large else set(), bool),
        lambda: Keeps(lambda x, y: x[x > 1]),
        lambda: Keeps(lambda x, y: (x > 1).nonzero(), norm=True),
        lambda: Keeps(lambda x, y: y[x.amax(1) > 1], norm=True),
        KeepsWeights,
        KeepsPositions,
        KeepsRowsOfUnit,
        NormalisesRows,
    ],
)
def test_a_micro_batch_with_another_flag_structure_or_shape_is_followed(
    make: Callable[[], Any], num_stages: int
) -> None:
    assert_repeats(make, late_differences(), num_stages)


class Unfreezes(KeepsRowsOfUnit):
    """Begins to update the statistics of its normalisation after the first batch."""

    def __init__(self) -> None:
        super().__init__(norm=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first[-1].train(batch_idx > 0)


class Classes(torchmetrics.Metric):
    """Gives a number for each class that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(2), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.seen[int(x.abs().max() > 1)] += 1

    def compute(self) -> dict[str, Tensor]:
        return {f"class {number}": self.seen[number] for number in range(2) if self.seen[number]}


class LogsClasses(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.classes = Classes()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict(self.classes(batch[0]))
        return loss


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: KeepsRowsOfUnit(norm=True), "unit 'last' at"),
        (Unfreezes, "unit 'last' at"),
        (LogsClasses, r"Classes\(\)"),
    ],
)
def test_another_form_comes_too_late_if_the_program_has_changed_what_lasts(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(StepChangedError, match=f"{what}.* returned something of another form .*static_step"):
        trained(make(), late_differences())


# -- what is the same tensor, and in which order tensors are written ---------------------------------------------------


class Ordered(MLP):
    """Returns a mapping that is no dict, with the loss and something else."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return OrderedDict(loss=self.loss(batch))


class Shifts(MLP):
    """Changes a tensor of its own between layers that have read it."""

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.zeros(8)
        for layer in self.layers:
            x = layer(x) + shift
            shift += 0.1
        return x


class ShiftsRows(MLP):
    """Writes into rows of a tensor which a log has read."""

    def loss(self, batch: Any) -> Tensor:
        weight = torch.ones(8)
        self.log("weight", weight.mean())
        weight[:4] = 0.5
        self.log("later", weight.mean())
        x, target = batch
        return ((self(x) - target) * weight).square().mean()


class OfBatch(nn.Module):
    """Has no parameters, so it depends on the batch alone."""

    def forward(self, x: Tensor) -> Any:
        return x * 1.0, bool(x.abs().max() > 1)


class AsksOfBatch(Asks):
    def __init__(self) -> None:
        super().__init__(bool, bool)
        self.mask = OfBatch()
        self.last = nn.Linear(8, 8)

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        x, large = self.mask(x)
        return F.mse_loss(self.last(self.first(x)), target) * (2 if large else 1)


class ReturnsOne(nn.Linear):
    """Returns one tensor twice, or two."""

    def __init__(self, when: bool) -> None:
        super().__init__(8, 8)
        self.when = when

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, (y if bool(x.abs().max() > 1) is self.when else 0.5 * y)


class AddsBoth(Asks):
    def __init__(self, when: bool) -> None:
        super().__init__(bool, bool)
        self.last, self.one, self.other = ReturnsOne(when), nn.Linear(8, 8), nn.Linear(8, 8)

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        one, other = self.last(self.first(x))
        return F.mse_loss(self.one(one) + self.other(other), target)


class Gate(nn.Linear):
    """Computes, or returns what it was given."""

    def __init__(self, when: bool) -> None:
        super().__init__(8, 8)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool(x.abs().max() > 1) is self.when else x


class Gated(Asks):
    def __init__(self, when: bool) -> None:
        super().__init__(bool, bool)
        self.last = Gate(when)

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        h = self.first(x)
        return F.mse_loss(h + self.last(h), target)


class Tells(torchmetrics.Metric):
    """Gives a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.total += value.detach().mean()

    def compute(self) -> float:
        return float(self.total)


class LogsWhatIsTold(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.told = Tells()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("rest", 1 - self.told(loss))
        return loss


class TellsTensor(Tells):
    def compute(self) -> Any:
        return self.total


class LogsRoot(MLP):
    """Logs a number that it computes from what a metric returns."""

    def __init__(self) -> None:
        super().__init__()
        self.told = TellsTensor()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("root", self.told(loss).sqrt())
        return loss


def test_what_is_computed_from_a_metric_is_repeated_behind_it(followed: list[int]) -> None:
    assert_repeats(LogsRoot)
    assert followed.count(1) == BATCHES * MICRO + FIRST + BATCHES - 1


class CoolingByTensor(Cooling):
    """Keeps its number in a tensor."""

    def __init__(self) -> None:
        super().__init__(0)
        self.factor: Any = torch.ones(())


class Late(MLP):
    """Has a buffer, and a unit that trains from the third batch on and then begins to change something."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit.eval()
        self.register_buffer("margins", torch.ones(8))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.unit.train(batch_idx > 1)


class Counts(nn.Linear):
    """Counts how much it uses its outputs, in a buffer that it changes in place, if it trains."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("usage", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.usage.mul_(0.9).add_(y.detach().abs().mean(0))
        return y


class ReadsUsage(Late):
    """Reads behind a layer what that has counted."""

    def __init__(self) -> None:
        super().__init__(Counts())
        self.layers.append(self.unit)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.unit.usage.mean()


class ReadsView(ReadsUsage):
    """Reads what the layer has counted through a view that it has taken before it calls the layer."""

    def loss(self, batch: Any) -> Tensor:
        usage = self.unit.usage.detach()
        return MLP.loss(self, batch) * usage.mean()


class ChangesItsArgument(nn.Module):
    """Lowers the numbers in a tensor that it is given, if it trains."""

    def forward(self, x: Tensor, margins: Tensor) -> Tensor:
        if self.training:
            margins.mul_(0.5)
        return x - margins


class GivesView(Late):
    """Gives a layer a view of a buffer that the layer changes, and reads it then."""

    def __init__(self) -> None:
        super().__init__(ChangesItsArgument())

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        margins = self.margins.view(1, 8)
        return F.mse_loss(self.unit(self.layers(x), margins), target) * self.margins.mean()


class Tracks(nn.Module):
    """Subtracts a mean that it changes in place in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean


class TracksTargets(Late):
    """Reads the mean of the targets before it calls their unit.

    Args:
        calls: whether it reads the mean by a call of the unit.
    """

    def __init__(self, calls: bool) -> None:
        super().__init__(Tracks())
        self.calls = calls

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        out = self.layers(x)
        out = self.unit(out) if self.calls else out - self.unit.mean
        return F.mse_loss(out, self.unit(target))


class LowersMargin(Late):
    """Changes by itself a buffer that it has read."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        loss = F.mse_loss(self(x) - self.margins, target)
        if self.unit.training:
            self.margins.mul_(0.5)
        return loss


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        Ordered,
        Shifts,
        ShiftsRows,
        AsksOfBatch,
        lambda: AddsBoth(True),
        lambda: AddsBoth(False),
        lambda: Gated(True),
        lambda: Gated(False),
        LogsWhatIsTold,
        lambda: ReadsFactor(7, CoolingByTensor()),
        ReadsUsage,
        ReadsView,
        GivesView,
        lambda: TracksTargets(calls=False),
        lambda: TracksTargets(calls=True),
        LowersMargin,
    ],
    ids=["Ordered", "Shifts", "ShiftsRows", "AsksOfBatch", "same", "two", "computes", "returns", "told", "ReadsTensor",
         "ReadsUsage", "ReadsView", "GivesView", "TracksTargets", "calls", "LowersMargin"],
)  # fmt: skip
def test_micro_batches_are_repeated_only_where_the_same_is_true_of_them(
    make: Callable[[], Any], num_stages: int
) -> None:
    assert_repeats(make, late_differences(), num_stages)


def test_what_a_unit_returns_twice_may_be_two_tensors_where_a_cut_follows() -> None:
    torch.manual_seed(0)
    models = [AddsBoth(False)]
    models += [copy.deepcopy(models[0]), copy.deepcopy(models[0])]
    trained(models[0], late_differences(), 1, static_step=False)
    for model, static in zip(models[1:], (False, "auto"), strict=True):
        trained(model, late_differences(), 2, static_step=static, split_points=["one"])
        assert_same_parameters(models[0], model)


class Listed(MLP):
    """Gets a list of pairs."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])))


def test_a_sample_may_come_twice_in_a_micro_batch() -> None:
    """As one object, of a dataset in memory whose samples are drawn with replacement."""
    pairs = [*zip(*MLP.example(48), strict=True)]
    order = [*range(16), 16, 16, *range(18, 48)]
    assert_repeats(Listed, DataLoader(pairs, 16, sampler=order, collate_fn=list))
