"""Stages whose backwards run whole are known when the plan is printed, and finding out leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.planning.recompute_policy import chosen
from lightning_avgpipe.schedule import build
from lightning_avgpipe.systems.zero_bubble.whole_backwards import whole_backwards
from tests.driver import Engine
from tests.models import MLP, loader
from tests.systems.zero_bubble.test_halves import FLOATS, MODELS, Halves, Layers, linears
from tests.trainers import trainer

A_HOOK, A_NODE = "a hook on a value", "a look at the grad_fn of a value, which may have got a hook"
CHECKPOINT = "a checkpoint, or other hooks on what is saved for backwards"
FUNCTION = "a function of Python (autograd.Function, a compiled module)"


def found(module: nn.Module, batch: Tensor, recompute: Any = False, schedule: str = "zb_h1") -> dict[int, str]:
    module.log = lambda *args, **kwargs: None  # type: ignore[assignment]
    engine, before = Engine(module, 3, batch.clone(), 4), copy.deepcopy(module.state_dict())
    policy, random = chosen(module, recompute), torch.get_rng_state()
    given = (batch[:2].clone(), 0)
    why = whole_backwards(engine.plan, build(schedule, 3, 4), module, engine._call, given, torch.device("cpu"), policy)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(random, torch.get_rng_state()) and torch.equal(given[0], batch[:2])
    return why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("linear", {}), ("tied", {}), ("frozen", {}), ("recurrent", {}), ("convolutions", {}),
        ("hook on a value", {1: A_HOOK}), ("hook on a node", dict.fromkeys(range(3), A_NODE)),
        ("function of Python", dict.fromkeys(range(3), FUNCTION)),
        ("checkpoint", dict.fromkeys(range(3), CHECKPOINT)),
    ],
)  # fmt: skip
def test_it_is_known_which_stages_run_backwards_whole_and_why(name: str, why: dict[int, str]) -> None:
    make, batch = MODELS[name]
    assert found(make(), batch) == why


def test_what_is_repeated_runs_whole() -> None:
    assert found(linears(), FLOATS, True) == {0: "recompute", 1: "recompute"}  # the last backward follows at once
    assert found(linears(), FLOATS, ["layers.2", "layers.3"]) == {1: CHECKPOINT}


def test_what_is_compiled_runs_whole_and_is_not_compiled_to_find_out() -> None:
    module = Layers(*(nn.Linear(8, 8) for _ in range(3)))
    module.layers[1].compile(backend=lambda *_: pytest.fail("it was compiled"))
    assert found(module, FLOATS) == {1: "a compiled module"}


@pytest.mark.parametrize("schedule", ["zb_h2", "1f1b"])
def test_the_plan_says_it(schedule: str) -> None:
    module = MLP(depth=6)
    module.layers[6] = Halves(8, 8)
    strategy = AvgPipeStrategy(num_stages=3, num_microbatches=4, schedule=schedule, costs="flops")
    trainer(strategy=strategy, max_epochs=1).fit(module, loader(MLP, 8, 8))
    lines = [line for line in str(strategy.plan).splitlines() if "runs its backwards whole" in line]
    assert lines == [f"stage 1 runs its backwards whole: there is {A_HOOK}"] * (schedule == "zb_h2")
