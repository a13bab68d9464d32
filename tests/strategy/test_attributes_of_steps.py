"""Steps that change weights and buffers themselves: each change once per micro-batch, as if accumulated by hand."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_avgpipe.errors import PartitionError
from tests.averaging.models import Models
from tests.comparing import assert_equal
from tests.strategy.steps import NUM_MICROBATCHES, Layers, by_hand, data, piped, states_of_two_processes
from tests.trainers import assert_defaults_equal_accumulation


def assigned(student: nn.Module, teacher: nn.Module) -> None:
    for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
        t.data = t.data * 0.9 + s.data * 0.1


def foreach(student: nn.Module, teacher: nn.Module) -> None:
    weights = list(teacher.parameters())
    torch._foreach_mul_(weights, 0.9)
    torch._foreach_add_(weights, [s.detach() for s in student.parameters()], alpha=0.1)


def loaded(student: nn.Module, teacher: nn.Module) -> None:
    new = student.state_dict()
    teacher.load_state_dict({name: 0.9 * t + 0.1 * new[name] for name, t in teacher.state_dict().items()})


class Momentum(Layers):
    """MoCo: a momentum encoder, updated before the student runs and used after it, and a queue."""

    def __init__(self, update: Callable[[nn.Module, nn.Module], None] = assigned) -> None:
        super().__init__()
        self.update = update
        self.student = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)  # equal at first, so nothing seems to change
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.update(self.student, self.teacher)
        query = F.normalize(self.student(batch[0]), dim=1)
        with torch.no_grad():
            key = F.normalize(self.teacher(batch[1]), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
        pointer = int(self.pointer)
        self.queue[:, pointer : pointer + len(key)] = key.T
        self.pointer[0] = (pointer + len(key)) % 16
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)) + self.through(query).square().mean()


class Clipped(Layers):
    """A critic, whose trained weights are clipped in the step; and one that shrinks every time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for p in self.parameters():
            p.data.clamp_(-0.2, 0.2)
        self.c.weight.data.mul_(0.99)
        return self.loss(batch)


class Shrinking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.99)
        return super().forward(x)


class WithinUnit(Layers):
    """A unit that changes its own weight, and a normalisation whose statistics the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.norm = Shrinking(8, 8), nn.BatchNorm1d(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = self.norm.running_mean.square().mean()
        return (self.d(self.c(self.norm(self.b(self.a(batch[0]))))) - batch[1]).square().mean() * (1 + penalty)


class Remembering(Layers):
    """A counter that is assigned first, and a hidden state that the next micro-batch finds."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.hidden = 0, None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        if self.hidden is None:
            self.hidden = torch.zeros(len(batch[0]), 8)
        y = self.b(self.a(batch[0]) + self.hidden)
        self.hidden = y.detach()
        return (self.d(self.c(y)) - batch[1]).square().mean() / self.count


class RemembersList(Layers):
    """Hidden states of two layers in a list, which is empty before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.hidden or torch.zeros(2, len(batch[0]), 8)
        x = self.a(batch[0]) + first
        y = self.b(x).relu() + second
        self.hidden = [x.detach(), y.detach()]
        return (self.d(self.c(y)) - batch[1]).square().mean()


class RemembersDict(Layers):
    """A hidden state in a dict, in which the step finds none before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.a(batch[0])
        if "x" in self.hidden:
            x = x + self.hidden["x"]
        self.hidden["x"] = x.detach()
        return (self.d(self.c(self.b(x))) - batch[1]).square().mean()


class Hooked(Layers):
    """Puts hooks on its layers in the first step, and notes in an attribute that they are there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norms: list[Tensor] = []
        if not getattr(self, "is_hooked", False):
            for layer in (self.a, self.b, self.c, self.d):
                layer.register_forward_hook(lambda module, args, output: self.norms.append(output.square().mean()))
            self.is_hooked = True
        return self.loss(batch) + 0.1 * sum(self.norms)


@dataclass
class Progress:
    """An object of the user's."""

    step: int = 0


class Counting(Layers):
    """Objects in attributes that the step changes in place, and whose contents decide the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.progress, self.nested = {"steps": 0}, Progress(), defaultdict(list)
        self.mean, self.seen, self.losses = np.zeros(2), deque(maxlen=5), []
        self.generators = torch.Generator().manual_seed(3), random.Random(0), np.random.default_rng(0)
        self.alias = self.b.progress = self.progress  # one object, whoever refers to it
        self.save_hyperparameters({"tau": 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count["steps"] += 1
        self.progress.step += 1
        self.nested["of"].append(self.alias.step)
        self.seen.append(batch_idx)
        self.hparams.tau *= 0.9
        self.mean[0] = 0.9 * self.mean[0] + 0.1 * self.count["steps"]
        first, second, third = self.generators
        noise = torch.randn(8, generator=first) + second.random() + third.random()
        loss = self.loss((batch[0] + 0.1 * noise, batch[1])) * float(self.mean[0]) * self.hparams.tau
        self.losses.append(loss.item())
        return loss / (self.b.progress.step + len(self.nested["of"]) + len(self.seen))


class Emptied(Callback):
    """Empties a list, as ``on_train_batch_end`` of a module may, and resets what the step counts."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        assert len(pl_module.losses) == NUM_MICROBATCHES
        assert pl_module.count["steps"] == NUM_MICROBATCHES
        pl_module.losses.clear()
        pl_module.count["steps"] = 0


