"""Planning: divide a call graph, by its costs, into stages with calls, parameters and devices."""

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.planning.balance import cut_at, cut_balanced, cut_like
from lightning_avgpipe.planning.memory import Memory
from lightning_avgpipe.planning.plan import Forecast, Plan, make_plan

__all__ = ["Costs", "Forecast", "Link", "Memory", "Plan", "cut_at", "cut_balanced", "cut_like", "make_plan"]
