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


def behind(depth: int) -> Any:
    """What the first nodes are, all that may begin behind."""
    return [f"layer {i}" for i in range(depth)]


def keeping(depth: int = 3, limit: float = math.inf, folder: str | None = None) -> FrozenOutputs:
    kept = FrozenOutputs(limit, folder)
    kept.follow(depth, behind)
    return kept


def epoch(kept: FrozenOutputs, order: list[int], make: Any = lambda x: (x * 2, x.sum(1).to(torch.int16))) -> list[Any]:
    """Micro-batches of two samples; returns what was read, and None for what was computed."""
    kept.begin_epoch()
    found: list[Any] = []
    for rows in (order[i : i + 2] for i in range(0, len(order), 2)):
        known = kept.look_up({0: digests((X[rows], 0), len(rows), None)})
        if known:
            found.append(kept.read(0, HOST, 1).tensors)
        else:
            for depth in sorted(kept.taps(0)):
                kept.fill(0, depth, make(X[rows]), ("entry",))
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
    kept = keeping(3, limit, str(tmp_path))
    assert epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7]) == [None] * 4
    first, *rest = epoch(kept, [5, 2, 7, 0, 1, 3, 6, 4])
    assert first is None  # computed, and compared
    for rows, (doubled, sums) in zip(([7, 0], [1, 3], [6, 4]), rest, strict=True):
        assert torch.equal(doubled, X[rows] * 2) and torch.equal(sums, X[rows].sum(1).to(torch.int16))
    kept.follow(3, lambda depth: "other layers")
    assert epoch(kept, [0, 1]) == [None]
    assert [*tmp_path.rglob("*")] == []  # files go with the mapping, however training ends


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
    kept = keeping()
    grown(kept, [0, 1, 2, 3])
    grown(kept, [0, 1])  # compared
    assert kept.look_up({0: digests(X[[0, 4]], 2, None), 1: digests(X[[2, 3]], 2, None)}) == {1}
    with pytest.raises(VerificationError, match="are used by now"):
        kept.fill(0, 3, (X[[0, 4]] + 1, X[[0, 4]].sum(1)), 3)


def test_data_that_is_augmented_is_given_up_after_an_epoch() -> None:
    kept = keeping()
    for number in range(4):
        kept.begin_epoch()
        for rows in ([0, 1], [2, 3]):
            assert not kept.look_up({0: digests(X[rows] + number, 2, None)})
            kept.fill(0, 3, (X[rows],), ())
    assert "augments at random" in kept.why_not


def test_without_room_training_goes_on_without_more_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0, "total": 1}))
    kept = keeping(3, 60, str(tmp_path))  # two micro-batches of 28 bytes
    epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    found = epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    assert [one is not None for one in found] == [False, True, False, False] and not kept.why_not


def deeper(depth: int) -> Any:
    """Of each depth its own; behind the fifth node a row is wider."""
    return lambda x: (x * depth, x.sum(1)) if depth < 5 else (torch.cat([x, x], 1) * depth, x.sum(1))


def grown(kept: FrozenOutputs, order: list[int], make: Any = deeper) -> list[tuple[int, int]]:
    """An epoch; returns for each micro-batch behind how many nodes it begins, and how many are new to it."""
    kept.begin_epoch()
    found = []
    for rows in (order[i : i + 2] for i in range(0, len(order), 2)):
        begins = 0
        if kept.look_up({0: digests(X[rows], len(rows), None)}):
            begins = kept.begins(0)
            for tensor, expected in zip(kept.read(0, HOST, 1).tensors, make(begins)(X[rows]), strict=True):
                assert torch.equal(tensor, expected)
        depths = kept.taps(0, begins)
        for depth in sorted(depths):
            kept.fill(0, depth, make(depth)(X[rows]), depth)
        found.append((begins, max(depths, default=0)))
    return found


@pytest.mark.parametrize("limit", [math.inf, 100, 0], ids=["on the host", "on both", "in files"])
def test_when_more_is_frozen_what_is_kept_is_gone_on_from(limit: float, tmp_path: Path) -> None:
    kept = keeping(3, limit, str(tmp_path))
    assert grown(kept, [0, 1, 2, 3, 4, 5, 6, 7]) == [(0, 3)] * 4
    kept.follow(4, behind)
    assert grown(kept, [5, 2, 7, 0, 1, 3, 6, 4]) == [(0, 4)] + [(3, 4)] * 3  # the first is compared
    kept.follow(5, behind)
    assert grown(kept, [1, 6, 0, 2, 5, 7]) == [(0, 5)] + [(4, 5)] * 2
    # 3 and 4 were left out, and stay where they are
    assert grown(kept, [3, 4, 1, 0, 5, 3, 5, 2, 6, 7]) == [(0, 5), (0, 5), (5, 0), (5, 0), (5, 0)]
    assert kept.hits == 6 + 4 + 6


