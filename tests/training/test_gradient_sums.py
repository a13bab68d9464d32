"""Sums of gradients begin within the last backward, and no result depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.engine.observer import Work
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action
from lightning_avgpipe.training.gradient_sums import GradientSums

ROW = (Action(FORWARD, 0), Action(FORWARD, 1), Action(BACKWARD, 0), Action(BACKWARD, 1))


class Twice:
    """Stands for two replicas that have the same gradients.

    Attributes:
        begun: numbers of elements of each sum, in order.
        members: itself, which sums on the host.
    """

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.members = self

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self.begun.append([tensor.numel() for tensor in tensors])
        sums = [2 * tensor for tensor in tensors]
        return lambda: [tensor.copy_(total) for tensor, total in zip(tensors, sums, strict=True)] and None

    def sum(self, tensors: Any) -> Any:
        if isinstance(tensors, Tensor):
            return tensors.mul_(2)
        if tensors:
            self.begin_sum(tensors)()


class Layers(nn.Module):
    """Three layers of 2, 3 and 5 elements, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.ones(2), torch.ones(3), torch.ones(5, dtype=torch.float64)])

    def backward(self, used: Sequence[int] = (0, 1, 2)) -> None:
        x = torch.ones((), dtype=torch.float64)
        for number in used:
            x = x * self.layers[number].sum()
        x.backward()

    def gradients(self) -> list[Any]:
        return [None if p.grad is None else p.grad.tolist() for p in self.layers]


class Run:
    """Iterations of one stage with two micro-batches."""

    def __init__(self, bucket_bytes: int = 1) -> None:
        self.model, self.replicas = Layers(), Twice()
        self.sums = GradientSums(self.replicas, bucket_bytes)  # type: ignore[arg-type]

    def iterate(
        self, used: Sequence[int] = (0, 1, 2), after: Callable[[], object] = lambda: None
    ) -> tuple[list[int], list[Any], list[Any]]:
        """How many sums had begun after each action, what had been the gradients, and what they became."""
        named, begun = dict(self.model.named_parameters()), []
        self.model.zero_grad()
        self.replicas.begun.clear()
        self.sums.watch(named, {0: ROW})
        for action in ROW:
            do = (lambda: self.model.backward(used)) if action.kind is BACKWARD else (lambda: None)
            self.sums.perform(Work(0, 0, action), do)  # type: ignore[arg-type]
            begun.append(len(self.replicas.begun))
        self.sums.agree(None)  # type: ignore[arg-type]
        after()
        mine = self.model.gradients()
        votes = self.sums.finish(named, torch.tensor([[1, 0]], dtype=torch.int32))
        assert votes.tolist() == [[2, 0]]
        return begun, mine, self.model.gradients()


def doubled(gradients: Sequence[Any]) -> list[Any]:
    return [None if gradient is None else [2 * value for value in gradient] for gradient in gradients]


def test_sums_begin_within_the_last_backward_once_the_first_step_has_shown_which() -> None:
    run = Run()
    begun, mine, summed = run.iterate()
    assert begun == [0, 0, 0, 0] and summed == doubled(mine)
    begun, mine, summed = run.iterate()
    assert begun == [0, 0, 0, 3] and summed == doubled(mine)
    assert run.replicas.begun == [[5], [3], [2]]  # as backwards reach them


@pytest.mark.parametrize(("used", "begun_early"), [((0, 1), 0), ((1, 2), 2)])
def test_what_gets_no_gradient_this_time_holds_up_what_follows_and_keeps_none(used: Any, begun_early: int) -> None:
    run = Run()
    run.iterate()
    begun, mine, summed = run.iterate(used)
    assert begun[-1] == begun_early and len(run.replicas.begun) == 3
    assert summed == doubled(mine) and None in summed


def test_a_gradient_that_changes_after_it_was_sent_is_summed_as_it_is_then() -> None:
    run = Run()
    run.iterate()

    def change() -> None:
        first, second, _ = run.model.layers
        first.grad.mul_(3)
        second.grad = second.grad + 1

    _, mine, summed = run.iterate(after=change)
    assert summed == doubled(mine)
    assert run.replicas.begun == [[5], [3], [2], [2, 3]]
    begun, mine, summed = run.iterate()  # they are not sent early any more
    assert begun[-1] == 1 and summed == doubled(mine)


def test_other_parameters_than_those_of_the_step_before_are_summed_after_the_backward() -> None:
    run = Run()
    run.iterate()
    run.model.layers.append(torch.ones(4))
    begun, mine, summed = run.iterate((0, 1, 2, 3))
    assert begun[-1] == 0 and summed == doubled(mine)


def test_sums_of_an_iteration_that_failed_are_forgotten() -> None:
    run = Run()
    run.iterate()
    run.sums.watch(dict(run.model.named_parameters()), {0: ROW})
    run.sums.perform(Work(0, 0, ROW[-1]), lambda: run.model.backward())  # type: ignore[arg-type,func-returns-value]
    begun, mine, summed = run.iterate()
    assert begun[-1] == 3 and summed == doubled(mine)
