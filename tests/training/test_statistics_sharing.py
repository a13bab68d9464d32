"""``sync_batchnorm=True``: replicas normalise over the micro-batches that they have at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeTuner
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from lightning_avgpipe.schedule import build, with_replicas
from lightning_avgpipe.training.replicas import can_run_together
from tests import processes
from tests.averaging.models import Batches
from tests.averaging.test_groups import Bomb
from tests.comparing import assert_close, assert_equal, state
from tests.models import Regression
from tests.trainers import pipeline

COUNT = 4  # micro-batches of a batch


class Normalised(Regression):
    """Batch normalisation in both stages, of several kinds, one of them within code of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.second = nn.Linear(8, 8)
        self.last = nn.Sequential(nn.BatchNorm1d(8, affine=False, momentum=None), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.batch_norm(self.second(self.first(x)), None, None, training=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def made() -> Normalised:
    torch.manual_seed(5)
    return Normalised().double()


def batches() -> list[Any]:
    """Of four samples in a micro-batch and of two, in turns."""
    torch.manual_seed(7)
    return [tuple(t.double() for t in Normalised.example(COUNT * (4 - 2 * (i % 2)))) for i in range(6)]


def united(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Batches whose micro-batch i is micro-batch i of each of these batches."""
    found = []
    for together in parts:
        parts = [[tensor.chunk(COUNT) for tensor in batch] for batch in together]
        found.append(tuple(torch.cat([part[of][i] for i in range(COUNT) for part in parts]) for of in range(2)))
    return found


def fit(data: Sequence[Any], devices: int, num_stages: int, sync: bool, strategy: dict[str, Any]) -> Any:
    module = made()
    options = {"max_epochs": 1, "use_distributed_sampler": False, "gradient_clip_val": 0.5, "precision": "64-true"}
    runner = pipeline(num_stages, devices, strategy, sync_batchnorm=sync, **options)
    runner.fit(module, Batches(data), Batches(data[:1]))
    assert type(module.first[1]) is nn.BatchNorm1d
    return state(module)


def replicated(rank: int, num_stages: int, **strategy: Any) -> Any:
    """Two copies of a pipeline, each with every other batch."""
    replica = rank // num_stages
    strategy = {
        "replicas": 2,
        "num_microbatches": COUNT,
        "split_points": ["second"] * (num_stages - 1) or None,
        **strategy,
    }
    return fit(batches()[replica::2], 2 * num_stages, num_stages, True, strategy)


def expected() -> dict[str, Tensor]:
    data = batches()
    return fit(united(list(zip(data[::2], data[1::2], strict=True))), 1, 2, False, {"num_microbatches": COUNT})


def assert_alike(results: Sequence[dict[str, Tensor]], plain: dict[str, Tensor]) -> None:
    """To 1e-10 the same as plain, and the same bits on all."""
    for found in results:
        assert_close(found, plain, rtol=0, atol=1e-10)
        assert_equal(found, results[0])


def unequal(rank: int) -> None:
    """Batches that are not split into as many micro-batches."""
    data = batches()[rank::2]
    if rank == 1:
        data[1] = tuple(t[:2] for t in data[1])  # two samples are two micro-batches
    fit(data, 2, 1, True, {"replicas": 2, "num_microbatches": COUNT})


class Skipping(Normalised):
    """Has no loss for one batch of one replica."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx == 1 and self.global_rank == 1 else loss


def without_loss(rank: int) -> None:
    runner = pipeline(1, 2, {"replicas": 2, "num_microbatches": 2}, sync_batchnorm=True, use_distributed_sampler=False)
    runner.fit(Skipping().double(), Batches(batches()))


def failing(rank: int) -> None:
    module = made()
    if rank == 1:  # before it has told the other its statistics
        module.first[1].register_forward_pre_hook(Bomb(3))
    strategy = {"replicas": 2, "num_microbatches": COUNT}
    runner = pipeline(1, 2, strategy, sync_batchnorm=True, use_distributed_sampler=False)
    runner.fit(module, Batches(batches()))


def error_of(function: Callable[[int], None], rank: int) -> str:
    with pytest.raises((AvgPipeError, ValueError)) as caught:
        function(rank)
    return f"{type(caught.value).__name__}: {caught.value}"


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"num_stages": 2}, list, "one stage on each of 1 devices"),
    ({"num_pipelines": 2}, list, "use num_pipelines=1"),
    ({"schedule": "zb_h1"}, list, "one of advance_forward, 1f1b, afab"),
    ({}, lambda: [AvgPipeTuner(4)], "num_pipelines=4 runs actions as they come"),
    ({"num_stages": 2, "replicas": 1}, list, "sync_batchnorm=True is for replicas"),
]


