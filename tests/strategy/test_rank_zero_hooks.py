"""What hooks of rank 0 change reaches the stages of other processes, as if there were one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy
from tests import processes
from tests.strategy.test_attributes_of_steps import Layers, data
from tests.trainers import trainer

OUTSIDE = {"factor": 1.0}


class Annealed(Layers):
    """Whatever a hook may change that the first stage reads, or its optimizer."""

    power = 1.0

    def __init__(self) -> None:
        super().__init__()
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


class TooLarge(Layers):
    """A hook makes what cannot be sent to the stage that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.through(batch[0] + self.table[:8]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.table = torch.zeros(1_000_000)


def fitted(rank: int, make: Any, devices: int, num_stages: int = 2) -> dict[str, Tensor]:
    OUTSIDE["factor"], Annealed.power = 1.0, 1.0
    module = make()
    strategy = AvgPipeStrategy(num_stages=num_stages, num_microbatches=4, costs_cache=None)
    trainer(strategy=strategy, devices=devices, max_epochs=3).fit(module, data())
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_what_a_hook_of_rank_0_changes_reaches_every_process(num_stages: int, tmp_path: Path) -> None:
    expected = fitted(0, Annealed, 1, 1)
    for state in processes.results(processes.run(2, fitted, Annealed, 2, num_stages, folder=tmp_path)):
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.slow
def test_what_cannot_be_sent_to_the_stage_that_reads_it_is_refused_by_name(tmp_path: Path) -> None:
    outcomes = processes.run(2, fitted, TooLarge, 2, folder=tmp_path)
    assert all(outcome.error for outcome in outcomes)
    assert "on_train_epoch_end() runs on rank 0 only and changes 'table'" in (outcomes[0].error or "")


class Clipped(Layers):
    """Weights are clipped after each step, as in a WGAN, in a hook of which rank 0 runs one, and all run the other."""

    everywhere = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0]) - batch[1]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.everywhere:
            self.clip()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.everywhere:
            self.clip()

    def clip(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class ClippedEverywhere(Clipped):
    everywhere = True


@pytest.mark.slow
def test_weights_of_other_processes_that_a_hook_of_rank_0_changes_are_an_error(tmp_path: Path) -> None:
    outcomes = processes.run(2, fitted, Clipped, 2, folder=tmp_path)
    assert all(outcome.error for outcome in outcomes)
    assert "on_train_batch_end() runs on rank 0 only and changes 'a.bias', 'a.weight'" in (outcomes[0].error or "")


@pytest.mark.slow
def test_weights_that_a_hook_of_every_process_changes_are_right(tmp_path: Path) -> None:
    expected = fitted(0, ClippedEverywhere, 1, 1)
    for state in processes.results(processes.run(2, fitted, ClippedEverywhere, 2, folder=tmp_path)):
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []


class Rebuilds(Layers):
    """A hook of rank 0 changes the first layer, which another process has, otherwise than by a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0]) - batch[1]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.rebuild()

    def rebuild(self) -> None:
        self.a = nn.Linear(8, 8)


class Hooks(Rebuilds):
    def rebuild(self) -> None:
        self.a.weight.register_hook(lambda gradient: gradient * 0.1)


class Bypasses(Rebuilds):
    def rebuild(self) -> None:
        self.a.forward = lambda x: x  # type: ignore[method-assign]


class Reroutes(Rebuilds):
    """A hook replaces a method of the whole module."""

    def rebuild(self) -> None:
        self.forward = lambda x: x  # type: ignore[method-assign]


class Forgets(Rebuilds):
    """A hook clears the optimizer's states, of which each process has a part."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def rebuild(self) -> None:
        self.optimizers().optimizer.state.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "what"), [(Rebuilds, "a"), (Hooks, "a.weight"), (Bypasses, "a"), (Reroutes, ""), (Forgets, "optimizer 0")]
)
def test_what_another_process_uses_and_a_hook_of_rank_0_rebuilds_is_an_error(
    make: Any, what: str, tmp_path: Path
) -> None:
    outcomes = processes.run(2, fitted, make, 2, folder=tmp_path)
    assert all(outcome.error for outcome in outcomes)
    error = outcomes[0].error or ""
    assert "on_train_epoch_end() runs on rank 0 only and changes what other processes use" in error
    assert f"{repr(what) if what else 'the LightningModule'} (replaced, or by" in error


class Shakes(Clipped):
    """Each epoch begins with noise on all weights, of one generator or of one for each."""

    each = False

    def on_train_epoch_start(self) -> None:
        generator = torch.Generator().manual_seed(self.current_epoch)
        for name, parameter in self.named_parameters():
            if self.each:
                generator.manual_seed(self.current_epoch + len(name) + ord(name[0]))
            parameter.data.uniform_(-0.1, 0.1, generator=generator)

    def clip(self) -> None:
        """Change nothing."""


class ShakesEach(Shakes):
    each = True


@pytest.mark.slow
def test_random_numbers_of_weights_on_other_processes_do_not_go_to_the_next_ones(tmp_path: Path) -> None:
    outcomes = processes.run(2, fitted, Shakes, 2, folder=tmp_path)
    assert all(outcome.error for outcome in outcomes)
    assert "uniform_() at test_rank_zero_hooks.py" in (outcomes[0].error or "")
    expected = fitted(0, ShakesEach, 1, 1)
    for state in processes.results(processes.run(2, fitted, ShakesEach, 2, folder=tmp_path)):
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []


class CallsOtherHooks(Layers):
    """Hooks that share code call each other; what they change is read by the first stage."""

    tau = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.through(batch[0] * self.tau) - batch[1]).square().mean()

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


def annealed(rank: int, devices: int, num_stages: int) -> tuple[float, dict[str, Tensor]]:
    module = CallsOtherHooks()
    strategy = AvgPipeStrategy(num_stages=num_stages, num_microbatches=4, costs="flops", costs_cache=None)
    runner = trainer(strategy=strategy, devices=devices, num_sanity_val_steps=0)
    runner.fit(module, data(), data())
    runner.test(module, data(), verbose=False)
    return module.tau, module.state_dict()


def test_hooks_that_call_each_other_are_followed_once(tmp_path: Path) -> None:
    tau, expected = annealed(0, 1, 1)
    assert tau == 0.5**7  # of two epochs three each, and of the test
    for found, state in processes.results(processes.run(2, annealed, 2, 2, folder=tmp_path)):
        assert found == tau
        assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []
