"""Outputs of frozen layers: told apart by sample, the same bits again, and given up where they cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs, digests
from lightning_avgpipe.errors import VerificationError

HOST = torch.device("cpu")
X = torch.arange(24.0).reshape(8, 3)


def epoch(kept: FrozenOutputs, order: list[int], make: Any = lambda x: (x * 2, x.sum(1).to(torch.int16))) -> list[Any]:
    """Micro-batches of two samples; returns what was read, and None for what was computed."""
    kept.begin_epoch()
    found: list[Any] = []
    for rows in (order[i : i + 2] for i in range(0, len(order), 2)):
        known = kept.look_up({0: digests((X[rows], 0), len(rows), None)})
        if known:
            found.append(kept.read(0, HOST, 1).tensors)
        else:
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
    assert digests((X[:2], "de"), 2, None) != digests((X[:2], "en"), 2, None)  # what is no tensor counts for all


@pytest.mark.parametrize("limit", [math.inf, 0], ids=["on the host", "in files"])
def test_what_is_read_has_the_bits_that_were_given(limit: float, tmp_path: Path) -> None:
    kept = FrozenOutputs(limit, str(tmp_path))
    kept.follow("three layers")
    assert epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7]) == [None] * 4
    first, *rest = epoch(kept, [5, 2, 7, 0, 1, 3, 6, 4])
    assert first is None  # computed, and compared
    for rows, (doubled, sums) in zip(([7, 0], [1, 3], [6, 4]), rest, strict=True):
        assert torch.equal(doubled, X[rows] * 2) and torch.equal(sums, X[rows].sum(1).to(torch.int16))
    kept.follow("four layers")
    assert epoch(kept, [0, 1]) == [None]
    assert [*tmp_path.rglob("*")] == []  # files go with the mapping, however training ends


def test_tensors_lie_in_memory_as_they_were_given() -> None:
    def transposed(x: Tensor) -> tuple[Tensor, ...]:
        return (x[:, :, None].expand(2, 3, 4).contiguous().transpose(1, 2).contiguous().transpose(1, 2),)

    kept = FrozenOutputs(math.inf)
    epoch(kept, [0, 1, 2, 3], transposed)
    _, (read,) = epoch(kept, [2, 0, 3, 1], transposed)
    assert read.stride() == transposed(X[:2])[0].stride() and torch.equal(read, transposed(X[[3, 1]])[0])


def test_what_depends_on_others_of_the_micro_batch_is_not_kept() -> None:
    kept = FrozenOutputs(math.inf)
    normalised = lambda x: (x - x.mean(0),)  # noqa: E731
    epoch(kept, [0, 1, 2, 3], normalised)
    assert epoch(kept, [0, 2, 1, 3], normalised) == [None, None]
    assert "depends on more than the sample" in kept.why_not


def test_a_tensor_without_samples_must_be_the_same_for_all() -> None:
    kept = FrozenOutputs(math.inf)
    epoch(kept, [0, 1, 2, 3], lambda x: (x, x.sum()))
    assert "shape ()" in kept.why_not
    kept = FrozenOutputs(math.inf)
    constant = lambda x: (x, torch.ones(5))  # noqa: E731
    epoch(kept, [0, 1, 2, 3], constant)
    assert torch.equal(epoch(kept, [2, 0, 3, 1], constant)[1][1], torch.ones(5))


def test_frozen_weights_that_change_once_their_outputs_were_used_are_an_error() -> None:
    kept = FrozenOutputs(math.inf)
    epoch(kept, [0, 1, 2, 3])
    assert epoch(kept, [2, 0, 3, 1])[1] is not None
    with pytest.raises(VerificationError, match="frozen weights have changed"):
        epoch(kept, [0, 1, 2, 3], lambda x: (x * 3, x.sum(1).to(torch.int16)))


def test_data_that_is_augmented_is_given_up_after_an_epoch() -> None:
    kept = FrozenOutputs(math.inf)
    for number in range(4):
        kept.begin_epoch()
        for rows in ([0, 1], [2, 3]):
            assert not kept.look_up({0: digests(X[rows] + number, 2, None)})
            kept.fill(0, (X[rows],), ())
    assert "augments at random" in kept.why_not


def test_without_room_training_goes_on_without_more_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0, "total": 1}))
    kept = FrozenOutputs(60, str(tmp_path))  # two micro-batches of 28 bytes
    epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    found = epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    assert [one is not None for one in found] == [False, True, False, False] and not kept.why_not
