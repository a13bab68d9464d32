"""A batch is split into micro-batches, and their results are put together as if it had never been."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.engine.microbatch import MicroBatch, batch_size, merge, split, split_with
from lightning_avgpipe.errors import BatchError

Point = namedtuple("Point", ["x", "y"])


def samples(n: int, *shape: int) -> Tensor:
    return torch.arange(n * torch.Size(shape).numel(), dtype=torch.float32).reshape(n, *shape)


def data(parts: list[MicroBatch]) -> list[Any]:
    return [part.data for part in parts]


def sizes(parts: list[MicroBatch]) -> list[int]:
    return [part.size for part in parts]


# -- the size of a batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (samples(4, 3), 4),
        ({"x": samples(4, 3), "y": [samples(4)], "temperature": torch.tensor(0.5)}, 4),
        ((samples(0, 3), "text"), 0),
        (["a", "b", "c"], 3),
        (("a", "b", "c"), 3),
        ([("a", 0), ("b", 1), ("c", 2)], 3),
        ((("a", "b", "c"), (0, 1, 2)), 3),
        ({"text": ["a", "b"], "label": (0, 1), "split": "train"}, 2),
        ({"text": ["a", "b"], "labels": [0, 1, 2]}, None),
        ({"x": samples(4), "labels": [0, 1, 2]}, 4),
        ((torch.tensor(1.0), 3, None, "text", []), None),
    ],
)
def test_the_batch_size_is_dimension_0_of_all_tensors_or_else_the_length_of_the_lists(batch, size):
    assert batch_size(batch) == size


def test_tensors_that_disagree_are_an_error_that_names_them_and_the_way_out():
    batch = {"image": samples(8, 3), "target": {"boxes": samples(5, 4)}, "weight": samples(8)}
    with pytest.raises(BatchError) as error:
        split(batch, 2)
    message = str(error.value)
    assert "8 in batch['image'] (8, 3), batch['weight'] (8,); 5 in batch['target']['boxes'] (5, 4)" in message
    assert "split_batch(batch, num_microbatches)" in message


# -- splitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_sizes_are_those_of_tensor_split(count):
    x = samples(7, 2)
    parts = split(x, count)
    expected = torch.tensor_split(x, min(count, 7))
    assert [part.index for part in parts] == list(range(len(expected)))
    assert all(torch.equal(part.data, chunk) for part, chunk in zip(parts, expected, strict=True))
    assert sizes(parts) == [len(chunk) for chunk in expected]
    assert [part.weight for part in parts] == [len(chunk) / 7 for chunk in expected]


# -- the user's splitter ---------------------------------------------------------------------------------------------


def test_the_users_parts_are_weighted_by_their_sizes():
    parts = split_with(lambda batch, m: (batch[:1], batch[1:]), samples(4), 2)
    assert [(part.index, part.size, part.weight) for part in parts] == [(0, 1, 0.25), (1, 3, 0.75)]
    assert torch.equal(parts[1].data, samples(4)[1:])


@pytest.mark.parametrize(
    ("returned", "found"), [(None, "NoneType"), ({}, "dict"), ([], "0 micro-batches"), ([1, 2, 3], "3 micro-batches")]
)
def test_a_splitter_that_returns_something_else_is_an_error(returned, found):
    with pytest.raises(BatchError, match=f"split_batch returned {found}.*num_microbatches=2"):
        split_with(lambda batch, m: returned, samples(4), 2)


# -- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_merge_undoes_split(count):
    batch = {"x": samples(5, 2), "point": Point(samples(5), "text"), "names": ["a", "b", "c", "d", "e"], "sample": None}
    parts = split(batch, count)
    merged = merge(data(parts), sizes(parts))
    assert torch.equal(merged["x"], batch["x"]) and torch.equal(merged["point"].x, batch["point"].x)
    assert type(merged["point"]) is Point and merged["point"].y == "text"
    assert merged["names"] == batch["names"] and merged["sample"] is None


@pytest.mark.parametrize(
    "parts",
    [
        [3, 4],
        ["a", "b"],
        [1.0, 1],
        [None, 1.0],
        [["a"], ["b", "c"], "d"],
        [{"loss": 1.0}, {"loss": 1.0, "extra": 2}],
        [(1.0, 2, 3), [1.0, 2, 3]],
    ],
    ids=str,
)
def test_what_fits_no_rule_is_a_list_of_the_parts(parts):
    assert merge(parts, [2] * len(parts)) == parts
