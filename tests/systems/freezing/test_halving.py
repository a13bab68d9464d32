"""Fewer stages with several processes each: only where they fit, may be shared, and are expected to be as fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from lightning_avgpipe.systems.freezing.halving import Halving

PROCESSES, MICRO_BATCHES = 4, 8
MANY, FEW = 1024, 1  # samples of a micro-batch: with few of them sums of gradients take longer than anything else


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.blocks[:3].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(self.blocks(batch)).sum()


def may_be_shared(plan: Plan, counts: Sequence[int]) -> None:
    """Nothing is against it."""


def planned(rows: int, limit: float = math.inf, check: Any = may_be_shared, norm: bool = False) -> Plan:
    module = Net(norm)
    schedule = build("1f1b", PROCESSES, MICRO_BATCHES)
    planner = Planner(Divisible(module), PROCESSES, source=Halving(PROCESSES, limit, check))
    return planner.plan(Step("training_step", module.training_step, (torch.ones(rows, 8), 0)), Conditions(schedule))


def test_all_processes_share_one_stage_where_that_is_fastest() -> None:
    plan = planned(MANY)
    assert plan.num_stages == 1 and plan.devices == ((0, 1, 2, 3),)
    assert plan.forecast is not None and plan.forecast.num_microbatches == MICRO_BATCHES


def test_a_stage_that_does_not_fit_is_divided() -> None:
    most = max(stage.memory.total for stage in planned(MANY).stages)
    plan = planned(MANY, limit=most - 1)
    assert plan.num_stages == 2 and plan.devices == ((2, 3), (0, 1))
    assert all(stage.memory.total < most for stage in plan.stages)


def test_what_is_slower_stays_as_it_was() -> None:
    plan = planned(FEW)
    assert plan.num_stages == PROCESSES and plan.devices == ()


def test_what_replicas_cannot_share_stays_as_it_was() -> None:
    def refuse(plan: Plan, counts: Sequence[int]) -> None:
        if len(counts) == 1:
            raise PartitionError("not by all of them")

    assert planned(MANY, check=refuse).num_stages == 2
    assert planned(MANY, norm=True).num_stages == PROCESSES  # whose running means each replica would have of its own
