"""Every hook is called as on one device: as often, in the same order of batches, with whole batches and results."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from torch import Tensor, nn

import lightning_avgpipe as ap
from lightning_avgpipe.strategy.checkpoint_files import load_shards
from lightning_avgpipe.utils import tree
from tests import processes
from tests.comparing import assert_equal
from tests.models import MLP, loader
from tests.strategy.steps import Layers, data, errors_of_two_processes, piped, states_of_two_processes
from tests.trainers import pipeline, trainer

# Of the hooks, not the steps, which run once per micro-batch and stage.
MODULE_HOOKS = [
    *(
        name
        for kind in (ModelHooks, DataHooks)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and not name.endswith("_dataloader")
    ),
    *("configure_optimizers", "configure_callbacks", "configure_gradient_clipping", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step", "on_save_checkpoint", "on_load_checkpoint"),
]
CALLBACK_HOOKS = sorted(
    name
    for name, _ in inspect.getmembers(L.Callback, inspect.isfunction)
    if name.startswith("on_") or name in ("setup", "teardown")
)


def seen(value: Any) -> Any:
    """What a hook got: sizes of tensors, numbers and texts; of other objects their types."""
    leaves, _ = tree.flatten(value)
    return [
        tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, (int, str)) else type(leaf).__name__
        for leaf in leaves
        if not isinstance(leaf, (L.LightningModule, L.Trainer, dict)) and not callable(leaf)
    ]


def _plain(argument: Any) -> Any:
    """A checkpoint without what the strategy adds to it."""
    if not isinstance(argument, dict):
        return argument
    return {key: value for key, value in argument.items() if key != "AvgPipeStrategy"}


class Recorder:
    """Notes the calls of hooks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.losses: list[float] = []

    def watch(self, owner: Any, hooks: list[str]) -> None:
        for name in hooks:
            setattr(owner, name, self.noted(name, getattr(owner, name)))

    def noted(self, name: str, hook: Any) -> Any:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, repr(seen([[_plain(arg) for arg in args], kwargs]))))
            if name == "on_before_backward":
                self.losses.append(args[-1].item())
            return hook(*args, **kwargs)

        return call


class Watched(MLP):
    """Validates, tests and predicts with results, and has a scheduler."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return {"loss": loss, "target": batch[1]}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def record(
    runner: L.Trainer, module: L.LightningModule, callback: L.Callback, folder: Path
) -> tuple[Recorder, Recorder]:
    of_module, of_callback = Recorder(), Recorder()
    of_module.watch(module, MODULE_HOOKS)
    of_callback.watch(callback, CALLBACK_HOOKS)
    train, val = loader(MLP, 20, 6), loader(MLP, 5, 4, seed=1)
    runner.fit(module, train, val)
    runner.save_checkpoint(folder / "hooks.ckpt")
    runner.validate(module, val, verbose=False)
    runner.test(module, [val, val], verbose=False)
    runner.predict(module, val)
    runner.fit_loop.max_epochs = 3
    runner.fit(module, train, val, ckpt_path=folder / "hooks.ckpt", weights_only=False)
    return of_module, of_callback


def options(callback: L.Callback) -> dict[str, Any]:
    return {"callbacks": [callback], "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def counts(calls: list[tuple[str, str]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for name, arguments in calls:
        found.setdefault(name, Counter())[arguments] += 1
    return found


def in_order(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without the hooks whose place within a batch is another: gradients are cleared before the first forward."""
    return [call for call in calls if call[0] not in ("on_before_zero_grad", "optimizer_zero_grad")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Recorder]:
    torch.manual_seed(3)
    callback = L.Callback()
    return record(trainer(**options(callback)), Watched(), callback, tmp_path_factory.mktemp("hooks"))


def test_hooks_are_called_as_on_one_device(expected: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    callback = L.Callback()
    found = record(pipeline(2, **options(callback)), Watched(), callback, tmp_path)
    for one, other in zip(expected, found, strict=True):
        assert counts(other.calls) == counts(one.calls)
        assert in_order(other.calls) == in_order(one.calls)


def test_on_before_backward_gets_a_loss_of_the_size_of_the_batch_s(expected: tuple[Recorder, Recorder]) -> None:
    """The first micro-batch's, since backwards begin before the other losses are known; with one, the batch's."""
    torch.manual_seed(3)
    callback = L.Callback()
    runner = pipeline(2, strategy={"num_microbatches": 1}, **options(callback))
    losses = Recorder()
    model = Watched()
    losses.watch(model, ["on_before_backward"])
    runner.fit(model, loader(MLP, 20, 6))
    assert losses.losses == pytest.approx(expected[0].losses[: len(losses.losses)], rel=1e-6)


def record_rank(folder: Path) -> list[list[tuple[str, str]]]:
    torch.manual_seed(3)
    callback = L.Callback()
    recorders = record(pipeline(2, 2, **options(callback)), Watched(), callback, folder)
    return [recorder.calls for recorder in recorders]


def names(calls: list[tuple[str, str]]) -> Counter[str]:
    return Counter(name for name, _ in calls)


# What needs a batch that is read, a loss, or results, happens where they are.
ELSEWHERE = {
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_before_backward"),
    *(f"on_{stage}_{when}_end" for stage in ("train", "validation", "test", "predict") for when in ("batch", "epoch")),
}


def test_hooks_of_two_processes(expected: tuple[Recorder, Recorder], tmp_path: Path) -> None:
    """The rank of the loss calls all of them; the other those of callbacks, and of the module what it can."""
    of_module, of_callback = expected
    last, first = processes.everywhere(2, record_rank, tmp_path, folder=tmp_path)
    for expected_calls, calls in zip((of_module, of_callback), last, strict=True):
        assert counts(calls) == counts(expected_calls.calls)
        assert in_order(calls) == in_order(expected_calls.calls)
    module_hooks = names([call for call in of_module.calls if call[0] not in ELSEWHERE])
    assert names(first[0]) == module_hooks
    assert names(first[1]) == names([call for call in of_callback.calls if call[0] != "on_before_backward"])


# -- hooks on rank 0 may save checkpoints and meet other processes, and know their rank, also within a step ----------


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