def refused() -> None:
    """What could wait for ever, and a pipeline without replicas."""
    for given, callbacks, needed in REFUSED:
        strategy = {"num_stages": 1, "replicas": 2, **given}
        runner = pipeline(strategy.pop("num_stages"), 2, strategy, sync_batchnorm=True, callbacks=callbacks())
        with pytest.raises(ConfigurationError, match=needed):
            runner.fit(made(), Batches(batches()))


def in_two(rank: int) -> tuple[Any, list[str]]:
    together = replicated(rank, 1)
    refused()
    return together, [error_of(function, rank) for function in (unequal, without_loss, failing)]


found = processes.shared(2, in_two)


def test_replicas_of_one_stage_are_as_one_process_with_their_micro_batches_together(found: list[Any]) -> None:
    assert_alike([together for together, _ in found], expected())


def test_what_one_replica_cannot_do_is_said_before_the_others_wait_for_it(found: list[Any]) -> None:
    (_, (unequal_here, skipped_here, survivor)), (_, (unequal_there, skipped, failed)) = found
    for said in (unequal_here, unequal_there):
        assert "the batches of the replicas were split into 4, 2 micro-batches" in said
    assert "micro-batch 0 has no loss" in skipped
    assert "rank 1 (stage 0 of replica 1)" in skipped_here
    assert "ValueError: one group has failed" in failed
    assert "rank 1 (stage 0 of replica 1)" in survivor
    assert "a batch normalisation (sync_batchnorm=True)" in survivor


def repeating(rank: int) -> Any:
    return replicated(rank, 2), replicated(rank, 2, recompute=True)


@pytest.mark.slow
def test_replicas_of_two_stages_too_and_what_is_repeated_counts_once(tmp_path: Path) -> None:
    results = processes.each(4, repeating, folder=tmp_path)
    assert_alike([found for found, _ in results], expected())
    assert_alike([found for _, found in results], expected())


def in_turns() -> Any:
    """The first of two stages has two replicas, which take micro-batches in turns."""
    strategy = {"num_microbatches": COUNT, "split_points": ["second"], "replicas": [2, 1]}
    return fit(batches(), 3, 2, True, strategy)


def by_hand() -> dict[str, Tensor]:
    """The first stage normalises two micro-batches together, the second one by one."""
    module = made()
    optimizer = module.configure_optimizers()
    for x, y in batches():
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(COUNT // 2), y.chunk(COUNT // 2), strict=True):
            pairs = zip(module.first(inputs).chunk(2), targets.chunk(2), strict=True)
            sum(
                F.mse_loss(module.last(F.batch_norm(module.second(h), None, None, training=True)), t) for h, t in pairs
            ).div(COUNT).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return state(module)


@pytest.mark.slow
def test_replicas_of_a_single_stage_normalise_the_micro_batches_of_a_turn_together(tmp_path: Path) -> None:
    results = processes.everywhere(3, in_turns, folder=tmp_path)
    plain = by_hand()
    for found in results:
        counted = {name: value for name, value in found.items() if "num_batches" not in name}
        assert_close(counted, {name: plain[name] for name in counted}, rtol=0, atol=1e-10)
        assert_equal(found, results[0])


def test_it_is_known_which_schedules_let_replicas_meet() -> None:
    def ordered(name: str, counts: list[int], number: int = 12) -> bool:
        return can_run_together(with_replicas(build(name, len(counts), number), counts), tuple(counts))

    assert ordered("1f1b", [2, 1]) and ordered("1f1b", [1, 2]) and ordered("afab", [3, 2])
    assert ordered("1f1b", [2, 2, 2]) and ordered("afab", [1, 4])
    # both would wait: stage 0 for a gradient of micro-batch 1, whose forward on stage 1 needs one of stage 0 first
    early = build("1f1b", 2, 12)
    assert not can_run_together(early, (3, 2))


def test_one_process_has_nothing_to_synchronise_as_with_any_strategy() -> None:
    data = batches()
    plain = fit(data, 1, 2, False, {"num_microbatches": COUNT})
    assert_equal(fit(data, 1, 2, True, {"num_microbatches": COUNT}), plain)
