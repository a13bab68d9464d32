"""A module that a Trainer trains and validates in stages, against one process that runs its micro-batches by hand."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_avgpipe.engine.microbatch import MicroBatch, split, split_with
from tests import processes
from tests.comparing import assert_close, assert_equal, state
from tests.trainers import pipeline

NUM_MICROBATCHES = 2
Make = Callable[[], tuple[Any, Sequence[Any]]]  # makes a module and its batches, each time the same


class Found(NamedTuple):
    """Weights and buffers after an epoch, the means that validation logs, and whether stages had copies of weights."""

    state: dict[str, Tensor]
    validated: dict[str, float]
    is_copied: bool = False


def _sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)


def validates(module: Any) -> bool:
    return is_overridden("validation_step", module)


def by_hand(make: Make) -> Found:
    """The micro-batches in order, each loss weighted by its share of the batch, and a step for each batch."""
    module, batches = make()
    optimizer, sizes = _sgd(module), list[int]()
    logged: dict[str, list[float]] = defaultdict(list)
    module.log = lambda name, value, **_: logged[name].append(float(value)) if name.startswith("val") else None

    def parts(batch: Any) -> list[MicroBatch]:
        splitter, batch = getattr(module, "split_batch", None), copy.deepcopy(batch)
        return split(batch, NUM_MICROBATCHES) if splitter is None else split_with(splitter, batch, NUM_MICROBATCHES)

    for batch in batches:
        optimizer.zero_grad()
        for part in parts(batch):
            result = module.training_step(part.data, 0)
            ((result["loss"] if isinstance(result, dict) else result) * part.weight).backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        for part in (part for batch in batches if validates(module) for part in parts(batch)):
            module.validation_step(part.data, 0)
            sizes.append(part.size)
    validated = {
        name: sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        for name, values in logged.items()
    }
    return Found(state(module), validated)


def in_stages(make: Make, num_stages: int, devices: int = 1, **strategy: Any) -> Found:
    """The same with a Trainer."""
    module, batches = make()
    module.configure_optimizers = lambda: _sgd(module)
    options = {"num_microbatches": NUM_MICROBATCHES, **strategy}
    runner = pipeline(num_stages, devices, options, max_epochs=1, num_sanity_val_steps=0)
    data: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    runner.fit(module, data, data if validates(module) else None)
    validated = {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("val")}
    return Found(state(module), validated, bool(runner.strategy.plan.copied))


def assert_same(expected: Found, found: Found) -> None:
    """Bit for bit; with copies of weights, whose gradients are summed in another order, to rounding."""
    (assert_close if found.is_copied else assert_equal)(found.state, expected.state)
    assert_close(found.validated, expected.validated)


def check(make: Make, num_stages: int, **strategy: Any) -> None:
    """Stages in one process train and validate as one process does by hand."""
    assert_same(by_hand(make), in_stages(make, num_stages, **strategy))


def check_in_two_processes(makes: Mapping[str, Make], num_stages: int, folder: Path, **strategy: Any) -> None:
    """Stages in two processes do, all modules one after the other."""

    def all_in_stages() -> dict[str, Found]:
        return {name: in_stages(make, num_stages, 2, **strategy) for name, make in makes.items()}

    ranks = processes.everywhere(2, all_in_stages, folder=folder)
    for name, make in makes.items():
        expected = by_hand(make)
        for rank in ranks:
            assert_same(expected, rank[name])
