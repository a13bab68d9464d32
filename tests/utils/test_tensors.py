"""Sparse tensors fall into strided parts, and come out of them as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.message import pack, unpack
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.utils.placeholder import TensorMeta
from lightning_avgpipe.utils.tensors import digest, same_contents

pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta state", "ignore:.*prototype stage")

LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    Tensor.clone,
    Tensor.to_sparse,
    lambda dense: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([2.0, 3.0]), dense.shape
    ),  # not coalesced
    Tensor.to_sparse_csr,
    Tensor.to_sparse_csc,
    lambda dense: dense.to_sparse_bsr((2, 2)),
    lambda dense: dense.to_sparse_bsc((2, 2)),
]
DENSE = torch.tensor([[0.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 5.0]])


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_message_brings_a_tensor_of_any_layout(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(DENSE)
    message = pack({"graph": tensor, "name": "a", "more": [DENSE]})
    assert all(part is not None and part.layout == torch.strided for part in message.tensors)
    tree = unpack(message)
    assert tree["name"] == "a" and torch.equal(tree["more"][0], DENSE)
    assert same_contents(tree["graph"], tensor)
    if tensor.layout == torch.sparse_coo:
        assert tree["graph"].is_coalesced() == tensor.is_coalesced()


@pytest.mark.parametrize("make", LAYOUTS)
def test_contents_are_the_same_until_a_number_a_place_or_the_layout_changes(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(DENSE)
    assert same_contents(tensor, make(DENSE.clone()))
    assert not same_contents(tensor, tensor * 2)
    assert not same_contents(make(DENSE), make(DENSE).to_sparse() if tensor.layout == torch.strided else DENSE)
    assert not same_contents(DENSE.to_sparse(), DENSE.flip(1).to_sparse())
    assert not same_contents(torch.zeros(2, 2).to_sparse(), torch.zeros(3, 2).to_sparse())
    unknown = DENSE.masked_fill(DENSE == 5.0, float("nan"))
    assert same_contents(make(unknown), make(unknown.clone()))


def test_the_contents_of_complex_numbers_that_are_not_known_are_the_same() -> None:
    unknown = torch.full((2, 3), complex(float("nan"), 1.0))
    assert same_contents(unknown, unknown.clone()) and same_contents(unknown.conj(), unknown.conj().clone())
    assert not same_contents(unknown, unknown.conj())


@pytest.mark.parametrize("change", [lambda t: t.flip(0), lambda t: t.roll(1, 1), lambda t: -t, lambda t: t.to_sparse()])
def test_a_digest_tells_values_and_places(change: Callable[[Tensor], Tensor]) -> None:
    assert digest(DENSE) == digest(DENSE.t().contiguous().t())
    assert digest(DENSE) != digest(change(DENSE))


@pytest.mark.parametrize(
    ("shape", "order"),
    [((4, 8, 1, 1), torch.channels_last), ((1, 8, 1, 1), torch.channels_last), ((4, 1, 3, 5), torch.channels_last),
     ((4, 8, 1, 5), torch.channels_last), ((4, 8, 3, 1), torch.channels_last), ((1, 1, 3, 5), torch.channels_last),
     ((2, 8, 1, 1, 1), torch.channels_last_3d), ((2, 1, 3, 1, 5), torch.channels_last_3d)],
)  # fmt: skip
def test_dimensions_of_size_one_do_not_hide_that_channels_are_last(shape: Any, order: torch.memory_format) -> None:
    last, first = torch.randn(shape).to(memory_format=order), torch.randn(shape)
    for tensor in (last, first, first.transpose(0, 1).contiguous().transpose(0, 1)):
        form = TensorForm.of(tensor)
        found = form.from_bytes(as_bytes(form.on_wire(tensor)))
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride() == TensorMeta.of(tensor).stride
        assert found.is_contiguous(memory_format=order) == tensor.is_contiguous(memory_format=order)
    assert TensorForm.of(first).order is None


def test_nested_tensors_are_compared_and_do_not_travel() -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        assert same_contents(nested, torch.nested.nested_tensor(parts, layout=layout))
        assert not same_contents(nested, torch.nested.nested_tensor(parts[::-1], layout=layout))
        with pytest.raises(AvgPipeError, match=r"a nested tensor cannot go .*to_padded_tensor"):
            pack([nested])
