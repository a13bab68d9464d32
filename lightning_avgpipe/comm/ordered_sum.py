"""A sum over processes whose terms are added in a fixed order, by each process for itself.

::

    process 0   a        a b c d   a + b + c + d
    process 1   b, d  -> a b c d   a + b + c + d
    process 2   c        a b c d   a + b + c + d

The bits depend neither on who has which term nor on how many have one. All directions of all links are in use at once,
so that two processes need no longer than for an all-reduce; of three or more each receives all terms of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.codec import as_bytes

__all__ = ["sum_in_order"]

_PART = 8 * 1024**2  # elements that are gathered at once, so that the terms of others take little memory


def sum_in_order(
    mine: Sequence[Tensor],
    sources: Sequence[int],
    group: dist.ProcessGroup,
    run: Callable[[Callable[[], object]], None],
) -> Tensor:
    """The sum of all terms, the same bits on all processes; all of them call it.

    Args:
        mine: this process's terms, in their order: at least one; flat, of the same length and type everywhere.
        sources: for each term, in the order in which they are added, the process that has it, as a rank in the group.
        group: of the processes, each of which has a term.
        run: runs what waits for the other processes.
    Returns:
        Flat, of the length of a term.
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
