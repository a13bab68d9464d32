"""What training_step may return: a loss with a graph, in any of Lightning's forms, or None to skip."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.engine import assert_same_parameters
from tests.lightning_side.twins import loaders, single, staged, twins
from tests.models import MLP, loader
from tests.trainers import pipeline


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


@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(1, 1), (2, 2)])
@pytest.mark.parametrize(("model", "message"), WRONG, ids=lambda case: getattr(case, "__name__", ""))
def test_a_loss_that_no_backward_can_start_from_is_refused_before_the_first_step(
    model: Any, message: str, num_stages: int, num_pipelines: int
) -> None:
    options = {"num_microbatches": 4, "num_pipelines": num_pipelines}
    runner = pipeline(num_stages, strategy=options)
    with pytest.raises(ConfigurationError, match=message):
        runner.fit(model(), loader(MLP, 16, 8))
    assert runner.global_step == 0


def refused(rank: int) -> list[str]:
    torch.set_num_threads(1)
    found = []
    for model, _ in WRONG:
        runner = pipeline(2, 2, {"num_microbatches": 4})
        with pytest.raises(Exception, match="loss") as caught:
            runner.fit(model(), loader(MLP, 16, 8))
        found.append(f"{runner.global_step}: {caught.value}")
    return found


@pytest.mark.slow
def test_every_process_says_what_is_wrong_with_the_loss(tmp_path: Path) -> None:
    for ranks in processes.results(processes.run(2, refused, folder=tmp_path)):
        assert [text.startswith("0: ") for text in ranks] == [True] * len(WRONG)


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
    one, other = twins(model)
    micro_batches, batches = loaders(model, 24)
    single().fit(one, micro_batches)
    staged().fit(other, batches)
    assert_same_parameters(one, other)


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


@pytest.mark.parametrize("signs", [SIGNS, FIRST_BATCH], ids=["later", "first"])
@pytest.mark.parametrize(
    ("num_stages", "early", "recompute"), [(1, True, False), (3, True, False), (2, False, False), (2, True, True)]
)
def test_micro_batches_that_the_step_skips_contribute_nothing(
    num_stages: int, early: bool, signs: list[int], recompute: bool
) -> None:
    one, other = twins(Skips, early=early)
    micro_batches, batches = data(signs)
    expected, found = single(), staged(num_stages, strategy={"recompute": recompute})
    expected.fit(one, micro_batches)
    found.fit(other, batches)
    assert found.global_step == expected.global_step
    assert_same_parameters(one, other)


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
    pipeline(2, strategy={"num_pipelines": 2, "num_microbatches": 4, "alpha": 0.0, "outer_lr": 1}, max_epochs=1).fit(
        model, batches
    )
    assert all(torch.equal(a, b) for a, b in zip(seen[0], before, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[1], before, strict=True))


def skip_in_rank(rank: int, precision: str) -> tuple[dict[str, Tensor], int]:
    torch.set_num_threads(1)
    model = twins(Skips, early=True)[1]
    runner = pipeline(2, 2, {"num_microbatches": 4}, precision=precision)
    runner.fit(model, data(SIGNS)[1])
    return model.state_dict(), runner.global_step


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_all_processes_skip_the_same_batches(tmp_path: Path, precision: str) -> None:
    ranks = processes.results(processes.run(2, skip_in_rank, precision, folder=tmp_path))
    one = twins(Skips, early=True)[0]
    expected = single(precision=precision)
    expected.fit(one, data(SIGNS)[0])
    for weights, steps in ranks:
        assert steps == expected.global_step
        for name, value in one.state_dict().items():
            assert torch.equal(weights[name], value), name
