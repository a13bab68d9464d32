"""The first advance: how far ahead measured costs ask stages to run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_avgpipe.schedule.builders import check_sizes, from_warm_up
from lightning_avgpipe.schedule.costs import StageCosts, least_possible_s
from lightning_avgpipe.schedule.simulator import simulate

# Relative; times that differ by less differ only in the order of their additions.
_ROUNDING = 1e-12


def uneven_steps(costs: StageCosts) -> tuple[int, ...]:
    """How many forwards each stage should be ahead of the next, shape ``(K-1,)``, for stages of unequal cost.

    ``w_k - w_{k+1} = max(1, ceil((f_k + b_k + f_{k+1} + b_{k+1} + tau_f + tau_b) / P - 1))`` with P the largest of all
    stages' f + b and all transfers, and tau a hop's transfer plus latency: so many micro-batches pass while one makes
    the round over the hop.
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
    """The warm-up of advance h where hops deserve unequal steps, shape ``(len(steps) + 1,)``.

    The largest step between neighbours is 1+h. From h = 0, which is 1F1B, each hop's step grows with h until it is what
    ``steps`` asks for, and when all have got there, all grow on::

        steps = (1, 3)     h = 0: (1, 1)   h = 1: (1, 2)   h = 2: (1, 3)   h = 3: (2, 4)

    Equal steps give advance forward propagation, (K-1-k)(1+h). A larger h is never a smaller warm-up.

    Args:
        steps: of the hops, as :func:`uneven_steps` finds them, each at least 1.
        num_microbatches: M.
        advance: h.
    """
    check_sizes(len(steps) + 1, num_microbatches)
    beyond = max(0, 1 + advance - max(steps, default=1))
    result = [0]
    for step in reversed(steps):
        result.append(result[-1] + min(step, 1 + advance) + beyond)
    return tuple(min(num_microbatches, w) for w in reversed(result))


def first_advance(steps: Sequence[int], num_microbatches: int, costs: StageCosts) -> int:
    """The advance to begin with where costs are measured: up to what ``steps`` asks for, the smallest of the fastest.

    Never slower than 1F1B, which more forwards ahead can be.

    Args:
        steps: of the hops, as ``uneven_steps(costs)``.
        num_microbatches: M.
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
