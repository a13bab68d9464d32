"""Terms that lie anywhere are summed in their own order, bit for bit as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.collectives import sum_in_order
from tests import processes

LIMIT = timedelta(seconds=30)


def terms(count: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Of very different sizes, so that another order has another sum."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(length, generator=generator) * 10.0**i).to(dtype) for i in range(count)]


def summed(rank: int, sources: Sequence[int], length: int, dtype: torch.dtype) -> Tensor:
    dist.init_process_group("gloo", rank=rank, world_size=max(sources) + 1, timeout=LIMIT)
    mine = [term for term, source in zip(terms(len(sources), length, dtype), sources, strict=True) if source == rank]
    return sum_in_order(mine, sources, dist.group.WORLD)


@pytest.mark.parametrize(
    ("sources", "length", "dtype"),
    [
        ((0, 1), 7, torch.float32),
        ((1, 0), 8, torch.bfloat16),
        ((1, 0, 2, 0), 10, torch.float32),
        ((0, 1), 2**23 + 3, torch.float32),  # in two parts
        ((2, 1, 0, 0, 1), 1, torch.complex64),
    ],
)
def test_terms_are_added_in_their_order(
    sources: Sequence[int], length: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    given = terms(len(sources), length, dtype)
    expected = reduce(torch.add, given)
    for found in processes.results(processes.run(max(sources) + 1, summed, sources, length, dtype, folder=tmp_path)):
        assert torch.equal(found, expected)
    if len(sources) > 2 and length > 1:
        assert not torch.equal(expected, reduce(torch.add, given[::-1])), "the order makes a difference"
