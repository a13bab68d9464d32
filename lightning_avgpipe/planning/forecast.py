"""Forecasts of the time of an iteration, by simulating the schedule with the costs of a plan's stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_avgpipe.planning import Forecast, Plan
from lightning_avgpipe.planning.freezing import num_frozen
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.planning.spp import SppPlan
from lightning_avgpipe.schedule import Schedule, StageCosts, forward_only, simulate
from lightning_avgpipe.schedule.builders import without_relays
from lightning_avgpipe.schedule.policies import WeightPolicy
from lightning_avgpipe.schedule.rules import trains

_ITERATIONS = 4  # of rolling models, after which one takes as long as the next


def idle_share(units: SppCosts, plan: SppPlan, num_microbatches: int, slowness: Sequence[float]) -> float:
    """Return the share of the time of all devices in which they do not compute, for a plan of SPP."""
    busy_s, devices = 0.0, 0
    for first, last, ranks in plan.stages:
        of_one_s = float(units.busy_s[last + 1] - units.busy_s[first])
        turns = [math.ceil((num_microbatches - j) / len(ranks)) for j in range(len(ranks))]
        busy_s += of_one_s * sum(
            n * (slowness[rank] if slowness else 1.0) for n, rank in zip(turns, ranks, strict=True)
        )
        devices += len(ranks)
    return max(0.0, 1 - busy_s / (devices * plan.makespan_s))


def stage_costs(plan: Plan, frozen: int = 0) -> StageCosts:
    """Return the costs of the stages for the simulator, in seconds if the plan was measured.

    Args:
        plan: plan of the stages.
        frozen: number of stages, from the first, that run forwards only.
    """
    hops = list(zip(plan.links, plan.stages[:-1], strict=True))
    return StageCosts(
        [stage.forward for stage in plan.stages],
        [stage.backward * (stage.index >= frozen) for stage in plan.stages],
        [link.per_byte * stage.wire_bytes for link, stage in hops],
        [link.per_byte * stage.gradient_bytes for link, stage in hops],
        [link.latency for link, _ in hops],
    )


def forecast_of(
    plan: Plan,
    schedule: Schedule | None,
    policy: WeightPolicy,
    owners: Sequence[int] = (),
    num_models: int = 1,
    rolling: bool = False,
) -> Forecast | None:
    """Simulate the schedule with the costs of the stages.

    Args:
        plan: plan of the stages.
        schedule: schedule to simulate; None: there is no forecast.
        policy: weight policy, which says which weights actions use.
        owners: rank of the process of each stage, shape ``(K,)``; empty: one process per stage.
        num_models: number N of parallel models in these stages.
        rolling: whether each model begins its next batch without waiting for the others.
    """
    if schedule is None:
        return None
    if not policy.drains and plan.num_stages > 1:
        count = schedule.num_microbatches
        # the costs already include repeated forwards
        timeline = policy.simulate(stage_costs(plan), count, 2 + 4 * plan.num_stages, repeats=False)
        copies = " ".join(map(str, policy.copies(plan.num_stages, count)))
        name = f"1f1b, weight_policy='{policy.name}' with {copies} copies of the weights"
        return Forecast(name, count, timeline.steady_s, max(0.0, timeline.steady_bubble_fraction))
    frozen = num_frozen(plan.graph, plan.cuts, plan.graph.trained) if trains(schedule.rows[-1]) else 0
    schedule = without_relays(schedule) if frozen else schedule
    costs = stage_costs(plan, frozen)
    costs = costs.on(owners) if owners else costs
    iterations = _ITERATIONS if rolling and num_models > 1 else 1
    timeline = simulate([forward_only(schedule, frozen)] * num_models, costs, owners, iterations=iterations)
    idle = max(0.0, timeline.steady_bubble_fraction)
    return Forecast(schedule.name, schedule.num_microbatches, timeline.steady_s, idle, num_models)