MEASURED, FLOPS = {"costs": "measured"}, {"costs": "flops"}
REPEATS: dict[str, Any] = {"recompute": True, "schedule": "afab", **FLOPS}


@pytest.mark.parametrize(
    ("make", "num_stages", "options"),
    [
        (Momentum, 3, MEASURED),
        (lambda: Momentum(foreach), 3, FLOPS),
        (lambda: Momentum(loaded), 2, MEASURED),
        (Clipped, 3, MEASURED),
        (WithinUnit, 2, MEASURED),
        (Hooked, 3, FLOPS),
        (Counting, 2, MEASURED),
        *((make, 2, REPEATS) for make in (Momentum, WithinUnit, Counting)),  # and changes nothing again
    ],
)
def test_what_a_step_changes_is_what_one_process_makes_of_it(
    make: Callable[[], Layers], num_stages: int, options: dict[str, Any]
) -> None:
    assert_equal(piped(make(), num_stages, **options), by_hand(make()))


def test_hooks_see_objects_once_changed_and_what_they_reset_is_reset_on_every_stage() -> None:
    alone, staged = (piped(Counting(), k, trainer_options={"callbacks": [Emptied()]}, costs="flops") for k in (1, 3))
    assert_equal(staged, alone)
    assert staged.progress == alone.progress == Progress(4 * NUM_MICROBATCHES)
    assert staged.nested == alone.nested


class Carried(Layers):
    """A hidden state in a dict, which the next micro-batch reads."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"hidden": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.b(self.a(batch[0]) + self.state["hidden"])
        self.state["hidden"] = y.detach()
        return (self.d(self.c(y)) - batch[1]).square().mean()


def test_each_parallel_model_has_a_momentum_encoder_of_its_own() -> None:
    alone, staged = Models(), Models()
    for num_stages, models in ((1, alone), (2, staged)):
        piped(Momentum(), num_stages, trainer_options={"callbacks": [models]}, num_pipelines=2, costs="flops")
    assert_equal(alone.models, staged.models)
    for name in ("teacher.0.weight", "teacher.2.bias"):
        first, second = (model[name] for model in staged.models)
        assert not torch.equal(first, second)
        torch.testing.assert_close(staged.reference[name], (first + second) / 2)


def test_a_tensor_without_a_name_that_a_step_changes_is_refused() -> None:
    class Hidden(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.center = [torch.zeros(8)]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.center[0].mul_(0.9)
            return (self.through(batch[0]) - self.center[0]).square().mean()

    with pytest.raises(
        PartitionError, match=r"mul_\(\) at test_attributes_of_steps.py:\d+ .* lives on .* register_buffer"
    ):
        piped(Hidden(), 2)


@pytest.mark.slow
def test_two_processes_make_the_same_of_a_momentum_encoder(tmp_path: Path) -> None:
    assert_equal(states_of_two_processes(Momentum, tmp_path), [by_hand(Momentum()).state_dict()] * 2)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (NUM_MICROBATCHES, "'hidden', which training_step keeps for the next time, goes"),
        ("auto", "not split into micro-batches .* 'hidden', which training_step keeps for the next time"),
    ],
)
@pytest.mark.parametrize("make", [Remembering, RemembersList, RemembersDict])
def test_a_hidden_state_goes_from_batch_to_batch_unless_micro_batches_are_asked_for(
    make: type[Layers], count: Any, said: str
) -> None:
    with pytest.warns(UserWarning, match=said):
        module = piped(make(), 3 if make is Remembering else 2, costs="flops", num_microbatches=count)
    assert_equal(module, by_hand(make(), 1 if count == "auto" else count))


class Collecting(Layers):
    """Collects what it sees, and counts it, before the first unit and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.by_size: dict[int, list[float]] = defaultdict(list)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[0][:, 0].tolist()
        self.by_size[len(batch[0])].append(float(batch[0][0, 0]))
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss


