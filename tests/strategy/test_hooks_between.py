"""Hooks that run while an iteration does, or that look at what other processes have: as on one device, or an error."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_avgpipe import AvgPipeStrategy
from tests import processes
from tests.strategy.test_attributes_of_steps import Layers, data
from tests.trainers import trainer


class Step(Layers):
    """What its hooks change from the second epoch on, the check against plain training does not see."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0]) - batch[1]).square().mean()

    def others(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have a gradient, as people write it."""
        yield from (p for p in self.parameters() if p.grad is not None)


# -- right -------------------------------------------------------------------------------------------------------------


class ClipsWeights(Step):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.current_epoch:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.1, 0.1)


class Teaches(Step):
    """A teacher in the first stage follows its student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def through(self, x: Tensor) -> Tensor:
        return super().through(x + self.teacher(x))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.current_epoch:
            for teacher, student in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                teacher.mul_(0.5).add_(student.detach(), alpha=0.5)


class Anneals(Step):
    """A number that the Python of the step reads, for the first stage."""

    tau = 1.0

    def through(self, x: Tensor) -> Tensor:
        return super().through(x * self.tau)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.current_epoch:
            self.tau *= 0.7


class Loads(nn.Linear):
    """Counts what it gets in one buffer; a hook moves another one by that."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("load", torch.zeros(8))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.load += (x.detach() > 0).sum(0)
        return super().forward(x) + self.shift


class Balances(Step):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = Loads(), Loads()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for layer in (self.a, self.d):
            layer.shift += 0.1 * torch.sign(layer.load.mean() - layer.load)
            layer.load.zero_()


class Centres(Step):
    """What the step gathers in buffers of its own, a hook of every process applies in the next epoch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "total"):
            self.register_buffer(name, torch.zeros(8))

    def through(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.total += h.detach().sum(0)
        return self.d(self.c(self.b(h - self.mean).relu()).relu())

    def on_train_epoch_start(self) -> None:
        self.mean.copy_(self.total / 100)
        self.total.zero_()


class ByItself(Step):
    """Treats each gradient by itself, and leaves out those without numbers."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.others():
            if not parameter.is_meta and parameter.grad.norm() > 0.01:  # type: ignore[union-attr]
                parameter.grad *= 0.5

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for parameter in self.others():
            parameter.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
        optimizer.step()


class Steers(Step):
    """A hook that nobody can pickle, on a value of the first stage, and its handle, which every stage has."""

    def through(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.current_epoch:
            kept = h.register_hook(lambda gradient: 0.5 * gradient)
            h.register_hook(lambda gradient: -gradient).remove()
            assert kept is not None
        return self.d(self.c(self.b(h).relu()).relu())


RIGHT = (ClipsWeights, Teaches, Anneals, Balances, Centres, ByItself, Steers)


def fitted(make: Any, devices: int, num_stages: int = 2, validates: bool = False, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = make()
    strategy = AvgPipeStrategy(num_stages=num_stages, num_microbatches=4, costs="flops", costs_cache=None)
    trainer(strategy=strategy, devices=devices, **options).fit(module, data(), data() if validates else None)
    return module.state_dict()


def all_fitted(rank: int, kinds: Any) -> list[dict[str, Tensor]]:
    return [fitted(make, 2) for make in kinds]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Tensor]]:
    """One process that accumulates micro-batches, the hooks once for each batch."""
    found = []
    for make in RIGHT:
        torch.manual_seed(3)
        module = make()
        module.training_step = accumulating(module)
        trainer().fit(module, data())
        found.append(module.state_dict())
    return found


def accumulating(module: Any) -> Any:
    """Return a step that runs the micro-batches of a batch, and leaves the last backward to Lightning."""
    step, hook = module.training_step, module.on_before_zero_grad

    def run(batch: Any, batch_idx: int) -> Tensor:
        parts = list(zip(*(tensor.tensor_split(4) for tensor in batch), strict=True))
        loss = step(parts[0], batch_idx)
        hook(None)
        module.zero_grad()
        for part in parts[1:]:
            (loss / 4).backward()
            loss = step(part, batch_idx)
        return loss / 4

    module.on_before_zero_grad = module.optimizer_zero_grad = lambda *args: None
    return run


def check(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for make, state, wanted in zip(RIGHT, found, expected, strict=True):
        different = [name for name, tensor in state.items() if not torch.equal(tensor, wanted[name])]
        assert not different, f"{make.__name__}: {different}"


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_hook_between_micro_batches_acts_on_all_stages_of_one_process(num_stages: int, plain: Any) -> None:
    check([fitted(make, 1, num_stages) for make in RIGHT], plain)


def test_a_hook_between_micro_batches_acts_on_the_stages_of_every_process(plain: Any, tmp_path: Path) -> None:
    for found in processes.results(processes.run(2, all_fitted, RIGHT, folder=tmp_path)):
        check(found, plain)


class Decides(L.Callback):
    """Scales inputs by the metrics of the epoch that has ended, on every process."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.tau = 1 / (1 + float(trainer.callback_metrics.get("loss", 9.0)))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.tau *= 1 / (1 + float(trainer.logged_metrics.get("val_loss", 9.0)))


class Scales(Step):
    tau = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step((batch[0] * self.tau, batch[1]), batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))


