"""Replicas of a stage normalise as one process that has all of their samples."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.engine.observer import Work
from lightning_avgpipe.engine.shared_statistics import SharedStatistics
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action


class Meeting:
    """Two threads that gather each other's tensors."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._parts: dict[int, Tensor] = {}

    def member(self, rank: int) -> Any:
        meeting = self

        class Member:
            ranks = (0, 1)
            process_group: Any

            def allgather(self, parts: list[Tensor], mine: Tensor) -> Any:
                meeting._parts[rank] = mine
                meeting._barrier.wait()
                for i, part in enumerate(parts):
                    part.copy_(meeting._parts[i])
                meeting._barrier.wait()
                return SimpleNamespace(is_completed=lambda: False, wait=lambda: None)

            def wait_for(self, work: Any, what: str) -> None:
                assert "batch normalisation" in what
                work.wait()

        member = Member()
        member.process_group = member
        return member


def work(kind: Any) -> Work:
    return Work(0, 0, Action(kind, 0))


def together(layers: list[nn.Module], parts: list[Tensor], gradients: list[Tensor]) -> list[Any]:
    """Output, gradients of input and weights of each replica, after a forward and a backward of all."""
    meeting = Meeting()

    def run(rank: int) -> Any:
        shared = SharedStatistics(meeting.member(rank), on_host=False)
        x = parts[rank].clone().requires_grad_()
        found: list[Tensor] = []
        shared.perform(work(FORWARD), lambda: found.append(layers[rank](x)))  # type: ignore[func-returns-value]
        shared.perform(work(BACKWARD), lambda: found[0].backward(gradients[rank]))
        return found[0].detach(), x.grad, [p.grad for p in layers[rank].parameters()]

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def layers_of(kind: str) -> list[nn.Module]:
    torch.manual_seed(3)
    made: list[nn.Module] = []
    for _ in range(3):
        layer: nn.Module = {
            "2d": lambda: nn.BatchNorm2d(3),
            "without weights": lambda: nn.BatchNorm2d(3, affine=False),
            "without running means": lambda: nn.BatchNorm2d(3, track_running_stats=False),
            "cumulative": lambda: nn.BatchNorm2d(3, momentum=None),
        }[kind]()
        made.append(layer.double())
    for layer in made:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.linspace(0.5, 2, parameter.numel()))
    return made


@pytest.mark.parametrize("kind", ["2d", "without weights", "without running means", "cumulative"])
def test_two_replicas_are_as_one_process_with_the_samples_of_both(kind: str) -> None:
    *layers, plain = layers_of(kind)
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
