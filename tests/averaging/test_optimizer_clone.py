"""An optimizer's twin does what it does, with other parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_avgpipe.averaging.optimizers import clone_optimizer, follow


class Own(torch.optim.SGD):
    """Has attributes of its own, which copying loses."""

    def __init__(self, params: Any, sign: float) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.signs = [sign]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= self.signs[0]
        return super().step(closure)


def leaves() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), 2.0))]


def step(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_twin_steps_like_the_original_and_leaves_it_alone() -> None:
    first, second = leaves(), leaves()
    optimizer = Own(first, -1.0)
    step(optimizer, first)
    with torch.no_grad():
        torch._foreach_copy_(second, first)
    own = {id(a): b for a, b in zip(first, second, strict=True)}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda stepped, *_: steps.append(stepped))
    made = clone_optimizer(optimizer, own)
    assert type(made) is Own and made.signs == [-1.0] and made.signs is not optimizer.signs

    before = [p.detach().clone() for p in first]
    step(made, second)
    assert all(torch.equal(p, b) for p, b in zip(first, before, strict=True))
    assert not getattr(optimizer, "_opt_called", False)  # the scheduler counts the original's steps only
    step(optimizer, first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert {id(stepped) for stepped in steps} == {id(made), id(optimizer)}

    scheduler.step()
    follow(made, optimizer, own)
    assert made.param_groups[0]["lr"] == 0.05
    step(optimizer, first)
    step(made, second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_twin_follows_new_groups_and_shares_what_is_not_its_own() -> None:
    first, second, frozen = leaves(), leaves(), nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.Adam([first[0], frozen])
    own = {id(a): b for a, b in zip(first, second, strict=True)}
    made = clone_optimizer(optimizer, own)
    assert made.param_groups[0]["params"][0] is second[0]
    assert made.param_groups[0]["params"][1] is frozen
    optimizer.add_param_group({"params": [first[1]], "lr": 0.5})
    follow(made, optimizer, own)
    assert made.param_groups[1]["params"] == [second[1]] and made.param_groups[1]["lr"] == 0.5
