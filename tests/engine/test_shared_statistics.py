"""Replicas of a stage normalise as one process that has all of their samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.engine.observer import Work
from lightning_avgpipe.engine.shared_statistics import SharedStatistics
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action
from tests import threads


def work(kind: Any) -> Work:
    return Work(0, 0, Action(kind, 0))


def together(layers: list[Any], parts: list[Tensor], gradients: list[Tensor]) -> list[Any]:
    """Output, gradients of input and weights of each replica, after a forward and a backward of all."""

    def run(cluster: Cluster) -> Any:
        shared, layer = SharedStatistics(cluster.group, on_host=False), layers[cluster.rank]
        x = parts[cluster.rank].clone().requires_grad_()
        found: list[Tensor] = []
        shared.perform(work(FORWARD), lambda: found.append(layer(x)))  # type: ignore[func-returns-value]
        shared.perform(work(BACKWARD), lambda: found[0].backward(gradients[cluster.rank]))
        return found[0].detach(), x.grad, [p.grad for p in layer.parameters()]

    return threads.results(threads.run(StageMap.on(DeviceLayout(2), 2), run))


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str
)
def test_two_replicas_are_as_one_process_with_the_samples_of_both(options: dict[str, Any]) -> None:
    plain = nn.BatchNorm2d(3, **options).double()
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    layers = [copy.deepcopy(plain) for _ in range(2)]
    torch.manual_seed(5)
    parts = [torch.randn(size, 3, 4, 2, dtype=torch.float64) * size + size for size in (5, 2)]
    gradients = [torch.randn_like(part) for part in parts]
    found = together(layers, parts, gradients)
    x = torch.cat(parts).requires_grad_()
    expected = plain(x)
    expected.backward(torch.cat(gradients))
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([output for output, _, _ in found]), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in found]), x.grad, rtol=0, atol=1e-10)
    for i, parameter in enumerate(plain.parameters()):
        torch.testing.assert_close(found[0][2][i] + found[1][2][i], parameter.grad, rtol=0, atol=1e-10)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(layers[0].get_buffer(name), buffer, rtol=0, atol=1e-10)
        assert torch.equal(layers[0].get_buffer(name), layers[1].get_buffer(name)), name
