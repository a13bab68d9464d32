"""Outputs of frozen layers: told apart by sample, the same bits again, and given up where they cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from lightning_avgpipe.systems.freezing.kept_outputs import KeptOutputsSource, OutputStore, digests
from tests.models import CountingLinear
from tests.planning.test_planner import Net

HOST = torch.device("cpu")
X = torch.arange(24.0).reshape(8, 3)


def keeping(limit: float = math.inf) -> OutputStore:
    return OutputStore(limit, 3)


def epoch(kept: OutputStore, order: list[int], make: Any = lambda x: (x * 2, x.sum(1).to(torch.int16))) -> list[Any]:
    """Micro-batches of two samples; returns what was read, and None for what was computed."""
    kept.begin_epoch()
    found: list[Any] = []
    for rows in (order[i : i + 2] for i in range(0, len(order), 2)):
        if kept.look_up({0: digests((X[rows], 0), len(rows), None)}):
            found.append(kept.read(0, HOST, 1).tensors)
            continue
        if kept.wants(0):
            kept.fill(0, make(X[rows]), ("entry",))
        found.append(None)
    return found


def test_a_sample_is_known_by_its_content_whatever_is_beside_it() -> None:
    both = digests({"x": X[:2], "y": torch.zeros(2)}, 2, None)
    assert digests({"x": X[:1], "y": torch.zeros(1)}, 1, None) == both[:1]
    assert len({*both, *digests({"x": X[:1] + 1e-7, "y": torch.zeros(1)}, 1, None)}) == 2 + bool(X[0, 0] + 1e-7)
    assert digests({"x": X[:2], "y": torch.ones(2)}, 2, {"['x']"}) == digests(
        {"x": X[:2], "y": torch.zeros(2)}, 2, {"['x']"}
    )
    assert digests((X[:2], "de"), 2, None) != digests((X[:2], "en"), 2, None)  # what is not a tensor counts for all
    edges, others = torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()  # nor is a sparse one
    assert digests((X[:2], edges), 2, None) == digests((X[:2], edges.clone()), 2, None)
    assert digests((X[:2], edges), 2, None) != digests((X[:2], others), 2, None)


def test_what_is_read_has_the_bits_that_were_given() -> None:
    kept = keeping()
    assert epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7]) == [None] * 4
    first, *rest = epoch(kept, [5, 2, 7, 0, 1, 3, 6, 4])
    assert first is None  # computed, and compared
    for rows, (doubled, sums) in zip(([7, 0], [1, 3], [6, 4]), rest, strict=True):
        assert torch.equal(doubled, X[rows] * 2) and torch.equal(sums, X[rows].sum(1).to(torch.int16))


def test_tensors_lie_in_memory_as_they_were_given() -> None:
    def transposed(x: Tensor) -> tuple[Tensor, ...]:
        return (x[:, :, None].expand(2, 3, 4).contiguous().transpose(1, 2).contiguous().transpose(1, 2),)

    kept = keeping()
    epoch(kept, [0, 1, 2, 3], transposed)
    _, (read,) = epoch(kept, [2, 0, 3, 1], transposed)
    assert read.stride() == transposed(X[:2])[0].stride() and torch.equal(read, transposed(X[[3, 1]])[0])


def test_what_depends_on_others_of_the_micro_batch_is_not_kept() -> None:
    kept = keeping()
    normalised = lambda x: (x - x.mean(0),)  # noqa: E731
    epoch(kept, [0, 1, 2, 3], normalised)
    assert epoch(kept, [0, 2, 1, 3], normalised) == [None, None]
    assert "depends on more than the sample" in kept.why_not


def test_a_tensor_without_samples_must_be_the_same_for_all() -> None:
    kept = keeping()
    epoch(kept, [0, 1, 2, 3], lambda x: (x, x.sum()))
    assert "shape ()" in kept.why_not
    kept = keeping()
    constant = lambda x: (x, torch.ones(5))  # noqa: E731
    epoch(kept, [0, 1, 2, 3], constant)
    assert torch.equal(epoch(kept, [2, 0, 3, 1], constant)[1][1], torch.ones(5))


def test_frozen_weights_that_change_once_their_outputs_were_used_are_an_error() -> None:
    kept = keeping()
    epoch(kept, [0, 1, 2, 3])
    assert epoch(kept, [2, 0, 3, 1])[1] is not None
    with pytest.raises(VerificationError, match="frozen weights have changed"):
        epoch(kept, [0, 1, 2, 3], lambda x: (x * 3, x.sum(1).to(torch.int16)))


def test_what_differs_while_something_is_about_to_be_read_is_an_error() -> None:
    kept, make = keeping(), lambda x: (x * 2,)
    epoch(kept, [0, 1, 2, 3], make)
    epoch(kept, [0, 1], make)  # compared
    assert kept.look_up({0: digests((X[[0, 4]], 0), 2, None), 1: digests((X[[2, 3]], 0), 2, None)}) == {1}
    with pytest.raises(VerificationError, match="are used by now"):
        kept.fill(0, (X[[0, 4]] + 1,), ("entry",))


def test_data_that_is_augmented_is_given_up_after_an_epoch() -> None:
    kept = keeping()
    for number in range(4):
        kept.begin_epoch()
        for rows in ([0, 1], [2, 3]):
            assert not kept.look_up({0: digests(X[rows] + number, 2, None)})
            if kept.wants(0):
                kept.fill(0, (X[rows],), ())
    assert "augments at random" in kept.why_not


def test_without_room_training_goes_on_without_more_of_it() -> None:
    kept = keeping(60)  # four samples of 14 bytes
    epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    read = [found is not None for found in epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])]
    assert read == [False, True, False, False]  # compared, read, and no room


def test_what_was_stopped_keeps_nothing_more() -> None:
    kept = keeping()
    epoch(kept, [0, 1, 2, 3])
    kept.stop("two pipelines train")
    assert epoch(kept, [0, 1, 2, 3]) == epoch(kept, [0, 1, 2, 3]) == [None, None]
    assert not kept.wants(0) and kept.why_not == "two pipelines train"


# -- plans -----------------------------------------------------------------------------------------------------------


def test_it_is_logged_why_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.blocks[0].parts[0] = nn.Dropout(0.5)
    net.blocks[0].requires_grad_(False)
    planner = Planner(Divisible(net), 2, source=KeptOutputsSource())
    step = Step("training_step", net.training_step, (torch.randn(2, 8), 0))
    assert planner.plan(step, Conditions(build("1f1b", 2, 1))).kept == 0
    assert "outputs of frozen layers are not kept" in caplog.text and "draws random numbers" in caplog.text


def test_what_counts_its_calls_is_called() -> None:
    net = Net()
    net.blocks[1].parts[1] = CountingLinear(8, 8)
    net.blocks[:2].requires_grad_(False)
    plan = Planner(Divisible(net), 2, source=KeptOutputsSource()).plan(
        Step("training_step", net.training_step, (torch.randn(2, 8), 0)), Conditions(build("1f1b", 2, 1))
    )
    assert [node.name for node in plan.graph.nodes[: plan.kept]] == ["blocks.0", "blocks.1.parts.0"]
