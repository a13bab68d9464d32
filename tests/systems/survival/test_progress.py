"""How far a group is: what another group gets of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_avgpipe.systems.survival.progress import load_optimizer_states, optimizer_states


def optimizer_on(place: str, kind: Any, option: str) -> torch.optim.Optimizer:
    shapes: list[tuple[int, ...]] = [(3, 4), (4,), ()]
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(shape, device=place)) for shape in shapes])
    made.param_groups[0][option] = bool(option)  # its kernels count on the device
    return made


@pytest.mark.parametrize(
    ("kind", "option", "on_host"),
    [
        (torch.optim.AdamW, "", {"step"}),
        (torch.optim.NAdam, "", {"step", "mu_product"}),
        (torch.optim.AdamW, "fused", set()),
        (torch.optim.AdamW, "capturable", set()),
    ],
)
def test_states_of_another_group_go_to_the_device_but_counters_only_where_the_optimizer_has_them_there(
    kind: Any, option: str, on_host: set[str]
) -> None:
    theirs, own = optimizer_on("cpu", kind, ""), optimizer_on("meta", kind, option)
    for parameter in theirs.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    theirs.param_groups[0][option] = bool(option)
    load_optimizer_states([own], optimizer_states([theirs]))
    assert len(own.state) == 3
    left = {name for state in own.state.values() for name, value in state.items() if not value.is_meta}
    assert left == on_host
