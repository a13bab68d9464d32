"""Hooks change and read what stages of other processes have: as if there were one process, or an error with the line.

Some hooks of a module run on rank 0 only, some on every process, and some while micro-batches are under way.
"""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig
from torch.nn.utils import prune
from torchmetrics import MeanMetric

from lightning_avgpipe import Averaging
from tests import processes
from tests.comparing import assert_equal
from tests.strategy.steps import Layers, Make, data, errors_of_two_processes, piped
from tests.trainers import trainer

TWO_EPOCHS, THREE_EPOCHS = {"max_epochs": 2}, {"max_epochs": 3}
OUTSIDE = {"factor": 1.0}


class Step(Layers):
    """What its hooks change from the second epoch on, the check against plain training does not see."""

    def others(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have a gradient, as people write it."""
        yield from (p for p in self.parameters() if p.grad is not None)


# -- between micro-batches ---------------------------------------------------------------------------------------------


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


BETWEEN = (ClipsWeights, Teaches, Anneals, Balances, Centres, ByItself, Steers)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Tensor]]:
    """One process that accumulates micro-batches, the hooks once for each batch."""
    found = []
    for make in BETWEEN:
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


def between(devices: int, num_stages: int) -> list[dict[str, Tensor]]:
    modules = [piped(make(), num_stages, devices, TWO_EPOCHS, costs="flops") for make in BETWEEN]
    return [module.state_dict() for module in modules]


def test_a_hook_between_micro_batches_acts_on_all_stages_of_one_process(plain: Any) -> None:
    assert_equal(between(1, 3), plain)


def test_a_hook_between_micro_batches_acts_on_the_stages_of_every_process(plain: Any, in_two: Any) -> None:
    assert_equal([rank["between"] for rank in in_two], [plain] * 2)


# -- as in one process -------------------------------------------------------------------------------------------------


class Annealed(Layers):
    """Whatever a hook may change that the first stage reads, or its optimizer."""

    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        OUTSIDE["factor"], Annealed.power = 1.0, 1.0
        self.tau, self.count, self.hidden, self.seen = 1.0, 0, None, []
        self.scale, self.array = {"x": torch.ones(8)}, np.ones(2)
        self.register_buffer("shift", torch.zeros(8))
        self.save_hyperparameters({"beta": 1.0})
        self.percentile, self.act = np.float64(1.0), torch.tanh  # neither can be changed in place
        self.writer = open(__file__)  # noqa: SIM115  # cannot be sent, and no other stage reads it

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros(8)
        self.count += 1
        self.seen.append(self.count)
        x = (
            batch[0] * self.tau * OUTSIDE["factor"] ** self.power * self.scale["x"]
            + float(self.array[0])
            + self.shift
            + self.hidden
        )
        self.hidden = self.hidden + 0.1
        y = self.through(self.act(x * self.hparams.beta * float(self.percentile)))
        return (y - batch[1]).square().mean() / self.count / len(self.seen)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tau *= 0.9 if outputs["loss"] > 0 else 0.5  # which rank 0 alone knows
        self.array[0] *= 0.8
        self.percentile = np.float64(self.percentile * 0.9)
        self.writer = open(__file__)  # noqa: SIM115

    def on_train_epoch_end(self) -> None:
        self.scale["x"] = self.scale["x"] * 0.5
        self.shift += 0.1
        self.hparams.beta *= 0.7
        self.act = torch.sin if self.act is torch.tanh else torch.cos
        OUTSIDE["factor"] *= 0.8
        type(self).power += 0.5
        self.count, self.hidden = 0, None
        self.seen.clear()
        self.a.weight.requires_grad_(False)
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5


class ClippedEverywhere(Layers):
    """Weights are clipped after each step, as in a WGAN, in a hook that all processes run."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clip()

    def clip(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Shakes(Layers):
    """Each epoch begins with noise on all weights, of one generator."""

    def on_train_epoch_start(self) -> None:
        generator = torch.Generator().manual_seed(self.current_epoch)
        for name, parameter in self.named_parameters():
            self.begin(generator, name)
            parameter.data.uniform_(-0.1, 0.1, generator=generator)

    def begin(self, generator: torch.Generator, name: str) -> None:
        """Go on with the numbers that follow."""


class ShakesEach(Shakes):
    def begin(self, generator: torch.Generator, name: str) -> None:
        generator.manual_seed(self.current_epoch + len(name) + ord(name[0]))


class Keeps(Layers):
    """The step keeps its losses, from which hooks, a schedule and callbacks choose learning rates."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.losses, self.last = 0.05, list[float](), 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last = loss.item()
        self.losses.append(self.last)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + self.last))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        self.scale(sum(self.losses))
        self.losses.clear()

    def on_after_backward(self) -> None:
        self.scale(self.losses[-1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scale(self.last)

    def scale(self, by: float) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9 + 0.1 / (1 + by)

    def configure_callbacks(self) -> Any:
        return [Listens(), Sees(), Slows()]


class Listens(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.scale(module.losses[-1])


class Sees(L.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1 + 1 / (1 + sum(module.losses))


@dataclass
class Slows(L.Callback):
    """A data class, which has no hash."""

    by: float = 0.9

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        module.optimizers().param_groups[0]["lr"] *= self.by / (1 + module.last)


class Decides(L.Callback):
    """Scales inputs by the metrics of the epoch that has ended, or of the sanity check, on every process."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.tau = 1 / (1 + float(trainer.callback_metrics.get("loss", 9.0)))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.tau *= 1 / (1 + float(trainer.logged_metrics.get("val_loss", 9.0)))


class Scales(Layers):
    tau = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss((batch[0] * self.tau, batch[1]))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_callbacks(self) -> Any:
        return [Decides()]


def as_one(devices: int, make: Make, num_stages: int) -> dict[str, Tensor]:
    return piped(make(), num_stages, devices, {**THREE_EPOCHS, "num_sanity_val_steps": 0}).state_dict()


def callbacks_on_every_process_find_the_metrics_of_an_epoch_and_of_the_sanity_check(devices: int) -> Any:
    return piped(Scales(), devices, devices, THREE_EPOCHS).state_dict()


class Searched(Keeps):
    """A search for a learning rate comes first."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)

    def configure_callbacks(self) -> Any:
        return [LearningRateFinder(num_training_steps=2), *super().configure_callbacks()]


def a_search_for_a_learning_rate_does_not_change_what_hooks_find(devices: int) -> Any:
    return piped(Searched(), 2, devices, TWO_EPOCHS).state_dict()


AS_ONE = ((Annealed, 2), (Annealed, 4), (ClippedEverywhere, 2), (ShakesEach, 2))


@pytest.mark.slow
def test_two_processes_train_as_if_there_were_one_whatever_hooks_change(tmp_path: Path) -> None:
    expected = [as_one(1, make, 1) for make, _ in AS_ONE]
    found = processes.everywhere(2, lambda: [as_one(2, *case) for case in AS_ONE], folder=tmp_path)
    assert_equal(found, [expected] * 2)


class CallsOtherHooks(Layers):
    """Hooks that share code call each other; what they change is read by the first stage."""

    tau = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch[0] * self.tau, batch[1]))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.through(batch[0]).mean()

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.through(batch[0]).mean()

    def on_train_epoch_start(self) -> None:
        self.on_train_epoch_end()

    def on_train_epoch_end(self) -> None:
        self.tau *= 0.5

    def on_validation_epoch_end(self) -> None:
        self.on_train_epoch_end()

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()


def hooks_that_call_each_other_are_followed_once(devices: int) -> Any:
    options = {**TWO_EPOCHS, "num_sanity_val_steps": 0}
    module = piped(CallsOtherHooks(), devices, devices, options, costs="flops")
    module.trainer.test(module, data(), verbose=False)
    assert module.tau == 0.5**7  # of two epochs three each, and of the test
    return module.state_dict()


# -- what submodules keep ----------------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Counts its calls, goes by their number, and keeps numbers and statistics. In the first call it fills a weight and
    makes a buffer of its batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls, self.kept = nn.Linear(8, 8), nn.BatchNorm1d(8), 0, list[float]()
        self.scale, self.is_filled = nn.Parameter(torch.ones(8)), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        self.calls += 1
        self.kept.append(x.detach().square().mean().item())
        if not hasattr(self, "centre"):
            self.register_buffer("centre", x.detach().mean(0))
        if not self.is_filled:
            self.scale.data.copy_(1 + x.detach().abs().mean(0))
            self.is_filled = True
        return (x - self.centre) * self.scale / self.calls**0.5


class Reads(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.of_callback = 1 + module.b.calls


class Watching(Layers):
    """Its hooks read what a layer of the first stage keeps: those of rank 0, those of all processes, and a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Keeping()  # type: ignore[assignment]
        self.of_start = self.of_end = self.of_callback = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.of_start * self.of_end * self.of_callback
        return self.loss(batch) / weight

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.of_start = 1 + self.b.calls

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("kept", sum(self.b.kept))  # type: ignore[arg-type]
        self.of_end = 1 + float(self.b.norm.running_mean.abs().sum())  # type: ignore[union-attr]
        self.b.kept.clear()  # type: ignore[union-attr, operator]

    def configure_callbacks(self) -> Any:
        return [Reads()]

    def on_train_epoch_end(self) -> None:
        self.log("variance", self.b.norm.running_var.mean())  # type: ignore[union-attr]


def hooks_read_what_submodules_of_another_process_keep(devices: int) -> Any:
    options = {} if devices == 1 else {"split_points": ["c"]}
    module = piped(Watching(), devices, devices, TWO_EPOCHS, **options)
    assert "b.centre" in module.state_dict()  # which the layer has registered in its process
    return module.state_dict(), dict(module.trainer.callback_metrics)


class Unwatched(Layers):
    """No hook reads what its second layer keeps, in a sanity check, training, validation and test."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Keeping()  # type: ignore[assignment]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.through(batch[0] + 1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.through(batch[0])


def before_training_and_after_a_run_every_process_has_what_submodules_keep(devices: int) -> Any:
    options = {} if devices == 1 else {"split_points": ["c"]}
    module = piped(Unwatched(), devices, devices, **options)
    calls, kept = module.b.calls, list(module.b.kept)
    module.trainer.test(module, data(), verbose=False)
    module.through(torch.ones(2, 8))  # by a user, on each process
    assert (calls, module.b.calls) == (40, 57)  # of two, four, four and four batches, and one
    return module.state_dict(), kept, module.b.kept


class Normalised(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]
        self.seen = list[Tensor]()


class BeforeValidation(Normalised):
    """A hook before validation, and no other one, reads the statistics."""

    def on_validation_start(self) -> None:
        self.seen += [buffer.clone() for buffer in self.buffers()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.through(batch[0])


class InTraining(Normalised):
    """Its hooks read the statistics of all models and of the reference: that of the epoch's end, and one within it."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.within = within

    def look(self) -> None:
        strategy: Any = self.trainer.strategy
        for shown in (*(strategy.parallel_model(n) for n in range(strategy.num_pipelines)), strategy.reference()):
            with shown as model:
                self.seen += [buffer.clone() for buffer in model.buffers()]

    def on_after_backward(self) -> None:
        if self.within:
            self.seen += [buffer.clone() for buffer in self.buffers()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.within:
            self.look()

    def on_train_epoch_end(self) -> None:
        self.look()


STATISTICS: list[tuple[bool, dict[str, Any]]] = [
    (True, {"num_pipelines": 2}),
    (False, {"num_pipelines": 2, "averaging": Averaging(rolling=True)}),
    (False, {"weight_policy": "2bw"}),
]


def statistics(devices: int) -> list[list[Tensor]]:
    made = [
        piped(make, 2, devices, split_points=["c"], costs="flops", verify=False, **given)
        for within, given in STATISTICS
        for make in (InTraining(within), BeforeValidation())
    ]
    return [module.seen for module in made]


def test_hooks_read_the_statistics_of_all_models_whatever_the_order_of_iterations(in_two: Any) -> None:
    expected = statistics(1)
    assert all(expected)
    assert_equal(in_two[0]["statistics"], expected)


class Scaled(nn.Module):
    """A layer whose code behind its linear part is on the stage of what sets its gain."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.gain


class Steers(nn.Module):
    def __init__(self, other: Scaled) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.other = weakref.ref(other)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.other().gain = 1 / (1 + y.detach().abs().mean().item())  # type: ignore[union-attr]
        return y


class Steered(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Linear(8, 16), nn.Linear(16, 8)
        self.b = Scaled()  # type: ignore[assignment]
        self.c = Steers(self.b)  # type: ignore[arg-type, assignment]
        self.seen: list[float] = []

    def through(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.b.gain)  # type: ignore[arg-type]


def steered(devices: int) -> tuple[dict[str, Tensor], list[float], list[Any]]:
    module = piped(Steered(), devices, devices, costs="flops")
    return module.state_dict(), module.seen, module.trainer.strategy.plan.cuts


def test_what_a_submodule_sets_of_one_of_another_stage_is_that_of_its_own_process(in_two: Any) -> None:
    expected, seen, _ = steered(1)
    for state, _, cuts in (rank["steered"] for rank in in_two):
        assert cuts == (2,)  # behind 'b.linear'
        assert_equal(state, expected)
    assert in_two[0]["steered"][1] == seen


class Stops(Layers):
    """The step, or a hook of rank 0, asks the trainer to stop."""

    def __init__(self, in_step: bool) -> None:
        super().__init__()
        self.in_step = in_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.in_step and batch_idx == 1:
            self.trainer.should_stop = True
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.in_step and batch_idx == 1:
            self.trainer.should_stop = True


class GoesOn(Layers):
    """A hook of rank 0 asks for one more epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.fit_loop.max_epochs += 1


def stopped() -> list[int]:
    modules = [Stops(True), Stops(False), GoesOn()]
    found = [piped(module, 2, 2, costs="flops").trainer.global_step for module in modules]
    rolling = {"num_pipelines": 2, "averaging": Averaging(rolling=True, split_batches=True), "costs": "flops"}
    return [*found, piped(Stops(True), 2, 2, **rolling).trainer.global_step]


def test_a_wish_of_the_step_or_of_a_hook_to_stop_or_to_go_on_is_that_of_all_processes(in_two: Any) -> None:
    longer = piped(GoesOn(), 1, 1).trainer.global_step
    assert longer > piped(Layers(), 1, 1).trainer.global_step
    assert [rank["stopped"] for rank in in_two] == [[2, 2, longer, 2]] * 2


class Ends(Layers):
    """Its hook at the end saves, as people write it, evaluates, and changes weights, also on rank 0 alone."""

    def on_train_end(self) -> None:
        self.saved = pickle.loads(pickle.dumps(self.state_dict()))
        with torch.no_grad():
            self.output = self.through(torch.ones(1, 8))
            for layer in (self.b, self.d):
                layer.weight.mul_(0.5)
            if self.global_rank == 0:
                for layer in (self.a, self.c):
                    layer.weight.data.add_(1.0)


def at_the_end_hooks_find_all_weights_on_every_process_and_may_change_them(devices: int) -> Any:
    module = piped(Ends(), devices, devices, costs="flops")
    return module.saved, module.output, module.state_dict()


class EndsOfTwo(Layers):
    """Its hook at the end saves each of two models and the reference, and changes the reference on rank 0 alone."""

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        shown = (strategy.parallel_model(0), strategy.parallel_model(1), strategy.reference())
        self.saved = []
        for context in shown:
            with context as model:
                self.saved.append(pickle.loads(pickle.dumps(model.state_dict())))
        if self.global_rank == 0:
            with strategy.reference(), torch.no_grad():
                for layer in (self.a, self.d):
                    layer.weight.mul_(0.5)


def at_the_end_hooks_find_all_weights_of_all_models_on_every_process(devices: int) -> Any:
    module = piped(EndsOfTwo(), 2, devices, num_pipelines=2)
    assert not torch.equal(module.saved[0]["a.weight"], module.saved[1]["a.weight"])
    return module.saved, module.state_dict()


class Centring(nn.Module):
    """Fills a buffer that is registered without a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("centre", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.centre = mean if self.centre is None else 0.9 * self.centre + 0.1 * mean
        return self.linear(x - self.centre)


class Centred(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.b = Centring()  # type: ignore[assignment]


class Quantizes(Layers):
    """Trains for quantisation of its first weight: operations of the step give buffers the shape of what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = get_default_qat_qconfig("fbgemm").weight()

    def through(self, x: Tensor) -> Tensor:
        return super().through(nn.functional.linear(self.a(x), self.quantize.forward(self.a.weight)))


def every_process_has_buffers_to_which_their_stage_gives_a_tensor_or_a_shape(devices: int) -> Any:
    centred = piped(Centred(), 2, devices, split_points=["c"]).state_dict()
    quantized = piped(Quantizes(), 2, devices, split_points=["b"]).state_dict()
    assert "b.centre" in centred and quantized["quantize.activation_post_process.min_val"].shape == (8,)
    return centred, quantized


FINDS = (
    callbacks_on_every_process_find_the_metrics_of_an_epoch_and_of_the_sanity_check,
    hooks_that_call_each_other_are_followed_once,
    a_search_for_a_learning_rate_does_not_change_what_hooks_find,
    hooks_read_what_submodules_of_another_process_keep,
    before_training_and_after_a_run_every_process_has_what_submodules_keep,
    at_the_end_hooks_find_all_weights_on_every_process_and_may_change_them,
    at_the_end_hooks_find_all_weights_of_all_models_on_every_process,
    every_process_has_buffers_to_which_their_stage_gives_a_tensor_or_a_shape,
)


def all_of_it() -> dict[str, Any]:
    found = {"between": between(2, 2), "stopped": stopped(), "statistics": statistics(2), "steered": steered(2)}
    return {**found, **{find.__name__: find(2) for find in FINDS}}


in_two = processes.shared(2, lambda rank: all_of_it())


@pytest.mark.parametrize("find", FINDS, ids=lambda find: find.__name__)
def test_two_processes_find_what_one_does(find: Callable[[int], Any], in_two: Any) -> None:
    assert_equal([rank[find.__name__] for rank in in_two], [find(1)] * 2)


class Prunes(Layers):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            prune.l1_unstructured(self.a, "weight", amount=0.5)


def test_a_hook_may_prune_a_submodule_in_one_process() -> None:
    state = piped(Prunes(), trainer_options=TWO_EPOCHS).state_dict()
    assert {"a.weight_orig", "a.weight_mask"} <= state.keys() and "a.weight" not in state
    assert int(state["a.weight_mask"].sum()) == state["a.weight_mask"].numel() // 2


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


class Calls(Step):
    """Of a matrix product with a weight without numbers torch would return whatever is in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def on_train_epoch_end(self) -> None:
        self.a(torch.ones(1, 8))


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


class WatchesEnds(L.Callback):
    """Looks at the gradients that the step has left."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.current_epoch:
            module.seen = sum(p.grad.norm().item() for p in module.others())


class Watched(Step):
    def __init__(self, watches: type[L.Callback] = Watches) -> None:
        super().__init__()
        self.watches = watches

    def configure_callbacks(self) -> Any:
        return [self.watches()]


WATCHED_AT_ENDS = partial(Watched, WatchesEnds)


class WatchedAtAFrozenEnd(Watched):
    """The process whose hooks run trains nothing."""

    def __init__(self) -> None:
        super().__init__(WatchesEnds)
        self.c.requires_grad_(False)
        self.d.requires_grad_(False)


class NormOfAll(Step):
    """Takes the norms of all weights, and leaves out what has no numbers only then."""

    def on_train_epoch_end(self) -> None:
        norms = torch._foreach_norm(list(self.parameters()))
        self.seen = sum(norm.item() for norm in norms if not norm.is_meta)


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


class TooLarge(Layers):
    """A hook makes what cannot be sent to the stage that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.through(batch[0] + self.table[:8]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.table = torch.zeros(1_000_000)


class Clipped(ClippedEverywhere):
    """The hook is one of rank 0."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Nothing yet."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clip()


class ClippedByAssigning(Clipped):
    """The hook gives weights other memory."""

    def clip(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.1, 0.1)


class Replaces(Layers):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            nn.utils.parametrizations.weight_norm(self.a)


class Changes(Layers):
    """A hook of rank 0 changes what another process has otherwise than by a value."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def on_train_epoch_end(self) -> None:
        self.change(self)


class ReadsMomentum(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + len(self.optimizers().state))  # type: ignore[union-attr]


HERE, RANK_0 = r"test_hooks_of_processes\.py:\d+", r"on_train_epoch_end\(\) runs on rank 0 only and changes"
USED = f"{RANK_0} what other processes use"
REFUSED: dict[Make, str] = {
    ClipsWeights: "after the first micro-batch",
    ReadsMomentum: "uses the state of an optimizer, of which each process has only the part",
    Follows: rf"add_\(\) at {HERE} in on_train_batch_start in a hook",
    FollowsByForeach: rf"_foreach_add_\(\) at {HERE} in on_train_batch_start in a hook",
    Calls: rf"mm\(\) at {HERE} in on_train_epoch_end in a hook computes with",
    SkipsBadGradients: rf"SkipsBadGradients\.on_after_backward at {HERE} in .* needs the numbers of",
    ClipsByItsOwnNorm: r"ClipsByItsOwnNorm\.configure_gradient_clipping at .* needs the numbers of",
    Sharpness: rf"Sharpness\.optimizer_step at {HERE} in optimizer_step needs the numbers of",
    Watched: rf"Watches\.on_before_optimizer_step at {HERE} in .* needs the numbers of",
    WatchedAtAFrozenEnd: rf"WatchesEnds\.on_train_batch_end at {HERE} in .* needs the numbers of",
    NormOfAll: rf"_foreach_norm\(\) at {HERE} in on_train_epoch_end in a hook computes with",
    WATCHED_AT_ENDS: rf"WatchesEnds\.on_train_batch_end at {HERE} in .* needs the numbers of",
    CountsInside: rf"a metric is called at {HERE} in forward inside a submodule that runs on another stage than",
    TooLarge: f"{RANK_0} 'table'",
    Clipped: r"on_train_batch_end\(\) runs on rank 0 only and changes 'a\.bias', 'a\.weight'",
    ClippedByAssigning: r"on_train_batch_end\(\) runs on rank 0 only and changes 'a\.bias', 'a\.weight'",
    Shakes: rf"uniform_\(\) at {HERE}",
    Replaces: r"the module's parameters 'a\.weight', 'a\.parametrizations\.weight\.original0'",
}
CHANGES: dict[Callable[[Any], Any], str] = {
    lambda module: setattr(module, "a", nn.Linear(8, 8)): "'a'",
    lambda module: module.a.weight.register_hook(lambda gradient: gradient * 0.1): r"'a\.weight'",
    lambda module: setattr(module.a, "forward", lambda x: x): "'a'",
    lambda module: setattr(module, "forward", lambda x: x): "the LightningModule",
    lambda module: module.optimizers().optimizer.state.clear(): "'optimizer 0'",  # of which each process has a part
}
REFUSED |= {partial(Changes, change): rf"{USED}.*{name} \(replaced, or by" for change, name in CHANGES.items()}
FAST = (
    ClipsWeights,
    ClippedByAssigning,
    Follows,
    Calls,
    Sharpness,
    WATCHED_AT_ENDS,
    CountsInside,
    Replaces,
    ReadsMomentum,
)
OTHERS = [make for make in REFUSED if make not in FAST]


@pytest.mark.parametrize("makes", [FAST, *(pytest.param(OTHERS[i::2], marks=pytest.mark.slow) for i in range(2))])
def test_who_needs_or_changes_what_another_process_has_is_told(makes: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer_options": THREE_EPOCHS, "timeout": 20}
    ahead = {**options, "num_stages": 4}  # the first stage is behind the first micro-batch when the hook runs
    cases = [(make, ahead if make is ClipsWeights else options) for make in makes]
    for make, errors in zip(makes, errors_of_two_processes(cases, tmp_path), strict=True):
        assert all(re.search(REFUSED[make], error) for error in errors), errors
