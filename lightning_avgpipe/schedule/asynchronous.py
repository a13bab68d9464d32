"""1F1B of a pipeline that does not drain between updates: its rows batch by batch, and its simulation.

::

    stage 0 | F0 F1 F2 F3 B0 B1 u | F4 B2 F5 B3 u | ..        M = 2, u: the stage's weights are updated
    stage 3 | F0 B0 F1 B1 u | F2 B2 F3 B3 u | ..

On each stage a batch ends with its last backward; forwards of later batches run within it.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.schedule.actions import Action
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD
from lightning_avgpipe.schedule.recipes import build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline
from lightning_avgpipe.schedule.versions import Place, WeightPolicy


def forwards_by(place: Place, batch: int, known: int) -> int:
    """Return how many forwards a stage has run when a batch ends on it, if ``known`` batches since the drain exist."""
    return min((batch + 1) * place.num_microbatches + place.warm_up, known * place.num_microbatches)


def row_of_batch(place: Place, batch: int, known: int) -> tuple[Action, ...]:
    """Return the actions of a stage from the end of the batch before to the end of this one.

    Args:
        place: stage and sizes of the pipeline.
        batch: number of the batch since the drain.
        known: number of batches since the drain that are available: as many as forwards run ahead, or all until the
            next drain.
    """
    row: list[Action] = []
    done = forwards_by(place, batch - 1, known) if batch else 0
    for i in range(batch * place.num_microbatches, (batch + 1) * place.num_microbatches):
        until = max(done, min(i + 1 + place.warm_up, known * place.num_microbatches))
        row += [Action(FORWARD, j) for j in range(done, until)]
        row.append(Action(BACKWARD, i))
        done = until
    return tuple(row)


def simulate_policy(policy: WeightPolicy, costs: StageCosts, num_microbatches: int, iterations: int) -> Timeline:
    """Predict when each action runs under a weight policy. Updates take no time.

    A backward that uses other weights than its forward did repeats the forward, except on the last stage, whose
    backwards follow their forwards at once.

    Args:
        policy: weight policy of the pipeline.
        costs: seconds per action and message.
        num_microbatches: M, number of micro-batches of an update.
        iterations: number of updates from one drain to the next.
    Returns:
        The timeline of all iterations.
    Raises:
        ScheduleError: ``iterations`` is below 1, or the policy needs more micro-batches.
    """
    policy.check(Place(0, costs.num_stages, num_microbatches))
    one = build("1f1b", costs.num_stages, num_microbatches)
    if policy.drains or iterations < 2:
        return simulate(one, costs, iterations=iterations)
    if policy.backward is not None:
        again = (*costs.forward_s[:-1], 0.0)
        costs = replace(costs, backward_s=tuple(b + f for b, f in zip(costs.backward_s, again, strict=True)))
    timeline = simulate(build("1f1b", costs.num_stages, iterations * num_microbatches), costs)
    spans = []
    for span in timeline.spans:
        t, i = divmod(span.action.micro_batch, num_microbatches)
        spans.append(replace(span, action=Action(span.action.kind, i), iteration=t))
    transfers = []
    for transfer in timeline.transfers:
        t, i = divmod(transfer.micro_batch, num_microbatches)
        transfers.append(replace(transfer, micro_batch=i, iteration=t))
    return replace(timeline, spans=tuple(spans), transfers=tuple(transfers))
