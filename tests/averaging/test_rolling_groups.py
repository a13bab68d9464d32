"""Groups of processes whose pipelines roll: they meet one reference an iteration later, and equal a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_avgpipe import Averaging
from lightning_avgpipe.engine.executor import Lane
from tests import processes
from tests.averaging.models import Batches, Models, Net, Unsized
from tests.comparing import assert_equal, state
from tests.driver import accumulate
from tests.models import loader
from tests.strategy.test_rolling import Interrupts, Scaled, end_of_turn, newest_first, values
from tests.trainers import pipeline

GROUPS, BATCHES = 2, 16


class Skipping(Scaled):
    """A batch that begins with zeros is not trained on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if not batch[0].any() else loss


class Counting(Skipping):
    """Does not bear it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch, batch_idx)


def batches() -> list[Any]:
    torch.manual_seed(5)
    made = [Net.example(8) for _ in range(BATCHES)]
    made[5][0].zero_()
    return made


def of_group(group: int, models: int) -> list[list[Any]]:
    """What its models have in each iteration."""
    data, mine = batches(), models // GROUPS
    return [data[i + group * mine :][:mine] for i in range(0, BATCHES, models)]


class Loop:
    """What one process does without stages: the models of each group take turns, and groups meet an iteration late."""

    def __init__(self, module: Any, models: int) -> None:
        size = models // GROUPS
        self.models = [[copy.deepcopy(module) for _ in range(size)] for _ in range(GROUPS)]
        self.optimizers = [[model.configure_optimizers() for model in group] for group in self.models]
        self.reference = copy.deepcopy(module)
        self.alpha, self.outer_lr, self.count = 1 / models, math.sqrt(models), size
        self.told = self.zeros()
        self.known = [values(self.reference) for _ in range(GROUPS)]

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p) for p in self.reference.parameters()]

    @torch.no_grad()
    def meet(self) -> None:
        """What groups have told arrives."""
        for parameter, change in zip(self.reference.parameters(), self.told, strict=True):
            parameter.add_(change / GROUPS)
        self.told = self.zeros()

    def drain(self) -> None:
        self.meet()
        self.known = [values(self.reference) for _ in range(GROUPS)]

    def iteration(self, t: int, factor: float) -> None:
        moves = [self.group(g, of_group(g, self.count * GROUPS)[t], factor) for g in range(GROUPS)]
        self.meet()
        for g, moved in enumerate(moves):
            self.known[g] = [r + m for r, m in zip(values(self.reference), moved, strict=True)]
        self.told = [sum(of_all) for of_all in zip(*moves, strict=True)]  # type: ignore[misc]

    def group(self, g: int, bundle: Sequence[Any], factor: float) -> list[Tensor]:
        moved = self.zeros()
        for model, optimizer, batch in zip(self.models[g], self.optimizers[g], bundle, strict=True):
            before = values(model)
            optimizer.zero_grad()
            if batch[0].any():
                model.training_step = lambda part, i, model=model: model.loss(part) * factor
                accumulate(model, batch, 2)
            optimizer.step()
            end_of_turn(model, before, self.known[g], moved, self.alpha, self.outer_lr, self.count)
        return moved


def expected(models: int, drains: Sequence[int], epochs: int = 1) -> Loop:
    torch.manual_seed(3)
    loop, iterations = Loop(Skipping(), models), BATCHES // models
    for epoch in range(epochs):
        for t in range(iterations):
            step = epoch * iterations + t
            loop.iteration(t, 1 + step + 3 * t + 7 * t)
            if t in drains:
                loop.drain()
    return loop


def fit(rank: int, models: int, **options: Any) -> Any:
    torch.manual_seed(3)
    model, seen = options.pop("module", Skipping)(), Models()
    callbacks, path = [seen, *options.pop("callbacks", ())], options.pop("ckpt_path", None)
    length = options.pop("length", None)
    validation = loader(Net, 16, 8) if "val_check_interval" in options else None
    averaging = Averaging(groups=GROUPS, rolling=options.pop("rolling", True))
    strategy = {"num_microbatches": 2, "num_pipelines": models // GROUPS, "averaging": averaging}
    runner = pipeline(
        1, GROUPS, strategy, callbacks=callbacks, use_distributed_sampler=False,
        **{"max_epochs": 1, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip
    data = [batch for bundle in of_group(rank, models) for batch in bundle]
    reader = Batches(data) if length is None else DataLoader(Unsized(data[:length]), batch_size=None)
    runner.fit(model, reader, validation, ckpt_path=path)
    metrics = {name: value.item() for name, value in runner.callback_metrics.items()}
    return seen.models, state(model), metrics, runner.global_step


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but running means, which groups sum in another order."""
    return {name: tensor for name, tensor in tensors.items() if "running" not in name and "batches" not in name}


