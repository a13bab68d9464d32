"""Recomputation: the same numbers from less memory, and no effect of a forward twice."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchmetrics import MeanMetric

from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.planning import Memory
from lightning_avgpipe.planning.memory import Conditions, Flow, UpdateScheme, memory_of
from lightning_avgpipe.schedule import build
from tests.comparing import assert_equal, assert_same_gradients
from tests.driver import Engine, accumulate
from tests.models import MLP, Regression, TinyTransformer, UNet, loader
from tests.trainers import pipeline


class Counting(nn.Module):
    """A unit with dropout, running statistics and a counter of its calls, which decides about its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("largest", torch.zeros(()))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        x = self.dropout(torch.tanh(self.norm(self.linear(x)))) / (1 + 0.1 * self.calls)
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return x + 0.1 * self.largest


class Counters(Regression):
    """Units that change themselves, a metric, and a counter in the step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.blocks = nn.ModuleList(Counting() for _ in range(4))
        self.mean = MeanMetric()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log_dict({"train_loss": loss, "mean": self.mean}, on_step=True, on_epoch=True)
        return loss


def transformer() -> TinyTransformer:
    return TinyTransformer(dropout=0.2, layers=4)


def outcome(model: Regression, folder: Path, recompute: Any, num_stages: int, schedule: str) -> tuple[Any, str]:
    """The model after three steps, and the rows of its log."""
    model = copy.deepcopy(model)
    logger = CSVLogger(folder, name=str(recompute), version=0)
    strategy = {"recompute": recompute, "num_microbatches": 4, "schedule": schedule}
    runner = pipeline(num_stages, strategy=strategy, logger=logger, log_every_n_steps=1, max_epochs=1)
    runner.fit(model, loader(type(model), 24, 8))
    logger.save()
    return model, (folder / str(recompute) / "version_0" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("make", "num_stages", "schedule", "recompute"),
    [
        (Counters, 1, "afab", True),
        (Counters, 3, "advance_forward", ["blocks.*"]),
        (transformer, 4, "afab", ["blocks.*"]),
        pytest.param(Counters, 4, "afab", True, marks=pytest.mark.slow),
        pytest.param(transformer, 2, "1f1b", True, marks=pytest.mark.slow),
    ],
)
def test_weights_buffers_and_logs_are_the_same_bitwise(
    make: Callable[[], Regression], num_stages: int, schedule: str, recompute: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = make()
    plain, rows = outcome(model, tmp_path, False, num_stages, schedule)
    again, other_rows = outcome(model, tmp_path, recompute, num_stages, schedule)
    assert_equal(plain, again)
    assert rows == other_rows
    if isinstance(plain, Counters):
        assert plain.steps == 12
        for a, b in zip(plain.blocks, again.blocks, strict=True):
            assert a.calls == b.calls and a.seen == b.seen and len(a.seen) == a.calls


class Penalised(nn.Linear):
    """A unit that differentiates itself, and divides by a running mean that it changes in place."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def _scaled(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().mean() / 2)
        return torch.tanh(super().forward(x / self.scale.clone()))

    def forward(self, x: Tensor) -> Tensor:
        apart = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._scaled(apart).sum(), apart, create_graph=True)
        return self._scaled(x) + slope.square()


def test_a_unit_that_differentiates_itself_is_repeated_with_the_same_buffers_each_time() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.penalised, self.last = nn.Linear(8, 8), Penalised(), nn.Linear(8, 8)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.last(self.penalised(self.first(batch))).square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(1)
    expected, batch = Module(), torch.randn(8, 8)
    module = copy.deepcopy(expected)
    accumulate(expected, batch, 2)
    Engine(module, 2, batch, split_points=["penalised"], recompute=["penalised"]).train(batch)
    assert_same_gradients(expected, module)
    assert_equal(expected, module)


class Saved:
    """Bytes of the tensors that graphs hold for backwards: now, and at most."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.largest = 0

    def pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            self._alive[id(kept)] = (weakref.ref(kept), tensor.numel() * tensor.element_size())
        self.largest = max(self.largest, self.now())
        return kept

    def now(self) -> int:
        return sum(nbytes for ref, nbytes in self._alive.values() if ref() is not None)


def engine_of(recompute: Any) -> Engine:
    torch.manual_seed(1)
    model = TinyTransformer(layers=4)
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return Engine(model, 2, TinyTransformer.example(16), 8, split_points=["blocks.2"], recompute=recompute)


def test_a_stage_holds_one_stash_whatever_is_in_flight_and_units_keep_their_inputs_only() -> None:
    stashed = []
    for recompute in (False, True, ["blocks.*"]):
        engine, saved = engine_of(recompute), Saved()
        with saved_tensors_hooks(saved.pack, lambda kept: kept):
            engine.train(TinyTransformer.example(16), "afab")
        stashed.append(saved.largest)
    plain, whole, units = stashed
    assert whole < plain / 8  # eight micro-batches on two stages, against one on one
    assert units < plain / 3


def test_the_plan_counts_repeated_forwards_and_one_stash() -> None:
    plain, units = (engine_of(recompute).plan.stages for recompute in (False, ["blocks.*"]))
    for a, b in zip(plain, units, strict=True):
        assert b.forward == a.forward and a.backward < b.backward <= a.backward + a.forward
    memory = memory_of(MLP(), Conditions(build("1f1b", 3, 8)), UpdateScheme(), 1e9, recompute=True)
    assert memory.flows == (Flow(3, 1, True), Flow(2, 1, True), Flow(1, 1, False))
    assert Memory().flow(0).repeats is False


class Accumulating(MLP):
    """A tensor that is not a buffer, changed in place inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].total = torch.zeros(8)  # type: ignore[assignment]
        tanh = self.layers[1]

        def forward(x: Tensor) -> Tensor:
            tanh.total += x.detach().sum(0)
            return torch.tanh(x)

        tanh.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("make", "recompute", "says"),
    [
        (UNet, ["activation"], "'activation', which changes its input in place"),
        (Accumulating, True, "'total' of Tanh is a tensor that a forward changes in place"),
    ],
)
def test_what_cannot_be_repeated_is_an_error(make: type[Regression], recompute: Any, says: str) -> None:
    with pytest.raises(AvgPipeError, match=says):
        pipeline(strategy={"recompute": recompute}).fit(make(), loader(make, 8, 8))
