"""What training_step may return: a loss with a graph, in any of Lightning's forms, or None to skip."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import Averaging, AvgPipeStrategy, Links
from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import both, loaders, pipeline, trainer, twins


class Detached(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class Frozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class PerSample(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square()


WRONG = [
    (Detached, "a loss that needs no gradient.*unfreeze"),
    (Frozen, "a loss that needs no gradient.*unfreeze"),
    (PerSample, r"a loss of shape \(2, 8\).*loss\.mean\(\)"),
]


@pytest.mark.parametrize(("model", "message"), WRONG, ids=lambda case: getattr(case, "__name__", ""))
def test_a_loss_that_no_backward_can_start_from_is_refused_before_the_first_step(model: Any, message: str) -> None:
    runner = pipeline(2, strategy={"num_microbatches": 4, "num_pipelines": 2})
    with pytest.raises(ConfigurationError, match=message):
        runner.fit(model(), loader(MLP, 16, 8))
    assert runner.global_step == 0


class OneElement(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).reshape(1)


class InMapping(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        extra = {} if batch_idx else {"first": 1}
        return UserDict(loss=loss, rows=batch[0], twice=2 * loss.detach(), **extra)


@pytest.mark.parametrize("model", [OneElement, InMapping])
def test_any_form_that_lightning_takes_trains_as_on_one_device(model: Any) -> None:
    both(model, loaders(model, 24))


# -- skipping --------------------------------------------------------------------------------------------------------


class Skips(MLP):
    """Skips what has a negative first target: early, or when it has computed everything."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        bad = bool(batch[1][0, 0] < 0)
        if bad and self.early:
            return None
        loss = super().training_step(batch, batch_idx)
        self.log("trained", loss)
        return None if bad else loss


def data(signs: list[int]) -> tuple[Any, Any]:
    """Micro-batches and batches, with the sign of the targets of each micro-batch."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * len(signs), 8, generator=generator)
    targets = 0.1 + torch.rand(2 * len(signs), 8, generator=generator)
    samples = TensorDataset(inputs, targets * torch.tensor(signs).repeat_interleave(2)[:, None])
    return DataLoader(samples, batch_size=2), DataLoader(samples, batch_size=8)


SIGNS = [-1, 1, -1, 1, -1, -1, -1, -1, 1, 1, 1, -1]
FIRST_BATCH = [-1, -1, -1, -1, 1, -1, 1, 1, -1, 1, 1, 1]


@pytest.mark.parametrize(
    ("num_stages", "early", "recompute", "signs"),
    [(1, True, False, SIGNS), (3, True, False, FIRST_BATCH), (2, False, False, SIGNS), (2, True, True, FIRST_BATCH)],
)
def test_micro_batches_that_the_step_skips_contribute_nothing(
    num_stages: int, early: bool, recompute: bool, signs: list[int]
) -> None:
    make = partial(Skips, early=early)
    expected, found = both(make, data(signs), num_stages=num_stages, strategy={"recompute": recompute})
    assert found.global_step == expected.global_step


def test_a_model_whose_batch_is_skipped_stays_while_others_train() -> None:
    _, batches = data([-1, -1, -1, -1, 1, 1, 1, 1])
    model = Skips(early=True)
    before = [p.detach().clone() for p in model.parameters()]
    seen = []

    class Sees(Skips):
        def on_train_batch_end(self, *args: Any) -> None:
            for n in range(2):
                with self.trainer.strategy.parallel_model(n):
                    seen.append([p.detach().clone() for p in self.parameters()])

    model.__class__ = Sees
    pipeline(
        2,
        strategy={"num_pipelines": 2, "num_microbatches": 4, "averaging": Averaging(alpha=0.0, outer_lr=1)},
        max_epochs=1,
    ).fit(model, batches)
    assert_equal(seen[0], before)
    assert not all(torch.equal(a, b) for a, b in zip(seen[1], before, strict=True))


class Waits(MLP):
    """Trains from its third batch on, by a count of its own."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.log("calls", float(self.calls), on_step=False, on_epoch=True, reduce_fx="max")
        return loss if self.calls > 2 else None


