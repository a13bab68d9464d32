"""One pipeline that does not drain between updates, simulated: 1F1B from one drain to the next."""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.schedule.actions import Action
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.recipes import build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline
from lightning_avgpipe.schedule.versions import Place, WeightPolicy

__all__ = ["simulate_policy"]


def simulate_policy(policy: WeightPolicy, costs: StageCosts, num_microbatches: int, iterations: int) -> Timeline:
    """Predict when each action runs under a weight policy. Updates cost no time.

    Where backwards use other weights than forwards did, they include a forward, except on the last stage, whose
    backwards follow at once.

    Args:
        policy: of the pipeline.
        costs: seconds per action and message.
        num_microbatches: M, of an update.
        iterations: updates from one drain to the next.
    Raises:
        ScheduleError: no iteration, or too few micro-batches for the policy.
    """
    policy.check(Place(0, costs.num_stages, num_microbatches))
    one = build("1f1b", costs.num_stages, num_microbatches)
    if policy.drains or iterations < 2:
        return simulate(one, costs, iterations=iterations)
    if policy.backward is not None:
        again = (*costs.forward_s[:-1], 0.0)
        costs = replace(costs, backward_s=tuple(b + f for b, f in zip(costs.backward_s, again, strict=True)))
    timeline = simulate(build("1f1b", costs.num_stages, iterations * num_microbatches), costs)

    def renumbered(number: int) -> tuple[int, int]:
        return divmod(number, num_microbatches)

    spans = []
    for span in timeline.spans:
        t, i = renumbered(span.action.micro_batch)
        spans.append(replace(span, action=Action(span.action.kind, i), iteration=t))
    transfers = []
    for transfer in timeline.transfers:
        t, i = renumbered(transfer.micro_batch)
        transfers.append(replace(transfer, micro_batch=i, iteration=t))
    return replace(timeline, spans=tuple(spans), transfers=tuple(transfers))
