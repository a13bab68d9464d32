"""Which stages have nothing to train follows from what the step did when it was captured."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.planning.trained import TrainedParameters, num_frozen
from lightning_avgpipe.schedule import build

WIDTH = 4


class Branching(nn.Module):
    """Four layers; the first two are a branch of its own, which comes back by a sum in place."""

    def __init__(self, detached: bool = False, asks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.detached = detached
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[0](x)
        if self.asks:
            a.requires_grad_()
        b = self.layers[1](a)
        if self.detached:
            b = b.detach()
        c = self.layers[2](b)
        c += b
        return self.layers[3](c).sum()


def frozen(module: Branching, at_capture: Collection[int], now: Collection[int]) -> int:
    """How many of four stages are frozen now; both arguments are numbers of layers that are."""
    for i, layer in enumerate(module.layers):
        layer.requires_grad_(i not in at_capture)
    planner = Planner(Divisible(module), 4, [f"layers.{i}" for i in (1, 2, 3)])
    conditions = Conditions(build("1f1b", 4, 1))
    plan = planner.plan(Step("training_step", module.forward, (torch.randn(2, WIDTH),)), conditions)
    trained = TrainedParameters(plan.graph, plan.cuts, module)
    for i, layer in enumerate(module.layers):
        layer.requires_grad_(i not in now)
    assert trained.frozen_stages == num_frozen(plan.graph, plan.cuts, trained.names)
    return trained.frozen_stages


def test_what_is_frozen_now_counts_not_what_was() -> None:
    subsets: list[tuple[int, ...]] = [(), (0,), (0, 1), (0, 1, 2), (1,), (1, 2), (0, 2)]
    expected = {(): 0, (0,): 1, (0, 1): 2, (0, 1, 2): 3, (1,): 0, (1, 2): 0, (0, 2): 1}
    for at_capture in subsets:
        assert {now: frozen(Branching(), at_capture, now) for now in subsets} == expected


def test_what_is_detached_needs_no_backward() -> None:
    module = Branching(detached=True)
    step = Step("training_step", module.forward, (torch.randn(2, WIDTH),))
    graph = Planner(Divisible(module), 1).plan(step, Conditions(build("1f1b", 1, 1))).graph
    behind = 1 + next(node.index for node in graph.nodes if node.name == "detach")
    assert num_frozen(graph, (behind,), graph.trained) == 1
    assert num_frozen(graph, (behind - 1,), graph.trained) == 0  # it is the next stage that detaches


def test_what_asks_for_a_gradient_by_itself_always_does() -> None:
    # the first stage has asked for it after its last layer: it needs no backward for that
    assert frozen(Branching(asks=True), (0, 1, 2), (0, 1, 2)) == 1
