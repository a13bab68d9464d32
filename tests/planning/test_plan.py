"""What a plan says of parameters that several stages use."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_avgpipe.weights.by_size import divide_by_size


def test_a_parameter_that_one_stage_uses_in_two_ways_is_not_copied() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = divide_by_size(module, 2, {name: p.nbytes for name, p in module.named_parameters()})
    first = replace(plan.stages[0], states=("0.weight",))  # used, and changed, as weights in 4 bits are on the host
    assert replace(plan, stages=(first, plan.stages[1])).copied == {}
    second = replace(plan.stages[1], parameters=("0.weight", "1.weight"))
    assert replace(plan, stages=(first, second)).copied == {"0.weight": (0, 1)}
