"""Planning: divide a call graph, by its costs, into stages with calls, parameters and devices."""

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.planning.balance import cut_at, cut_balanced, cut_like, scattered
from lightning_avgpipe.planning.memory import Memory
from lightning_avgpipe.planning.plan import Forecast, Plan, StagePlan, make_plan

__all__ = [
    "Costs", "Forecast", "Link", "Memory", "Plan", "StagePlan", "cut_at", "cut_balanced", "cut_like", "make_plan",
    "scattered",
]  # fmt: skip
