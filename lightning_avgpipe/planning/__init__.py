"""From call graphs and costs to plans: which calls, parameters and values belong to which stage, on which devices."""

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.planning.balance import cut_at, cut_balanced, cut_like, scattered
from lightning_avgpipe.planning.memory import Memory
from lightning_avgpipe.planning.plan import Forecast, Plan, StagePlan, make_plan

__all__ = [
    "Costs", "Forecast", "Link", "Memory", "Plan", "StagePlan", "cut_at", "cut_balanced", "cut_like", "make_plan",
    "scattered",
]  # fmt: skip
