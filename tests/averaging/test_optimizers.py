"""Optimizers of parallel models: a clone does what its original does, and begins with what group 0's have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.averaging.optimizers import load_states, states_of_group_0


class Sibling:
    """One of two groups: group 0 says what it sends, group 1 gets that."""

    def __init__(self, number: int, sent: list[Any]) -> None:
        self.number, self._sent = number, sent
        self.members = self

    def broadcast(self, item: Any) -> Any:
        if self.number == 0:
            self._sent.append(item)
        return item if self.number == 0 else self._sent.pop(0)

    def copy(self, tensors: Sequence[Tensor]) -> None:
        if self.number == 0:
            self._sent.append([tensor.clone() for tensor in tensors])
        else:
            for tensor, sent in zip(tensors, self._sent.pop(0), strict=True):
                tensor.copy_(sent)


def stepped(kind: Any, gradients: Sequence[float | None], **options: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
    optimizer: torch.optim.Optimizer = kind(parameters, **options)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_states_are_those_of_group_0_even_where_others_have_more_or_fewer(kind: Any, options: Any) -> None:
    first = stepped(kind, (1.0, None, 2.0), **options)
    second = stepped(kind, (3.0, 4.0, None), **options)
    sent: list[Any] = []
    groups: list[Any] = [Sibling(0, sent), Sibling(1, sent)]
    found = [states_of_group_0([mine], sibling)[0] for mine, sibling in zip((first, second), groups, strict=True)]
    assert sent == []
    made = stepped(kind, (None, None, None), **options)
    for states in found:
        load_states(made, states)
        assert made.state.keys() == {made.param_groups[0]["params"][i] for i in (0, 2)}
        for i in (0, 2):
            mine, theirs = (o.state[o.param_groups[0]["params"][i]] for o in (made, first))
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert mine[key] is not value or not isinstance(value, Tensor)
                assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(value))
