"""Trainers without bars and banners, and the same training on one device and in stages."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.planning import Plan
from tests.comparing import assert_same_parameters
from tests.driver import by_hand
from tests.models import Regression, loader

MICROBATCHES = 4  # a power of two: dividing by it is exact, so both trainings agree bit for bit
BATCH = 8


def trainer(**options: Any) -> L.Trainer:
    """A quiet trainer on the CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    return L.Trainer(**{**defaults, **options})


def pipeline(
    num_stages: int = 2, devices: int = 1, strategy: dict[str, Any] | None = None, **options: Any
) -> L.Trainer:
    """The same with stages, whose plan does not depend on the machine."""
    strategy = {"costs": "flops", "num_stages": num_stages, **(strategy or {})}
    return trainer(devices=devices, strategy=AvgPipeStrategy(**strategy), **options)


class SavesAtStart(L.Callback):
    """Saves before the first batch, when it is not known yet which process needs which weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class Reconfigures(L.Callback):
    """Asks for other settings after some batches of an epoch; notes how many models there were."""

    def __init__(self, settings: dict[int, dict[str, Any]]) -> None:
        self.settings = settings
        self.models: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.models.append(trainer.strategy.num_models)
        if batch_idx in self.settings:
            trainer.strategy.reconfigure(**self.settings[batch_idx])


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs, in a process that pytest does not see."""
    messages: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("lightning_avgpipe")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def single(accumulate: int = 1, **options: Any) -> L.Trainer:
    """One device that accumulates micro-batches."""
    return trainer(accumulate_grad_batches=accumulate * MICROBATCHES, **options)


def staged(num_stages: int = 2, accumulate: int = 1, **options: Any) -> L.Trainer:
    """The stages that compute the same, all in this process."""
    strategy = {"num_microbatches": MICROBATCHES, **options.pop("strategy", {})}
    return pipeline(num_stages, strategy=strategy, accumulate_grad_batches=accumulate, **options)


def twins(make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """Two equal modules."""
    torch.manual_seed(3)
    one = make(**options)
    return one, copy.deepcopy(one)


def loaders(model: type[Regression], samples: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The same samples, in micro-batches for one device and in batches for the stages."""
    return loader(model, samples, BATCH // MICROBATCHES), loader(model, samples, BATCH)


def both(
    make: Callable[..., Any],
    data: Any,
    validation: Any = None,
    num_stages: int = 2,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[L.Trainer, L.Trainer]:
    """Train a module on one device, and its twin in stages: the weights must be the same.

    Args:
        make: makes the module.
        data: batches for both, when the weights are the same to rounding; or those of :func:`loaders`, when they are
            the same bit for bit.
        validation: batches for both.
        num_stages: of the pipeline.
        strategy: its options.
        options: of both trainers, each of which gets a copy; of :func:`single` and :func:`staged` if there are
            micro-batches.

    Returns:
        Both trainers after training, which have the modules.
    """
    exact = isinstance(data, tuple)
    plain, stages = (single, staged) if exact else (trainer, pipeline)
    runners = plain(**copy.deepcopy(options)), stages(num_stages, strategy=strategy or {}, **copy.deepcopy(options))
    for runner, module, batches in zip(runners, twins(make), data if exact else (data, data), strict=True):
        runner.fit(module, batches, validation)
    assert_same_parameters(*(runner.lightning_module for runner in runners), exact=exact)
    return runners


def assert_defaults_equal_accumulation(module: L.LightningModule, batch: Any, num_stages: int, **strategy: Any) -> Plan:
    """Train on a batch twice, with options at their defaults: the weights must be those of one process, bit for bit.

    Those of copied parameters, whose gradients are summed in another order, only to rounding: all then, since the
    second step depends on them.

    Returns:
        The plan that was made.
    """
    plain, before = copy.deepcopy(module), copy.deepcopy(module)
    plain.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    stages = AvgPipeStrategy(num_stages=num_stages, **strategy)
    data: Any = [copy.deepcopy(batch), copy.deepcopy(batch)]
    trainer(strategy=stages, max_epochs=1).fit(module, DataLoader(data, batch_size=None))
    plan = stages.plan
    assert plan is not None and plan.forecast is not None and plan.measured
    by_hand(plain, [batch, batch], plan.forecast.num_microbatches)
    assert any(not torch.equal(p, q) for p, q in zip(plain.parameters(), before.parameters(), strict=True))
    assert_same_parameters(plain, module, exact=not plan.copied)
    return plan
