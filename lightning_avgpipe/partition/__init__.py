"""From call graphs and costs to a plan: which calls, parameters and values belong to which stage."""

from lightning_avgpipe.partition.balance import Costs, cut_at, cut_balanced, cut_like
from lightning_avgpipe.partition.plan import Plan, StagePlan, make_plan

__all__ = ["Costs", "Plan", "StagePlan", "cut_at", "cut_balanced", "cut_like", "make_plan"]
