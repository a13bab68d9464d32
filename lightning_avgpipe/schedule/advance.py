"""The first advance: by how many forwards stages should run ahead, computed from measured costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_avgpipe.schedule.builders import check_sizes, from_warm_up
from lightning_avgpipe.schedule.costs import StageCosts, least_possible_s
from lightning_avgpipe.schedule.simulator import simulate

# Relative: times that differ by less differ only in the order of their additions.
_ROUNDING = 1e-12


def uneven_steps(costs: StageCosts) -> tuple[int, ...]:
    """Return by how many forwards each stage should be ahead of the next, for stages of unequal cost.

    ``w_k - w_{k+1} = max(1, ceil((f_k + b_k + f_{k+1} + b_{k+1} + tau_f + tau_b) / P - 1))`` with P the largest of all
    stages' f + b and all transfers, and tau a hop's transfer plus latency: so many micro-batches pass while one makes
    the round over the hop.

    Args:
        costs: seconds per action and message.
    Returns:
        One number of forwards for each hop, shape ``(K-1,)``.
    """
    busy = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    period = max([*busy, *costs.send_forward_s, *costs.send_backward_s])
    steps = []
    for k in range(len(busy) - 1):
        travel = costs.send_forward_s[k] + costs.send_backward_s[k] + 2 * costs.latency_s[k]
        # a hair less than the quotient, so that an exact integer is not rounded up
        ahead = math.ceil((busy[k] + busy[k + 1] + travel) / period - 1 - 1e-9) if period > 0 else 1
        steps.append(max(1, ahead))
    return tuple(steps)


def stepped_warm_up(steps: Sequence[int], num_microbatches: int, advance: int) -> tuple[int, ...]:
    """Return the warm-up of advance h where hops need unequal steps.

    The largest step between neighbours is 1+h. From h = 0, which is 1F1B, the step of each hop grows with h until it is
    that of ``steps``. When all hops have reached theirs, all grow further::

        steps = (1, 3)     h = 0: (1, 1)   h = 1: (1, 2)   h = 2: (1, 3)   h = 3: (2, 4)

    Equal steps give advance forward propagation, (K-1-k)(1+h). A larger h never gives a smaller warm-up.

    Args:
        steps: step of each hop, as :func:`uneven_steps` returns them, each at least 1.
        num_microbatches: M, number of micro-batches of an iteration.
        advance: h.
    Returns:
        The warm-up of each stage, shape ``(len(steps) + 1,)``.
    """
    check_sizes(len(steps) + 1, num_microbatches)
    beyond = max(0, 1 + advance - max(steps, default=1))
    result = [0]
    for step in reversed(steps):
        result.append(result[-1] + min(step, 1 + advance) + beyond)
    return tuple(min(num_microbatches, w) for w in reversed(result))


def first_advance(steps: Sequence[int], num_microbatches: int, costs: StageCosts) -> int:
    """Return the advance to begin with: the smallest of the fastest by simulation, up to the largest of ``steps``.

    Advance 0, which is 1F1B, is among the candidates, because more forwards ahead can be slower.

    Args:
        steps: step of each hop, as ``uneven_steps(costs)``.
        num_microbatches: M, number of micro-batches of an iteration.
        costs: seconds per action and message.
    """
    bound = least_possible_s(costs, num_microbatches)
    best, best_s = 0, math.inf
    for advance in range(min(num_microbatches, max(steps, default=1))):
        schedule = from_warm_up(stepped_warm_up(steps, num_microbatches, advance), num_microbatches)
        seconds = simulate(schedule, costs).iteration_s
        if seconds < best_s * (1 - _ROUNDING):
            best, best_s = advance, seconds
        if best_s <= bound * (1 + _ROUNDING):
            break
    return best