def look(trainer: Any, folder: Path) -> None:
    trainer.save_checkpoint(folder / "between.ckpt")
    with trainer.strategy.reference():
        trainer.strategy.reconfigure(num_microbatches=2)  # as it is


def two_groups(rank: int) -> Any:
    if rank:  # what runs ahead differs
        Lane.seniority = newest_first  # type: ignore[method-assign]
    folder = Path.cwd()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    looking = Interrupts(partial(look, folder=folder))
    return {
        "two models": fit(rank, 2, max_epochs=2),
        "four models": fit(rank, 4, max_epochs=2),
        "validated": fit(rank, 4, val_check_interval=2),
        "looked at": fit(rank, 2, max_epochs=2, callbacks=[looking]),
        "saved": fit(rank, 2, callbacks=[saving], enable_checkpointing=True),
        "left open": fit(rank, 2, max_epochs=2, rolling="auto"),
        "given way": fit(rank, 2, module=Counting, rolling="auto"),
        "drained": fit(rank, 2, module=Counting, rolling=False),
        "streamed": fit(rank, 2, length=4 + 2 * rank),
        "resumed": fit(rank, 2, ckpt_path=folder / "step=6.ckpt"),
    }


found = processes.shared(GROUPS, two_groups)


@pytest.mark.parametrize(
    ("name", "models", "drains", "epochs"),
    [("two models", 2, [7], 2), ("four models", 4, [3], 2), ("validated", 4, [1, 3], 1), ("saved", 2, [2, 5, 7], 1)],
)
def test_groups_that_roll_equal_a_plain_loop(
    name: str, models: int, drains: list[int], epochs: int, found: list[Any]
) -> None:
    loop = expected(models, drains, epochs)
    for g in range(GROUPS):
        own, left, _, steps = found[g][name]
        assert steps == epochs * BATCHES // models
        assert_equal([trained(parallel) for parallel in own], [trained(state(plain)) for plain in loop.models[g]])
        assert_equal(trained(left), trained(state(loop.reference)))


def test_groups_end_with_the_shortest_of_their_streams(found: list[Any]) -> None:
    torch.manual_seed(3)
    loop = Loop(Skipping(), 2)
    for t in range(4):
        loop.iteration(t, 1 + t + 10 * t)
    loop.drain()
    for g in range(GROUPS):
        assert found[g]["streamed"][3] == 4
        assert_equal(trained(found[g]["streamed"][1]), trained(state(loop.reference)))


def test_the_reference_is_the_mean_of_the_models_of_all_groups(found: list[Any]) -> None:
    for name in ("two models", "four models"):
        models = [model for g in range(GROUPS) for model in found[g][name][0]]
        for key, tensor in found[0][name][1].items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, torch.stack([model[key] for model in models]).mean(0))
            assert torch.equal(tensor, found[1][name][1][key])
        assert found[0][name][2] == found[1][name][2]


def test_what_looks_between_two_batches_leaves_no_trace(found: list[Any]) -> None:
    for g in range(GROUPS):
        assert_equal(found[g]["looked at"][1], found[g]["two models"][1])
        assert found[g]["looked at"][2] == found[g]["two models"][2]


def test_groups_roll_where_nothing_stands_against_it(found: list[Any]) -> None:
    for g in range(GROUPS):
        for one, other in (("left open", "two models"), ("given way", "drained")):
            assert_equal(found[g][one][1], found[g][other][1])
            assert found[g][one][2] == found[g][other][2]


class Looks(L.Callback):
    """Reads the statistics of the reference at the end of the epoch."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with trainer.strategy.reference():
            self.seen = {name: buffer.clone() for name, buffer in module.named_buffers()}


def of_two_stages(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    looks, group = Looks(), rank // 2
    strategy = {"num_microbatches": 2, "averaging": Averaging(groups=GROUPS, rolling=True)}
    runner = pipeline(2, 2 * GROUPS, strategy, callbacks=[looks], use_distributed_sampler=False, max_epochs=1)
    runner.fit(Scaled(), Batches([batch for bundle in of_group(group, 2) for batch in bundle]))
    return looks.seen


def test_every_process_of_a_group_finds_the_statistics_of_the_reference(tmp_path: Path) -> None:
    found = processes.each(2 * GROUPS, of_two_stages, folder=tmp_path)
    assert found[0]["first.1.num_batches_tracked"] > 0
    assert_equal(found, [found[0]] * len(found))


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(found: list[Any]) -> None:
    # of the data, which begin anew within the epoch, two iterations are left
    torch.manual_seed(3)
    loop = Loop(Skipping(), 2)
    for t in range(6):
        loop.iteration(t, 1 + t + 10 * t)
        if t in (2, 5):
            loop.drain()
    for t in (6, 7):
        loop.iteration(t - 6, 1 + t + 10 * t)
    loop.drain()
    for g in range(GROUPS):
        assert_equal(trained(found[g]["resumed"][1]), trained(state(loop.reference)))