def test_in_the_place_of_what_was_kept_there_is_room_for_what_it_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Usage:
        free, total = 1.0, 1.0

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    monkeypatch.setattr("lightning_avgpipe.engine.kept_samples._SEGMENT_BYTES", 4 * 16 + 15 * 64)
    kept = keeping(3, 4 * 16, str(tmp_path))  # four samples on the host, and one file
    Usage.free, Usage.total = 1e9, 1.0
    grown(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    Usage.free, Usage.total = 0.0, 1.0
    kept.follow(4, behind)
    assert grown(kept, [6, 1, 2, 7, 4, 3, 0, 5]) == [(0, 4)] + [(3, 4)] * 3
    assert grown(kept, [6, 7, 1, 2, 4, 5, 0, 3]) == [(0, 4)] + [(4, 0)] * 3


def test_what_was_kept_of_fewer_layers_is_compared_before_it_is_used() -> None:
    kept = keeping(3)
    grown(kept, [0, 1, 2, 3])
    kept.follow(4, behind)
    assert grown(kept, [0, 1, 2, 3], lambda depth: lambda x: (x * depth + 1,)) == [(0, 4), (0, 0)]
    assert "frozen weights have changed" in kept.why_not
    kept = keeping(3)
    for _ in range(2):
        grown(kept, [0, 1, 2, 3])
    kept.follow(4, behind)
    with pytest.raises(VerificationError, match="frozen weights have changed"):
        grown(kept, [0, 1, 2, 3], lambda depth: lambda x: (x * depth + 1,))


def test_of_what_was_compared_in_an_epoch_before_one_micro_batch_is_compared_again() -> None:
    kept, iteration = keeping(3), {i: digests(X[[2 * i, 2 * i + 1]], 2, None) for i in range(3)}
    grown(kept, [0, 1, 2, 3, 4, 5])
    kept.begin_epoch()
    assert kept.look_up(iteration) == frozenset()
    grown(kept, [4, 5])
    kept.begin_epoch()
    assert kept.look_up(iteration) == {1, 2} and kept.taps(0) == {3}
    kept.fill(0, 3, deeper(3)(X[:2]), 3)
    assert kept.look_up(iteration) == {0, 1, 2}


def test_what_was_kept_goes_if_no_forward_may_begin_there() -> None:
    kept = keeping(3)
    grown(kept, [0, 1, 2, 3])
    kept.follow(4, lambda depth: behind(depth) if depth == 4 else None)
    assert grown(kept, [0, 1, 2, 3]) == [(0, 4)] * 2
    kept.follow(2, behind)  # less is frozen
    assert grown(kept, [0, 1, 2, 3]) == [(0, 2)] * 2


def test_a_replica_that_comes_later_is_told_what_was_kept_before() -> None:
    kept, other = keeping(3), FrozenOutputs(math.inf)
    grown(kept, [0, 1, 2, 3])
    for one in (kept, other):
        one.follow(4, behind, tellers=(1, 0))
    assert kept.has_news and not other.has_news
    other.accept(kept.fresh())
    assert kept.fresh() == ([], {})
    assert grown(other, [0, 1, 2, 3]) == [(0, 4), (3, 4)]
    kept.accept(other.fresh())
    assert grown(kept, [2, 3, 1, 0]) == [(0, 4), (4, 0)]


def test_a_sample_that_comes_twice_in_an_iteration_is_there_for_both() -> None:
    kept, make = keeping(3), deeper
    grown(kept, [0, 1, 2, 3, 4, 5])
    kept.follow(4, behind)
    grown(kept, [4, 5])
    iteration = {0: [0, 1], 1: [1, 2], 2: [2, 4]}  # the last has one that is kept behind four nodes
    assert kept.look_up({i: digests(X[rows], 2, None) for i, rows in iteration.items()}) == {0, 1}
    for i in (2, 0, 1):
        if i < 2:
            assert torch.equal(kept.read(i, HOST, 1).tensors[0], X[iteration[i]] * 3)
        for depth in sorted(kept.taps(i, 3 if i < 2 else 0)):
            kept.fill(i, depth, make(depth)(X[iteration[i]]), depth)
    assert grown(kept, [0, 4, 1, 2]) == [(0, 4), (0, 4)]  # all are compared, and 1 and 2 go on as well
    assert grown(kept, [0, 4, 1, 2]) == [(0, 4), (4, 0)]
