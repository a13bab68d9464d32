"""Groups of processes average in the background, and nobody sees a model before that has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.optimizers import load_states, states_of_group_0
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.utils import tree
from tests.averaging.models import Net
from tests.comparing import assert_equal


class Twins:
    """Siblings of a group that always has what this one has, and says when sums begin and end."""

    group_number, count, present = 0, 2, 2

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.members = self

    def broadcast(self, item: Any) -> Any:
        return item

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """They are the same."""

    def settle(self) -> bool:
        """Nobody leaves."""
        return True

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self.begun += 1

        def end() -> None:
            self.ended += 1
            torch._foreach_mul_(list(tensors), 2)

        return end

    def begin_choice(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: None

    def sum(self, tensors: Sequence[Tensor]) -> None:
        self.begin_sum(tensors)()


def stepped(averaging_group: Any, **options: Any) -> Ensemble:
    """A model whose local step is done, and the ensemble of which it is one."""
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = model.configure_optimizers()
    ensemble = Ensemble(model, lambda: [optimizer], Averaging(**options), averaging_group=averaging_group)
    ensemble.place(0)
    torch._foreach_add_([p.detach() for p in model.parameters()], 0.1)
    model.first[1].running_mean.add_(1.0)
    ensemble.averager.stepped(1)
    return ensemble


@pytest.mark.parametrize(
    "look",
    [
        lambda ensemble: ensemble.place(0),
        lambda ensemble: ensemble.show_reference(True),
        lambda ensemble: ensemble.tensors(0),
        lambda ensemble: ensemble.load(0, {}),
        lambda ensemble: ensemble.follow(2),
        lambda ensemble: ensemble.follow(1),
        lambda ensemble: ensemble.dissolve(),
        lambda ensemble: ensemble.averager.outer,
    ],
    ids=["place", "show_reference", "tensors", "load", "resize", "follow", "dissolve", "outer"],
)
def test_whoever_looks_waits_for_the_other_groups(look: Callable[[Ensemble], Any]) -> None:
    averaging_group = Twins()
    ensemble = stepped(averaging_group)
    begun = averaging_group.begun
    assert ensemble.averager.is_under_way
    assert averaging_group.ended == 0 < begun
    look(ensemble)
    assert averaging_group.ended >= begun


# -- optimizers of all groups begin with what group 0's have --------------------------------------------------------


class Sibling:
    """One of two groups: group 0 says what it sends, group 1 gets that."""

    def __init__(self, group_number: int, sent: list[Any]) -> None:
        self.group_number, self._sent = group_number, sent
        self.members = self

    def broadcast(self, item: Any) -> Any:
        if self.group_number == 0:
            self._sent.append(item)
        return item if self.group_number == 0 else self._sent.pop(0)

    def copy(self, tensors: Sequence[Tensor]) -> None:
        if self.group_number == 0:
            self._sent.append([tensor.clone() for tensor in tensors])
        else:
            for tensor, sent in zip(tensors, self._sent.pop(0), strict=True):
                tensor.copy_(sent)


def made_of(kind: Any, gradients: Sequence[float | None], **options: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
    optimizer: torch.optim.Optimizer = kind(parameters, **options)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    optimizer.step()
    return optimizer


class Nested(torch.optim.SGD):
    """Keeps lists and dictionaries of tensors, as SOAP does."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if (g := parameter.grad) is not None:
                self.state[parameter] = {"factors": [g.outer(g), None], "of": {0: (g.clone(), 1.5)}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (Nested, {"lr": 0.1}),
    ],
)
def test_states_are_those_of_group_0_even_where_others_have_more_or_fewer(kind: Any, options: Any) -> None:
    first = made_of(kind, (1.0, None, 2.0), **options)
    second = made_of(kind, (3.0, 4.0, None), **options)
    sent: list[Any] = []
    groups: list[Any] = [Sibling(0, sent), Sibling(1, sent)]
    found = [states_of_group_0([mine], sibling)[0] for mine, sibling in zip((first, second), groups, strict=True)]
    assert sent == []
    made = made_of(kind, (None, None, None), **options)
    for states in found:
        load_states(made, states)
        assert made.state.keys() == {made.param_groups[0]["params"][i] for i in (0, 2)}
        for i in (0, 2):
            mine, theirs = (o.state[o.param_groups[0]["params"][i]] for o in (made, first))
            assert_equal(mine, theirs)
            assert not {*map(id, tree.tensors(mine))} & {*map(id, tree.tensors(theirs))}