def wait_in_rank(devices: int) -> tuple[dict[str, Tensor], int, int, float]:
    model = twins(Waits)[0]
    runner = trainer(strategy=AvgPipeStrategy(num_stages=2, num_microbatches=1), devices=devices, max_epochs=1)
    runner.fit(model, data(SIGNS)[0])
    return model.state_dict(), model.calls, runner.global_step, float(runner.callback_metrics["calls"])


# -- means over targets ----------------------------------------------------------------------------------------------


class Tokens(MLP):
    """A mean over the targets that are not ignored, of which micro-batches have unequal numbers, one of them none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def loss(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(
            self.head(self.layers(self.embed(batch["ids"]))).flatten(0, 1), batch["labels"].flatten()
        )
        self.log("largest", loss, reduce_fx="max", on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


class Weighs(Tokens):
    def loss_weight(self, batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum()


class HasAnother(Tokens):
    def loss_weight(self, epoch: int) -> float:
        return 0.0


def tokens() -> DataLoader[Any]:
    ids = torch.randint(0, 11, (16, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for i in range(16):
        labels[i, : i % 7] = -100
    labels[4:6] = -100
    return DataLoader([{"ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)], batch_size=8)


WEIGHTS = [(Tokens, lambda batch: (batch["labels"] != -100).sum()), (Weighs, None), (HasAnother, "labels")]


@pytest.mark.parametrize(("model", "loss_weight"), WEIGHTS)
def test_weighted_micro_batches_have_loss_gradients_and_logs_of_the_batch(model: Any, loss_weight: Any) -> None:
    strategy = {"num_microbatches": 4, "loss_weight": loss_weight}
    one, other = both(model, tokens(), tokens(), strategy=strategy)
    names = ("train_loss_step", "train_loss_epoch", "val_loss")
    expected, found = ({name: float(runner.callback_metrics[name]) for name in names} for runner in (one, other))
    assert found == pytest.approx(expected, abs=1e-6)
    assert_close(other.lightning_module.gradients, one.lightning_module.gradients, rtol=1e-4)


def test_unequal_numbers_of_targets_are_told() -> None:
    with pytest.warns(UserWarning, match=r"'labels' of the batch holds ignored targets \(-100\).*loss_weight='labels'"):
        pipeline(2, strategy={"num_microbatches": 4}, max_epochs=1).fit(Tokens().double(), tokens())


def test_a_weight_that_cannot_be_is_refused() -> None:
    for weight, message in (("label", "no such tensor, but 'ids', 'labels'"), (lambda batch: -1, "returned -1")):
        runner = pipeline(2, strategy={"num_microbatches": 4, "loss_weight": weight})
        with pytest.raises(ConfigurationError, match=message):
            runner.fit(Tokens(), tokens())
        assert runner.global_step == 0


def weigh_in_rank() -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, links = Tokens(), Links(reader="first")
    pipeline(2, 2, {"num_microbatches": 4, "loss_weight": "labels", "links": links}).fit(model, tokens())
    return model.state_dict()


# -- in two processes ------------------------------------------------------------------------------------------------


in_two = processes.shared(2, lambda rank: (wait_in_rank(2), weigh_in_rank()))


def test_a_step_that_counts_what_it_skips_trains_when_it_has_counted(in_two: Any) -> None:
    model = twins(Waits)[0]
    expected = trainer(max_epochs=1)
    expected.fit(model, data(SIGNS)[0])
    assert in_two[0][0][1] == model.calls == 12
    for (weights, _, steps, logged), _ in in_two:
        assert (steps, logged) == (expected.global_step, 12.0)
        assert_equal(weights, state(model))


def test_the_process_of_the_loss_gets_what_weighs(in_two: Any) -> None:
    torch.manual_seed(3)
    expected = Tokens()
    trainer().fit(expected, tokens())
    for _, weights in in_two:
        assert_close(weights, state(expected), rtol=1e-4)
