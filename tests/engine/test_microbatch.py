"""A batch is split into micro-batches, and their results are put together as if it had never been."""

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_avgpipe.engine.microbatch import divided, merge, split, split_with
from lightning_avgpipe.engine.sample_layout import BatchInfo, EarlierBatches
from lightning_avgpipe.errors import BatchError

Point = namedtuple("Point", ["x", "y"])


def samples(n: int, *shape: int) -> Tensor:
    return torch.arange(n * torch.Size(shape).numel(), dtype=torch.float32).reshape(n, *shape)


# -- splitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_sizes_are_those_of_tensor_split(count):
    x = samples(7, 2)
    parts = split(x, count)
    expected = torch.tensor_split(x, min(count, 7))
    assert [part.index for part in parts] == list(range(len(expected)))
    assert all(torch.equal(part.data, chunk) for part, chunk in zip(parts, expected, strict=True))
    assert [part.size for part in parts] == [len(chunk) for chunk in expected]
    assert [part.weight for part in parts] == [len(chunk) / 7 for chunk in expected]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_shares_of_a_batch_are_its_micro_batches_in_order_and_count_by_their_samples(count):
    parts = split(torch.arange(13), 6)
    shares = divided(parts, count)
    assert len(shares) == min(count, len(parts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [part.index for part in shares[-1]] == list(range(len(shares[-1])))
    assert torch.equal(torch.cat([part.data for share in shares for part in share]), torch.arange(13))
    for share in shares:
        samples = sum(part.size for part in share)
        assert sum(part.weight for part in share) == pytest.approx(len(shares) * samples / 13)


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
    merged = merge([part.data for part in parts], [part.size for part in parts])
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


def scores(n: int) -> list[dict[str, Any]]:
    """Results per sample, with tensors that are as long as a micro-batch of two."""
    return [{"scores": samples(2) + k, "label": k % 2, "name": f"s{k}"} for k in range(n)]


PER_SAMPLE: dict[str, list[Any]] = {
    "dicts with numbers": scores(6),
    "dicts of tensors": [{"scores": samples(2), "label": torch.tensor(k)} for k in range(6)],
    "tensors": list(samples(6, 4)),
    "tensors without dimensions": list(samples(6)),
    "pairs": [(k, samples(2) + k) for k in range(6)],
    "boxes": [samples(k % 3, 4) for k in range(6)],
    "detections": [{"boxes": samples(k + 4, 4)} if k % 2 else None for k in range(6)],
    "images": [samples(5, k + 4, 4) for k in range(6)],
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_lists_with_one_element_per_sample_are_joined(name: str, size: int) -> None:
    expected = PER_SAMPLE[name]
    parts = [expected[i : i + size] for i in range(0, 6, size)]
    merged = merge(parts, [size] * len(parts))
    assert len(merged) == 6 and all(one is other for one, other in zip(merged, expected, strict=True))


@pytest.mark.parametrize("rows", [list, tuple])
def test_micro_batches_of_several_sizes_tell_samples_from_columns(rows: type) -> None:
    predictions = samples(5, 2)
    merged = merge([rows(predictions[:2]), rows(predictions[2:4]), rows(predictions[4:])], [2, 2, 1])
    assert type(merged) is rows and torch.equal(torch.stack(tuple(merged)), predictions)


def test_a_record_that_is_as_long_as_a_micro_batch_keeps_its_columns() -> None:
    first, second, shared = samples(2, 3), samples(2, 3) + 6, samples(7, 3)
    both = torch.cat((first, second))
    predictions, targets = merge([[first, first], [second, second]], [2, 2])
    assert torch.equal(predictions, both) and torch.equal(targets, both)
    predictions, same = merge([[first, shared], [second, shared]], [2, 2])
    assert torch.equal(predictions, both) and same is shared
    predictions, loss = merge([[first, torch.tensor(1.0)], [second, torch.tensor(3.0)]], [2, 2])
    assert torch.equal(predictions, both) and loss == 2.0
    loss, accuracy = merge([tuple(torch.tensor([1.0, 0.0])), tuple(torch.tensor([3.0, 1.0]))], [2, 2])
    assert (loss, accuracy) == (2.0, 0.5)
    outputs, metrics = merge([({"y": y}, {"loss": y.mean()}) for y in (first, second)], [2, 2])
    assert torch.equal(outputs["y"], both) and metrics["loss"] == both.mean()
    names, boxes = merge([(["a", "b"], list(samples(2, 4))), (["c", "d"], list(samples(2, 4)))], [2, 2])
    assert names == ["a", "b", "c", "d"] and len(boxes) == 4
    assert torch.equal(merge([[samples(1, 3)], [samples(1, 3)]], [1, 1])[0], torch.cat((samples(1, 3), samples(1, 3))))


# -- where samples are: found, or the batch is refused ---------------------------------------------------------------


EIGHT, STACKED = BatchInfo(8), BatchInfo(8, stacked=True)


def of(*shape: int) -> Tensor:
    return torch.rand(shape)


def images(n: int, size: int | None = 8) -> list[Tensor]:
    return [of(3, size or 6 + i, 8) for i in range(n)]


def targets(n: int) -> list[dict[str, Tensor]]:
    return [{"boxes": of(1 + i % 3, 4), "labels": torch.ones(1 + i % 3)} for i in range(n)]


class Graphs:
    """Nodes of several graphs, as libraries put them together."""

    def __init__(self) -> None:
        self.x, self.batch = of(20, 4), torch.arange(20) // 5


class Labels:
    """Names of columns, as libraries keep them: ``pandas.Index``."""

    def __init__(self, *names: str) -> None:
        self.names, self.shape = names, (len(names),)

    def __len__(self) -> int:
        return len(self.names)

    def __array__(self) -> np.ndarray:
        return np.array(self.names)


SPLIT = {
    "columns": ((of(8, 3), of(8)), EIGHT, 8),
    "pairs of the same shape": ([of(8, 3), of(8, 3)], EIGHT, 8),
    "a smaller batch": ((of(5, 3), of(5)), EIGHT, 5),
    "one sample": ((of(1, 3), of(1)), EIGHT, 1),
    "an empty batch": ((of(0, 3), of(0)), EIGHT, 0),
    "a square, stacked": (of(8, 8), STACKED, 8),
    "two columns of two samples, stacked": ([of(2, 3), of(2, 3)], BatchInfo(2, stacked=True), 2),
    "position ids": ({"ids": of(8, 5), "positions": of(1, 5)}, EIGHT, 8),
    "a mask for all": ((of(8, 5, 4), of(1, 1, 5, 5)), EIGHT, 8),
    "images of several sizes": ((images(8, None), targets(8)), EIGHT, 8),
    "detection": ((tuple(images(8)), tuple(targets(8))), EIGHT, 8),
    "detection without a dataloader": ((tuple(images(4)), tuple(targets(4))), BatchInfo(), 4),
    "detection of two": ((tuple(images(2)), tuple(targets(2))), BatchInfo(2), 2),
    "samples as they are": (list(zip(images(4), targets(4), strict=True)), BatchInfo(4), 4),
    "images and labels": ((images(8), of(8)), EIGHT, 8),
    "images alone": (images(8), EIGHT, 8),
    "targets with other keys": ([{"boxes": of(2, 4)}, {}, {"boxes": of(1, 4)}, {}], BatchInfo(4), 4),
    "scalars": ((of(4, 2), [torch.tensor(float(i)) for i in range(4)]), BatchInfo(4), 4),
    "arrays": ({"x": np.zeros((8, 2)), "y": of(8)}, EIGHT, 8),
    "objects in a list": ([Graphs() for _ in range(4)], BatchInfo(4), 4),
    "names of columns": ({"x": of(8, 2), "columns": Labels("p", "q")}, EIGHT, 8),
    "lists of strings": ({"x": of(8, 2), "text": ["a"] * 8, "names": ["p", "q"]}, EIGHT, 8),
    "strings alone": (["a", "b", "c"], BatchInfo(), 3),
    "pairs of strings and numbers": ([("a", 0), ("b", 1), ("c", 2)], BatchInfo(), 3),
    "columns of strings and numbers": ((("a", "b", "c"), (0, 1, 2)), BatchInfo(), 3),
    "columns beside one string": ({"text": ["a", "b"], "label": (0, 1), "split": "train"}, BatchInfo(), 2),
    "a number beside samples": ({"x": of(4, 3), "y": [of(4)], "temperature": torch.tensor(0.5)}, BatchInfo(), 4),
    "more labels than samples": ({"x": of(4), "labels": [0, 1, 2]}, BatchInfo(), 4),
}


@pytest.mark.parametrize("name", SPLIT)
def test_samples_are_found(name: str) -> None:
    batch, expected, size = SPLIT[name]
    parts = split(batch, 4, expected)
    assert sum(part.size for part in parts) == size and len(parts) == max(1, min(4, size))


@pytest.mark.parametrize(
    "batch", [(torch.tensor(1.0), 3, None, "text", []), {"text": ["a", "b"], "labels": [0, 1, 2]}], ids=str
)
def test_a_batch_whose_samples_cannot_be_counted_stays_whole(batch: Any) -> None:
    (part,) = split(batch, 4)
    assert part.weight == 1.0


def test_what_all_samples_share_is_repeated() -> None:
    batch = {"ids": of(8, 5), "positions": of(1, 5), "array": np.arange(8)}
    parts = split(batch, 2, EIGHT)
    assert all(part.data["positions"] is batch["positions"] for part in parts)
    assert [part.data["array"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


REFUSED = {
    "time first": ((of(6, 8, 4), of(6, 8)), EIGHT, r"8 entries in their second dimension.*batch\[0\] \(6, 8, 4\)"),
    "time first, as long as the batch": ((of(8, 8, 4), of(8, 8)), EIGHT, "second dimension"),
    "time first, with labels": ((of(6, 8, 4), of(8)), EIGHT, r"which its dataloader makes of 8.*6 in batch\[0\]"),
    "one step, time first": ((of(1, 8, 4), of(8)), EIGHT, r"1 in batch\[0\] \(1, 8, 4\)"),
    "class weights": ((of(8, 2), of(8), of(5)), EIGHT, r"5 in batch\[2\] \(5,\)"),
    "more samples than there are": ((of(16, 2), of(16)), EIGHT, "which its dataloader makes of 8"),
    "as many images as channels": ((images(3), of(3)), BatchInfo(3), r"batch\[0\] is a list of 3 elements"),
    "as many views as samples": ([of(2, 3), of(2, 3)], BatchInfo(2), "batch is a list of 2 elements"),
    "images without a dataloader": (images(8), BatchInfo(), "the batch may hold 3 or 8 samples.*does not say"),
    "packed": ((pack_sequence([of(1)] * 8), of(8)), EIGHT, r"batch\[0\] is a PackedSequence"),
    "nested": (
        torch.nested.nested_tensor([of(2), of(3)], layout=torch.jagged),
        BatchInfo(2),
        "batch is a NestedTensor",
    ),
    "sparse": ((of(8, 3).to_sparse(), of(8)), EIGHT, r"batch\[0\] is a Tensor"),
    "graphs": (Graphs(), EIGHT, "batch is a Graphs"),
    "graphs and labels": ({"graphs": Graphs(), "y": of(8)}, EIGHT, r"batch\['graphs'\] is a Graphs"),
    "names, as many as samples": ({"x": of(2, 5), "columns": Labels("p", "q")}, BatchInfo(2), "is a Labels"),
    "a set": ((of(8), {1, 2}), EIGHT, r"batch\[1\] is a set"),
    "tensors that disagree": (
        {"image": of(8, 3), "target": {"boxes": of(5, 4)}, "weight": of(8)},
        BatchInfo(),
        r"8 in batch\['image'\] \(8, 3\), batch\['weight'\] \(8,\); 5 in batch\['target'\]\['boxes'\] \(5, 4\)",
    ),
    "transposed": ({"a": of(8, 5), "b": of(5, 8)}, BatchInfo(), r"8 in batch\['a'\] \(8, 5\); 5 in batch\['b'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_split_wrongly_is_refused_with_the_way_out(name: str) -> None:
    batch, expected, message = REFUSED[name]
    with pytest.raises(BatchError, match=message) as caught:
        split(batch, 4, expected)
    assert "define split_batch(batch, num_microbatches)" in str(caught.value)
    (part,) = split(batch, 1, expected)
    assert part.weight == 1.0, "one micro-batch needs no answer"


def test_batches_before_decide_between_two_readings() -> None:
    seen = EarlierBatches()
    split(images(8), 4, EIGHT, seen)
    assert [len(part.data) for part in split(images(3), 4, EIGHT, seen)] == [1, 1, 1]
    seen = EarlierBatches()
    split((of(8, 4), of(8, 4)), 4, EIGHT, seen)
    assert sum(part.size for part in split((of(2, 4), of(2, 4)), 4, EIGHT, seen)) == 2
    assert sum(part.size for part in split((of(8, 8), of(8, 8)), 4, EIGHT, seen)) == 8


def test_micro_batches_may_have_a_smallest_size() -> None:
    assert [part.size for part in split(torch.zeros(9, 1), 8, smallest=2)] == [3, 2, 2, 2]
    assert [part.size for part in split(torch.zeros(1, 1), 8, smallest=2)] == [1]