def scaled(rank: int, devices: int) -> dict[str, Tensor]:
    return fitted(Scales, devices, callbacks=[Decides()], num_sanity_val_steps=0, max_epochs=3, validates=True)


def test_callbacks_see_the_metrics_of_an_epoch_on_every_process_when_it_ends(tmp_path: Path) -> None:
    expected = scaled(0, 1)
    for state in processes.results(processes.run(2, scaled, 2, folder=tmp_path)):
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []


# -- refused -----------------------------------------------------------------------------------------------------------


class Follows(Step):
    """A teacher in the last stage follows a student in the first, by operations that torch leaves out on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) + self.teacher(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch:
            for teacher, student in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                teacher.mul_(0.5).add_(student.detach(), alpha=0.5)


class FollowsByForeach(Follows):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch:
            torch._foreach_add_(list(self.teacher.parameters()), [p.detach() for p in self.a.parameters()])


class SkipsBadGradients(Step):
    def on_after_backward(self) -> None:
        if self.current_epoch and not all(p.grad.isfinite().all() for p in self.others()):  # type: ignore[union-attr]
            self.zero_grad()


class ClipsByItsOwnNorm(Step):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.current_epoch:
            norm = sum(float(p.grad.norm()) ** 2 for p in self.others()) ** 0.5  # type: ignore[union-attr]
            for parameter in self.others():
                parameter.grad *= 0.1 / norm


class Sharpness(Step):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if self.current_epoch:
            torch.stack([p.grad.norm() for p in self.others()]).norm()  # type: ignore[union-attr]
        optimizer.step()


class Watches(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.current_epoch:
            module.seen = sum(p.grad.norm().item() for p in module.others())


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach().mean())
        return super().forward(x)


class CountsInside(Step):
    """A metric object in a unit of the first stage; a hook of rank 0 computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Counts()

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.a.mean.compute())


REFUSED = {
    Follows: r"add_\(\) at test_hooks_between\.py:\d+ in on_train_batch_start in a hook",
    FollowsByForeach: r"_foreach_add_\(\) at test_hooks_between\.py:\d+ in on_train_batch_start in a hook",
    SkipsBadGradients: r"SkipsBadGradients\.on_after_backward at test_hooks_between\.py:\d+ in .* needs the numbers of",
    ClipsByItsOwnNorm: r"ClipsByItsOwnNorm\.configure_gradient_clipping at .* needs the numbers of",
    Sharpness: r"Sharpness\.optimizer_step at test_hooks_between\.py:\d+ in optimizer_step needs the numbers of",
    Watches: r"Watches\.on_before_optimizer_step at test_hooks_between\.py:\d+ in .* needs the numbers of",
    CountsInside: r"a metric is called at test_hooks_between\.py:\d+ in forward inside a submodule that runs on",
}


def interleaved(rank: int) -> None:
    fitted(ClipsWeights, 2, 4)


def test_a_hook_between_micro_batches_changes_no_weights_where_a_stage_is_ahead(tmp_path: Path) -> None:
    errors = [outcome.error for outcome in processes.run(2, interleaved, folder=tmp_path)]
    assert all(error and "behind the first micro-batch" in error for error in errors)


def refused(rank: int, kind: type) -> None:
    callbacks = [kind()] if issubclass(kind, L.Callback) else []
    fitted(Step if callbacks else kind, 2, callbacks=callbacks)


@pytest.mark.parametrize("kind", [Follows, Sharpness, *(pytest.param(k, marks=pytest.mark.slow) for k in REFUSED)])
def test_a_hook_that_needs_what_another_process_has_is_an_error_with_its_line(kind: type, tmp_path: Path) -> None:
    errors = [outcome.error for outcome in processes.run(2, refused, kind, folder=tmp_path) if outcome.error]
    assert len(errors) == 2
    assert any(re.search(REFUSED[kind], error) for error in errors), errors
