"""Hooks on rank 0: they may save checkpoints and meet other processes, and know their rank, also within a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

import lightning_avgpipe as ap
from lightning_avgpipe.strategy.checkpoint_files import load_shards
from tests import processes
from tests.comparing import assert_equal
from tests.strategy.steps import Layers, data, errors_of_two_processes, piped, states_of_two_processes
from tests.trainers import trainer


class Notes(torch.optim.SGD):
    """Notes something of each parameter, and looks at all of its notes, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["largest"] = parameter.grad.max()
        return loss

    def looks(self) -> list[bool]:
        return ["largest" in self.state[parameter] for parameter in self.param_groups[0]["params"]]


class Saves(Layers):
    """Meets other processes and saves a checkpoint when it has validated."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def configure_optimizers(self) -> Any:
        return Notes(self.parameters(), 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        strategy.barrier()
        assert strategy.broadcast("what rank 0 says") == "what rank 0 says"
        assert strategy.reduce_boolean_decision(True)
        self.optimizers().looks()  # type: ignore[union-attr]
        if not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(self.path)


class SavesHalves(Saves):
    """Its hook needs the numbers of what it saves, and counts for the step, which all stages run."""

    saved, validation_step = 0, Saves.validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch[0] / (1 + self.saved), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["halves"] = {name: value.cpu().half() for name, value in checkpoint["state_dict"].items()}
        self.saved += 1

    def configure_callbacks(self) -> Any:
        return [LambdaCallback(on_train_start=self.saves, on_train_batch_end=self.saves)]

    def saves(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{self.path}-{trainer.global_step}")


class Averages(L.Callback):
    """Averages weights by hand, and puts them into checkpoints."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            self.average.setdefault(name, parameter.detach().clone()).lerp_(parameter, 0.1)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average


class SavesAverages(Saves):
    validation_step = Saves.validation_step

    def configure_callbacks(self) -> Any:
        return [Averages()]


class SavesPretrained(Saves):
    validation_step = Saves.validation_step

    def on_validation_epoch_end(self) -> None:
        ap.save_pretrained(nn.Linear(1, 1), self.path, self.trainer)


def test_they_save_what_one_device_saves(tmp_path: Path) -> None:
    expected, found = str(tmp_path / "expected.ckpt"), str(tmp_path / "found.ckpt")
    trainer(max_epochs=1).fit(Saves(expected), data(), data())
    states_of_two_processes(lambda: Saves(found), tmp_path, num_microbatches=1)
    one, two = (torch.load(path, weights_only=False) for path in (expected, found))
    for key in ("state_dict", "optimizer_states", "global_step"):
        assert_equal(one[key], two[key])


def test_a_hook_of_the_module_finds_all_weights_in_a_checkpoint_and_changes_all_stages(
    tmp_path: Path,
) -> None:
    expected, found = str(tmp_path / "expected"), str(tmp_path / "found")
    trainer(max_epochs=1).fit(SavesHalves(expected), data(), data())
    states_of_two_processes(lambda: SavesHalves(found), tmp_path, num_microbatches=1)
    for end in ("", "-0", "-2", "-4"):
        one, two = (torch.load(path + end, weights_only=False) for path in (expected, found))
        for key in ("state_dict", "halves", "optimizer_states"):
            assert_equal(one[key], two[key])


def test_what_lacks_numbers_or_processes_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    cases = [(lambda make=make: make(path), {}) for make in (SavesAverages, SavesPretrained)]
    averages, pretrained = errors_of_two_processes(cases, tmp_path)
    assert "puts ['average']['a.weight'] into the checkpoint" in averages[0]
    assert "this hook runs on rank 0 only" in pretrained[0]


def test_within_one_process_nothing_is_absent(tmp_path: Path) -> None:
    piped(SavesAverages(str(tmp_path / "saved.ckpt")), num_microbatches=1)
    assert len(torch.load(tmp_path / "saved.ckpt", weights_only=False)["average"]) == 8


class AsksForRanks(Layers):
    """Notes its rank in steps, and in hooks in the midst of them."""

    def __init__(self) -> None:
        super().__init__()
        self.in_steps: list[int] = []
        self.in_hooks: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.in_steps.append(self.global_rank)
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.in_hooks.append(self.global_rank)


def _ranks() -> tuple[set[int], set[int]]:
    module = piped(AsksForRanks(), devices=2)
    return set(module.in_steps), set(module.in_hooks)


def test_steps_find_one_process_and_hooks_within_them_their_own_rank(tmp_path: Path) -> None:
    found = processes.everywhere(2, _ranks, folder=tmp_path)
    assert found == [({0}, {rank}) for rank in (0, 1)]


class Gathers(Layers):
    """Sums over all processes if there are several, as one writes it for ddp, in a hook of rank 0, and saves there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.summed = path, list[float]()

    def on_train_epoch_end(self) -> None:
        total = torch.ones(())
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        self.summed.append(float(total))
        self.trainer.save_checkpoint(self.path)


def _gathered(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    devices, path = processes.num_processes(), folder / "saved.ckpt"
    module = piped(Gathers(path), devices, devices, save_distributed_checkpoint=True)
    return module.summed, load_shards(path, False, None)["state_dict"]


def test_a_hook_of_rank_0_finds_one_process_and_waits_for_no_other(tmp_path: Path) -> None:
    ((summed, saved), (_, again)), one = processes.two_and_one(_gathered, tmp_path)
    assert summed == one[0] == [1.0]
    assert_equal([saved, again], [one[1]] * 2)
