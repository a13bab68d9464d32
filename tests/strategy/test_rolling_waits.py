"""With rolling a process that must wait for others runs what it has of other models meanwhile.

Each test would end by its time limit otherwise: a process goes on only after the other has run such an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from tests import processes
from tests.averaging.models import Batches
from tests.trainers import pipeline

LIMIT_S = 30.0
Named = Mapping[int, str]
BATCHES = 8  # of an epoch: pipeline 0 has those with even numbers


class Gates:
    """Events of all processes. What is waited for must come within a limit."""

    def __init__(self, *names: str) -> None:
        self._events = {name: mp.get_context("fork").Event() for name in names}

    def open(self, name: str) -> None:
        self._events[name].set()

    def wait(self, name: str) -> None:
        assert self._events[name].wait(LIMIT_S), f"'{name}' has not come within {LIMIT_S:g} s"


class GateInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Gates, opens: str, waits: str) -> Tensor:
        ctx.gates, ctx.opens, ctx.waits = gates, opens, waits
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.opens:
            ctx.gates.open(ctx.opens)
        if ctx.waits:
            ctx.gates.wait(ctx.waits)
        return gradient, None, None, None


class Gate(nn.Module):
    """A layer that opens gates, and waits at them, by the number that its batch is filled with.

    Args:
        opens: number -> gate that the forward opens.
        waits: number -> gate at which the forward waits.
        opens_back: number -> gate that the backward opens.
        waits_back: number -> gate at which the backward waits.
    """

    active = False

    def __init__(
        self, gates: Gates, opens: Named = {}, waits: Named = {}, opens_back: Named = {}, waits_back: Named = {}  # noqa: B006
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer, self.gates = nn.Linear(4, 4), gates
        self.opens, self.waits = opens, waits
        self.opens_back, self.waits_back = opens_back, waits_back

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        number = int(x[0, 0]) if self.active else -1
        if number in self.opens:
            self.gates.open(self.opens[number])
        if number in self.waits:
            self.gates.wait(self.waits[number])
        opens, waits = self.opens_back.get(number, ""), self.waits_back.get(number, "")
        return GateInBackward.apply(torch.tanh(self.layer(h)), self.gates, opens, waits)


class Gated(L.LightningModule):
    """The first gate is on rank 1, the last on rank 0. They work in the second epoch, before which pipelines drain."""

    def __init__(self, first: Gate, last: Gate) -> None:
        super().__init__()
        self.first, self.last = first, last

    def on_train_epoch_start(self) -> None:
        self.first.active = self.last.active = self.current_epoch == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return F.mse_loss(self.last(self.first(x / 100, x), x), torch.zeros_like(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module: L.LightningModule, replicas: list[int] | int = 1, **options: Any) -> int:
    """Train two models for two epochs, in two processes, or as many as there are replicas of stages."""
    strategy = {"num_pipelines": 2, "num_microbatches": 2, "averaging": Averaging(rolling=True), "replicas": replicas}
    strategy |= {"split_points": ["last"], "timeout": 2 * LIMIT_S}
    trainer = pipeline(2, sum(replicas) if isinstance(replicas, list) else 2, strategy, max_epochs=2, **options)
    trainer.fit(module, Batches([[torch.full((4, 4), float(n))] for n in range(BATCHES)]))
    return trainer.global_step


def clip(gates: Gates) -> int:
    # rank 1 ends its backward of batch 0, pipeline 0's, after rank 0 has run a forward of batch 1
    first = Gate(gates, opens={1: "other sent"}, waits_back={0: "other ran"})
    return fit(Gated(first, Gate(gates, opens={1: "other ran"}, waits={0: "other sent"})), gradient_clip_val=0.1)


def test_other_models_run_until_gradients_can_be_clipped_by_their_norm_over_stages(tmp_path: Path) -> None:
    gates = Gates("other sent", "other ran")
    assert processes.everywhere(2, clip, gates, folder=tmp_path) == [BATCHES] * 2


class SlowToStep(Gated):
    """Rank 0 steps model 1 for the second time after rank 1 has begun the third batch of that model."""

    steps = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += self.first.active
        if dist.get_rank() == 0 and self.steps == 4:
            self.first.gates.wait("next batch began")


def step(gates: Gates) -> int:
    return fit(SlowToStep(Gate(gates, opens={5: "next batch began"}), Gate(gates)))


def test_the_next_batch_begins_before_rank_0_has_told_how_the_last_one_went(tmp_path: Path) -> None:
    gates = Gates("next batch began")
    assert processes.everywhere(2, step, gates, folder=tmp_path) == [BATCHES] * 2


class Counting(Gate):
    """A gate with a buffer that steps change, as batch normalisation has, which other processes get after each."""

    def __init__(self, gates: Gates, **named: Named) -> None:
        super().__init__(gates, **named)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(h, x)


class Watched(SlowToStep):
    seen = 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = max(self.seen, float(self.first.calls))


def watch(gates: Gates) -> tuple[int, bool]:
    # rank 1 goes on with batch 5, in which it is when rank 0 steps model 1, after rank 0 has run a forward of batch 4
    first = Counting(gates, opens={5: "next batch began"}, waits={5: "rank 0 ran"})
    module = Watched(first, Gate(gates, opens={4: "rank 0 ran"}))
    return fit(module), module.seen == 2 * BATCHES  # of two micro-batches each, for each model in two epochs


def test_the_next_batch_begins_before_all_know_what_submodules_have_changed(tmp_path: Path) -> None:
    gates = Gates("next batch began", "rank 0 ran")
    assert processes.everywhere(2, watch, gates, folder=tmp_path) == [(BATCHES, True)] * 2


def share(rank: int, gates: Gates) -> int:
    # the last stage's second replica ends its half of batch 0 after the first, which has ended its own, ran on
    opens_back, waits_back = [({0: "half ended"}, {}), ({}, {0: "first ran"}), ({}, {})][rank]
    first = Gate(gates, waits={1: "half ended"})
    last = Gate(gates, opens={1: "first ran"} if rank == 0 else {}, opens_back=opens_back, waits_back=waits_back)
    return fit(Gated(first, last), [1, 2])


def test_other_models_run_until_all_replicas_of_a_stage_have_ended_a_batch(tmp_path: Path) -> None:
    gates = Gates("half ended", "first ran")
    assert processes.each(3, share, gates, folder=tmp_path) == [BATCHES] * 3
