"""Recomputation: the same numbers from less memory, and no effect of a forward twice."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchmetrics import MeanMetric

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from lightning_avgpipe.planning import Memory
from lightning_avgpipe.planning.memory import Conditions, UpdateScheme, memory_of
from lightning_avgpipe.schedule import build
from tests.driver import Engine
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

    example = staticmethod(MLP.example)

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


def outcome(model: Regression, folder: Path, recompute: Any, strategy: dict[str, Any], **options: Any) -> Any:
    """Weights, buffers and log rows after five steps; and the model."""
    model = copy.deepcopy(model)
    stages = strategy.pop("num_stages", 2)
    runner = pipeline(
        stages,
        strategy={"recompute": recompute, "num_microbatches": 4, **strategy},
        logger=CSVLogger(folder, name=str(recompute is False), version=0),
        log_every_n_steps=1,
        max_epochs=1,
        **options,
    )
    runner.fit(model, loader(type(model), 40, 8))
    runner.logger.save()
    rows = (folder / str(recompute is False) / "version_0" / "metrics.csv").read_text()
    return model.state_dict(), rows, model


@pytest.mark.parametrize(
    ("kind", "num_stages", "schedule", "recompute"),
    [
        (Counters, 1, "afab", True),
        (Counters, 3, "advance_forward", ["blocks.*"]),
        (Counters, 4, "afab", True),
        (TinyTransformer, 2, "1f1b", True),
        (TinyTransformer, 4, "afab", ["blocks.*"]),
    ],
    ids=str,
)
def test_weights_buffers_and_logs_are_the_same_bitwise(
    kind: type[Regression], num_stages: int, schedule: str, recompute: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = kind() if kind is Counters else TinyTransformer(dropout=0.2, layers=4)
    strategy = {"num_stages": num_stages, "schedule": schedule}
    plain, rows, one = outcome(model, tmp_path, False, dict(strategy))
    again, other_rows, other = outcome(model, tmp_path, recompute, dict(strategy))
    for name, value in plain.items():
        assert torch.equal(again[name], value), name
    assert rows == other_rows
    if kind is Counters:
        assert plain["steps"] == 20
        for a, b in zip(one.blocks, other.blocks, strict=True):
            assert a.calls == b.calls and a.seen == b.seen and len(a.seen) == a.calls


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


def stashed(recompute: Any, schedule: str = "afab") -> int:
    torch.manual_seed(1)
    model = TinyTransformer(layers=4)
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = TinyTransformer.example(16)
    engine = Engine(model, 2, batch, 8, split_points=["blocks.2"], recompute=recompute)
    saved = Saved()
    with saved_tensors_hooks(saved.pack, lambda kept: kept):
        engine.train(batch, schedule)
    return saved.largest


def test_a_stage_holds_one_stash_whatever_is_in_flight() -> None:
    plain, whole = stashed(False), stashed(True)
    assert whole < plain / 8  # eight micro-batches on two stages, against one on one


def test_units_keep_their_inputs_only() -> None:
    plain, units = stashed(False), stashed(["blocks.*"])
    assert units < plain / 3


def test_the_plan_counts_repeated_forwards_and_one_stash() -> None:
    torch.manual_seed(1)
    batch = TinyTransformer.example(16)

    def plan(recompute: Any) -> Any:
        model = TinyTransformer(layers=4)
        model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        return Engine(model, 2, batch, 8, split_points=["blocks.2"], recompute=recompute).plan

    plain, units = plan(False), plan(["blocks.*"])
    for a, b in zip(plain.stages, units.stages, strict=True):
        assert b.forward == a.forward and a.backward < b.backward <= a.backward + a.forward
    memory = memory_of(MLP(), Conditions(build("1f1b", 3, 8)), UpdateScheme(), 1e9, recompute=True)
    assert memory.repeats == (True, True, False) and memory.in_flight == (3, 2, 1)
    assert [memory.stashes(k) for k in range(3)] == [1, 1, 1] and memory.flights(0) == 3
    assert Memory().is_repeated(0) is False


@pytest.mark.parametrize("value", ["blocks", 1, [], [1], None])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="recompute="):
        AvgPipeStrategy(recompute=value)


def test_a_unit_that_overwrites_its_input_cannot_be_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'activation', which changes its input in place"):
        pipeline(strategy={"recompute": ["activation"]}).fit(UNet(), loader(UNet, 8, 8))


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


def test_what_cannot_be_undone_is_an_error() -> None:
    with pytest.raises(AvgPipeError, match=r"'total' of Tanh is a tensor that a forward changes in place"):
        pipeline(strategy={"recompute": True}).fit(Accumulating(), loader(MLP, 8, 8))
