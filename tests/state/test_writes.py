"""Whatever a hook writes into a parameter or buffer is seen, in place or not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_avgpipe.state.writes import Writes


def assign(layer: nn.Module) -> None:
    for tensor in (layer.weight, layer.running_mean):
        tensor.data = tensor.data.clamp(-0.1, 0.1)


@torch.no_grad()
def set_(layer: nn.Module) -> None:
    for tensor in (layer.weight, layer.running_mean):
        tensor.set_(torch.empty_like(tensor))


def swap(layer: nn.Module) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.empty_like(layer.weight)))
    torch.utils.swap_tensors(layer.running_mean, torch.empty_like(layer.running_mean))


def in_place(layer: nn.Module) -> None:
    for tensor in (layer.weight, layer.running_mean):
        tensor.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("write", [in_place, assign, set_, swap])
def test_each_form_of_a_write_is_seen(write: Callable[[nn.Module], None], device: str) -> None:
    layer = nn.BatchNorm1d(4, device=device)
    layer.running_mean.fill_(1.0)
    with Writes(layer) as writes:
        write(layer)
    assert writes.written == {"weight", "running_mean"}


def test_a_move_to_other_memory_is_no_write() -> None:
    layer = nn.BatchNorm1d(4)
    with Writes(layer) as writes:
        for tensor in (layer.weight, layer.running_mean):
            tensor.data = tensor.data.clone()
    assert not writes.written


def test_what_is_only_read_or_put_back_is_no_write() -> None:
    layer = nn.BatchNorm1d(4)
    layer.register_buffer("adjacency", torch.eye(2).to_sparse())
    with Writes(layer) as writes:
        home, layer.weight.data = layer.weight.data, layer.weight.data.clone()
        layer.weight.data = home
        float(layer.running_mean.sum() + layer.adjacency.to_dense().sum())
    assert not writes.written