def test_what_parallel_models_collect_comes_together() -> None:
    module = piped(Collecting(), 3, num_pipelines=2, costs="flops")
    everything = [value for batch in data() for value in batch[0][:, 0].tolist()]
    assert sorted(module.seen) == pytest.approx(sorted(everything))
    assert len(module.losses) == 4 * NUM_MICROBATCHES
    assert sum(map(len, module.by_size.values())) == 4 * NUM_MICROBATCHES


CALLS, TOTAL, SEEN = {"steps": 0}, 0, []


class Clock:
    """Keeps the time in its class."""

    now = 0

    def tick(self) -> int:
        Clock.now += 1
        return Clock.now


CLOCK = Clock()


def counted() -> int:
    global TOTAL
    TOTAL += 1
    return TOTAL


def test_variables_outside_of_modules_change_once_per_micro_batch() -> None:
    """Global ones, those of classes, those that the step encloses, and a list of the module's."""

    def result(run: Callable[[Layers], nn.Module]) -> tuple[nn.Module, Any]:
        global TOTAL
        CALLS["steps"], TOTAL, Clock.now, steps = 0, 0, 0, 0
        SEEN.clear()

        class Outside(Layers):
            runs = 0

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                nonlocal steps
                CALLS["steps"] += 1
                type(self).runs += 1
                steps += 1
                number = CALLS["steps"] + self.runs + steps + counted() + CLOCK.tick()
                loss = self.loss((batch[0] * (1 + 0.01 * number), batch[1]))
                SEEN.append(loss.item())
                return loss

        module = run(Outside())
        return module, (CALLS["steps"], TOTAL, Clock.now, Outside.runs, steps, list(SEEN))

    expected, counts = result(by_hand)
    assert counts[:5] == (4 * NUM_MICROBATCHES,) * 5
    for settings in ({"schedule": "1f1b", "verify": True}, {"recompute": True, "schedule": "afab"}):
        module, found = result(lambda module, settings=settings: piped(module, 3, costs="flops", **settings))
        assert_equal(module, expected)
        assert found == counts
    _, (*_, seen) = result(lambda module: piped(module, 2, costs="flops", num_pipelines=2))
    assert len(seen) == 4 * NUM_MICROBATCHES


class OutsideLate(Layers):
    """Counts at the end of the step what its beginning reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss((batch[0] * (1 + 0.1 * CALLS["steps"]), batch[1]))
        CALLS["steps"] += 1
        return loss


LEFT: dict[str, float] = {}


class Leaves(nn.Linear):
    """Leaves a number in a variable outside of modules."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        LEFT["mean"] = out.mean().item()
        return out


class LeavesNumber(Layers):
    """Reads at its end what a layer has left, and clears it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Leaves(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (1 + LEFT["mean"])
        LEFT.clear()
        return loss


_HERE = r"global tests\.strategy\.test_attributes_of_steps"


@pytest.mark.parametrize(
    ("make", "reason", "fit", "too_many"),
    [
        (Carried, r"'state' is read at {} .* its contents are changed", 3, 4),
        (OutsideLate, rf"'{_HERE}\.CALLS' is read at {{}} .* its contents are changed", 1, 2),
        (LeavesNumber, rf"what '{_HERE}\.LEFT' holds is read at {{}} in training_step, and unit 'a' changes it", 1, 2),
    ],
)
def test_what_is_read_before_another_stage_changes_it_is_not_cut_off_and_refused_by_name(
    make: Callable[[], Layers], reason: str, fit: int, too_many: int
) -> None:
    CALLS["steps"] = 0
    expected = by_hand(make())
    CALLS["steps"] = 0
    assert_equal(piped(make(), fit, costs="flops"), expected)
    with pytest.raises(PartitionError, match=reason.format(r"test_attributes_of_steps.py:\d+")):
        piped(make(), too_many, costs="flops")


class Reversible(nn.Module):
    """Normalises, and puts mean and deviation back in a later call, as libraries of time series do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.note(x)
            return (x - self.mean) / self.deviation * self.scale + self.shift
        return (x - self.shift) / self.scale * self.deviation + self.mean

    def note(self, x: Tensor) -> None:
        self.mean, self.deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + self.scale.mean()


class Forecast(Layers):
    norm: Callable[[], nn.Module] = Reversible

    def __init__(self) -> None:
        super().__init__()
        self.reversible = type(self).norm()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.through(self.reversible(batch, "norm"))
        return (self.reversible(x, "denorm") - 1).square().mean()


@pytest.mark.parametrize(("num_stages", "recompute"), [(2, False), (3, True)])
def test_statistics_that_a_submodule_keeps_for_a_later_call_travel(num_stages: int, recompute: bool) -> None:
    plan = assert_defaults_equal_accumulation(Forecast(), torch.randn(8, 8), num_stages, recompute=recompute)
    homes = [stage.index for stage in plan.stages if "reversible" in stage.units]
    assert homes == [0, num_stages - 1]
