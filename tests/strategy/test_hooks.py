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
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from torch import Tensor

from lightning_avgpipe.utils import tree
from tests import processes
from tests.models import MLP, loader
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
    for one, piped in zip(expected, found, strict=True):
        assert counts(piped.calls) == counts(one.calls)
        assert in_order(piped.calls) == in_order(one.calls)


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
