"""What a forked child computes and raises is what this process would."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_avgpipe.utils.forked import ForkError, in_child


class Odd(Exception):
    """Cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_a_child_computes_with_as_many_threads_and_rounds_alike(two_threads: None) -> None:
    layers = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))
    batch = torch.randn(256, 512)

    def work() -> tuple[int, torch.Tensor]:
        layers.zero_grad()
        layers(batch).square().mean().backward()
        return torch.get_num_threads(), layers[0].weight.grad.clone()

    (here, expected), (there, found) = work(), in_child(work, "computes a gradient")
    assert here == there == 2 and torch.equal(expected, found)


def test_an_error_of_a_child_is_raised_with_its_traceback() -> None:
    def work() -> None:
        raise ZeroDivisionError("of the child")

    with pytest.raises(ZeroDivisionError, match="of the child") as raised:
        in_child(work, "divides")
    assert "in work" in str(raised.value.__cause__)


def test_an_error_that_cannot_be_sent_is_named() -> None:
    def work() -> None:
        raise Odd(1, 2)

    with pytest.raises(ForkError, match="Odd: 1 and 2"):
        in_child(work, "fails")


def test_a_child_for_which_there_is_no_memory_is_named_and_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", fork)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ForkError, match=r"the child that adds could not be forked: .*Cannot allocate memory") as raised:
        in_child(lambda: 1 + 1, "adds")
    assert os.listdir("/proc/self/fd") == before, raised
