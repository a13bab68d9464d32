"""Parameters of other processes have no contents, and errors of user code that looks at them say what is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.weights.ownership import explain, fill_parameter, give_up


@pytest.fixture
def module() -> nn.Module:
    """Of its two layers the second is elsewhere."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


HOOKS: list[Callable[[nn.Module], object]] = [
    lambda module: sum(float(p.norm()) for p in module.parameters()),
    lambda module: [p.grad.norm() for p in module.parameters()],  # type: ignore[union-attr]
    lambda module: module[1].weight.tolist(),  # type: ignore[index]
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_looks_at_all_weights_is_told_once_which_are_absent(
    hook: Callable[[nn.Module], object], module: nn.Module
) -> None:
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        hook(module)
    for _ in range(2):
        explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "no numbers and no gradient on this process, such as '1.weight'" in note


class Sharpness(torch.optim.SGD):
    """Looks at all parameters in a method of its own."""

    def step(self, closure: Any = None) -> Any:
        scale(self.param_groups[0]["params"])
        return super().step(closure)


def scale(parameters: list[Tensor]) -> float:
    return sum(float(parameter.norm()) for parameter in parameters)


def test_an_optimizer_that_looks_at_all_weights_is_named_and_a_closure_of_it_is_not(module: nn.Module) -> None:
    with pytest.raises(RuntimeError) as caught:
        Sharpness(module.parameters(), 0.1).step()
    explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "without '1.weight' here, and Sharpness looks at all of them. Use an optimizer that" in note
    with pytest.raises(RuntimeError) as caught:
        torch.optim.SGD(module.parameters(), 0.1).step(lambda: scale([*module.parameters()]))
    explain(caught.value, module)
    (note,) = caught.value.__notes__
    assert "in a hook can leave out those with is_meta" in note


@pytest.mark.parametrize("error", [ValueError("meta"), RuntimeError("out of memory"), AbsentValueError("meta")])
def test_other_errors_stay_as_they_are(error: Exception, module: nn.Module) -> None:
    explain(error, module)
    assert not hasattr(error, "__notes__")


def test_where_all_is_there_nothing_is_said() -> None:
    error = RuntimeError("Cannot copy out of meta tensor; no data!")
    explain(error, nn.Linear(2, 2))
    explain(error, None)
    assert not hasattr(error, "__notes__")


def test_weights_of_scripted_modules_leave_and_come_back_as_the_same_objects() -> None:
    module = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    before, contents = (
        dict(module.named_parameters()),
        {name: torch.full_like(p, 3) for name, p in module.named_parameters()},
    )
    give_up(module, before)
    assert all(found is before[name] and found.is_meta for name, found in module.named_parameters())
    for name, parameter in before.items():
        fill_parameter(module, name, parameter, contents[name])
    assert all(found is before[name] for name, found in module.named_parameters())
    assert module(torch.ones(1, 2)).tolist() == [[57.0, 57.0]]
