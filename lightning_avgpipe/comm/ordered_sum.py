"""A sum over processes whose terms each process adds by itself, in a fixed order.

::

    process 0   a        a b c d   a + b + c + d
    process 1   b, d  -> a b c d   a + b + c + d
    process 2   c        a b c d   a + b + c + d

The bits of the result depend neither on which process has which term nor on the number of processes. All directions of
all links are in use at once, so between two processes it takes no longer than an all-reduce. With three or more, each
process receives all terms of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.codec import as_bytes

__all__ = ["sum_in_order"]

_PART = 8 * 1024**2  # elements that are gathered at once, to limit the memory for the terms of other processes


def sum_in_order(
    mine: Sequence[Tensor],
    sources: Sequence[int],
    group: dist.ProcessGroup,
    run: Callable[[Callable[[], object]], None],
) -> Tensor:
    """Return the sum of all terms, with the same bits on all processes. All of them call it.

    Args:
        mine: this process's terms in their order, at least one; flat, of the same length and type on all processes.
        sources: for each term, in the order in which terms are added, the rank within the group of the process that has
            it.
        group: process group; each of its processes has at least one term.
        run: runs a function that waits for the other processes.

    Returns:
        The sum: flat, of the length of a term.
    """
    most = max(map(sources.count, sources))
    places = [(source, sources[:i].count(source)) for i, source in enumerate(sources)]
    total = torch.empty_like(mine[0])
    for rows in zip(total.split(_PART), *(term.split(_PART) for term in mine), strict=True):
        own = total.new_zeros(most, rows[0].numel())
        torch.stack(rows[1:], out=own[: len(mine)])
        terms = own.new_empty(group.size(), *own.shape)
        run(partial(dist.all_gather_into_tensor, as_bytes(terms), as_bytes(own), group=group))
        rows[0].copy_(reduce(torch.add, (terms[place] for place in places)))
    return total
