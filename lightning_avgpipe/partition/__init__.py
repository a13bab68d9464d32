"""From call graphs and costs to a plan: which calls, parameters and values belong to which stage."""

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.partition.balance import cut_at, cut_balanced, cut_like, scattered
from lightning_avgpipe.partition.memory import Memory
from lightning_avgpipe.partition.plan import Forecast, Plan, StagePlan, make_plan

__all__ = [
    "Costs",
    "Forecast",
    "Link",
    "Memory",
    "Plan",
    "StagePlan",
    "cut_at",
    "cut_balanced",
    "cut_like",
    "make_plan",
    "scattered",
]
