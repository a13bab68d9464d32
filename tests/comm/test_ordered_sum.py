"""Terms that lie anywhere are summed in their own order, bit for bit as in one process."""

from __future__ import annotations

from datetime import timedelta
from functools import reduce
from pathlib import Path

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


# whose process has which term, the length of terms, and their type
CASES: list[tuple[tuple[int, ...], int, torch.dtype]] = [
    ((0, 1), 7, torch.float32),
    ((1, 0), 8, torch.bfloat16),
    ((1, 0, 2, 0), 10, torch.float32),
    ((0, 1, 0), 2**23 + 3, torch.float32),  # in two parts
    ((0, 1), 5, torch.complex64),
    ((1, 0), 9, torch.float16),
    ((2, 1, 0, 0, 1), 1, torch.complex64),
]


def summed(rank: int) -> list[bool]:
    """Whether the sum of each case has the bits of one process, where this process has terms."""
    dist.init_process_group("gloo", rank=rank, world_size=3, timeout=LIMIT)
    found = []
    for sources, length, dtype in CASES:
        group, given = dist.new_group(range(max(sources) + 1)), terms(len(sources), length, dtype)
        if mine := [term for term, source in zip(given, sources, strict=True) if source == rank]:
            total = sum_in_order(mine, sources, group)
            found.append(torch.equal(total, reduce(torch.add, given)))
    return found


def test_terms_are_added_in_their_order(tmp_path: Path) -> None:
    assert processes.each(3, summed, folder=tmp_path) == [[True] * 7, [True] * 7, [True] * 2]
    sources, length, dtype = CASES[2]
    given = terms(len(sources), length, dtype)
    assert not torch.equal(reduce(torch.add, given), reduce(torch.add, given[::-1])), "the order makes a difference"
