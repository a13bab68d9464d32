"""Capture leaves no trace in weights that the step changes, and knows which they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.capturing import capture
from lightning_avgpipe.capture.measure import measure
from lightning_avgpipe.planning.divisible import Divisible
from tests.strategy.test_attributes_of_steps import assigned, foreach, loaded


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


@pytest.mark.parametrize("update", [assigned, foreach, loaded])
def test_capture_and_measuring_put_weights_back_that_the_step_changes(update: object) -> None:
    module = Pair()
    with torch.no_grad():
        module.student.weight.add_(1.0)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            update(module.student, module.teacher)  # type: ignore[operator]
        return (module.head(module.student(x)) - module.teacher(x)).square().mean()

    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    graph = capture("step", step, (torch.randn(3, 4),), module, Divisible(module).units())
    measure(graph, step, (torch.randn(3, 4),), module)
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0] and parameter.data_ptr() == before[name][1]
        assert torch.equal(parameter, before[name][2]), f"{name} has changed"
    assert graph.changed == {"teacher.weight", "teacher.bias"}
