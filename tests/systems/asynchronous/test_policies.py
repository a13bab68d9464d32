"""Weight policies: which weights actions use, how many copies that takes, and expected values."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import ConfigurationError, ScheduleError
from lightning_avgpipe.schedule import StageCosts, policies
from lightning_avgpipe.schedule.__main__ import main
from lightning_avgpipe.systems.asynchronous.store import Source, check_predictable, direction, predicted, sources
from lightning_avgpipe.systems.asynchronous.versions import PipeOptim, Place, Use, VersionPolicy
from tests.systems.asynchronous.policies import POLICIES, Stage, play


def uses(name: str, micro_batch: int, num_stages: int = 4, num_microbatches: int = 1) -> list[tuple[Use, Use]]:
    places = [Place(k, num_stages, num_microbatches) for k in range(num_stages)]
    return [POLICIES[name].uses(place, micro_batch) for place in places]


def test_what_each_policy_uses() -> None:
    now = Use(4)
    assert uses("flush", 4) == [(now, now)] * 4
    assert uses("stash", 4) == [(Use(v), Use(v)) for v in (1, 2, 3, 4)]
    assert uses("none", 4) == [(Use(v), now) for v in (1, 2, 3, 4)]
    assert uses("pipeoptim", 4) == [(Use(v, s), now) for v, s in ((1, 3), (2, 2), (3, 1), (4, 0))]
    assert uses("spectrain", 4) == [
        (Use(1, 3), Use(4)),
        (Use(2, 2), Use(4)),
        (Use(3, 2), Use(4, 1)),
        (Use(4, 1), Use(4, 1)),
    ]
    assert uses("spectrain_stashed", 4) == [(Use(v, s), Use(v, s)) for v, s in ((1, 3), (2, 2), (3, 1), (4, 0))]
    assert uses("2bw", 4, num_microbatches=4) == [(Use(0), Use(0))] * 4
    assert uses("2bw", 8, num_microbatches=4) == [(Use(1), Use(1))] * 4


def test_the_staleness_after_a_drain_is_less_than_in_the_steady_state() -> None:
    first = Place(0, 4)
    assert [PipeOptim().policy.uses(first, i)[0].ahead for i in range(5)] == [0, 1, 2, 3, 3]
    assert [PipeOptim(staleness="constant").policy.uses(first, i)[0].ahead for i in range(5)] == [3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("policy", "num_microbatches", "expected"),
    [
        ("stash", 1, [4, 3, 2, 1]),
        ("spectrain", 1, [2, 2, 2, 2]),
        ("spectrain_stashed", 1, [5, 4, 3, 1]),
        ("pipeoptim", 1, [2, 2, 2, 1]),
        (PipeOptim(delta="increment").policy, 1, [3, 3, 3, 2]),
        ("none", 1, [1, 1, 1, 1]),
        ("2bw", 4, [2, 2, 2, 2]),
        ("stash", 4, [2, 2, 2, 1]),  # as few if batches have enough micro-batches
    ],
)
def test_copies_of_the_weights_that_are_held(policy: Any, num_microbatches: int, expected: list[int]) -> None:
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    assert policy.copies(4, num_microbatches) == expected


def test_2bw_needs_a_micro_batch_for_each_stage() -> None:
    with pytest.raises(ScheduleError, match="num_microbatches=4"):
        POLICIES["2bw"].check(4, 3)


def test_asynchronous_updates_leave_no_bubble() -> None:
    costs = StageCosts.uniform(4, 1, 2)
    seconds = {name: policies.POLICIES[name].simulate(costs, 4, 24) for name in policies.POLICIES}
    assert seconds["flush"].steady_s == (4 + 3) * 3
    assert seconds["stash"].steady_s == seconds["2bw"].steady_s == 4 * 3
    assert seconds["stash"].bubble_fraction == pytest.approx(0)
    assert seconds["pipeoptim"].steady_s == 4 * 4  # a forward is repeated in each backward


def test_the_command_simulates_policies(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["1f1b", "--stages", "3", "--microbatches", "3", "--iterations", "12"]
    assert main([*one, "--policy", "stash"]) == 0
    assert "copies of the weights 2 2 1" in capsys.readouterr().out
    assert main([*one, "--policy", "stash", "--pipelines", "2"]) == 2
    assert "one pipeline" in capsys.readouterr().err


GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "weight_policies.json").read_text())
CHAIN = GOLDEN["chain"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd lr=0.1 momentum=0.9": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam lr=0.01": partial(torch.optim.Adam, lr=0.01),
    "adamw lr=0.01 weight_decay=0.01, state": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01),
}
MOMENTUM = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Factor(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def half_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target) ** 2 / 2


def chain(policy: VersionPolicy, make: Any = MOMENTUM, num_microbatches: int = 1) -> list[Stage]:
    samples = [(x, 2 * x) for x in torch.tensor(CHAIN["x"], dtype=torch.float64)]
    stages = [Factor(w) for w in CHAIN["w0"]]
    return play(stages, make, policy, samples, half_square, num_microbatches)


def finals(stages: list[Stage]) -> list[float]:
    return [stage.module.weight.item() for stage in stages]


def serial(delay: int, num_microbatches: int) -> list[float]:
    """One process, gradients of the weights of so many updates ago."""
    model = nn.Sequential(*(Factor(w) for w in CHAIN["w0"]))
    optimizer = MOMENTUM(model.parameters())
    versions = [[p.detach().clone() for p in model.parameters()]]
    xs = [torch.tensor(x, dtype=torch.float64) for x in CHAIN["x"]]
    for begin in range(0, len(xs) - num_microbatches + 1, num_microbatches):
        old = [w.clone().requires_grad_() for w in versions[max(0, len(versions) - 1 - delay)]]
        for x in xs[begin : begin + num_microbatches]:
            y = x
            for w in old:
                y = w * y
            (half_square(y, 2 * x) / num_microbatches).backward()
        for parameter, w in zip(model.parameters(), old, strict=True):
            parameter.grad = w.grad
        optimizer.step()
        versions.append([p.detach().clone() for p in model.parameters()])
    return [p.item() for p in model.parameters()]


@pytest.mark.parametrize("name", CHAIN["final"])
def test_golden_values_of_a_chain(name: str) -> None:
    policy = "flush" if name == "serial" else name
    assert finals(chain(POLICIES[policy])) == pytest.approx(CHAIN["final"][name], abs=1e-6)


def stepped(make: Callable[..., torch.optim.Optimizer]) -> tuple[Source, nn.Parameter, Tensor]:
    """After the golden gradients; and the weights before the last."""
    parameter = nn.Parameter(torch.tensor(GOLDEN["prediction"]["w0"], dtype=torch.float64))
    optimizer = make([parameter])
    before = parameter.detach().clone()
    for gradient in GOLDEN["prediction"]["gradients"]:
        before = parameter.detach().clone()
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return sources([optimizer])[id(parameter)], parameter, before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_golden_values_of_predicted_weights(name: str) -> None:
    expected = GOLDEN["prediction"][name]
    source, parameter, _ = stepped(OPTIMIZERS[name])
    assert parameter.tolist() == pytest.approx(expected["w3"], abs=1e-6)
    if "delta" in expected:
        found = direction(source, parameter)
        assert found.tolist() == pytest.approx(expected["delta"], abs=1e-6)
    for ahead in (1, 2, 3):
        if f"s{ahead}" in expected:
            assert predicted(source, parameter, ahead).tolist() == pytest.approx(expected[f"s{ahead}"], abs=1e-6)


def test_an_increment_includes_decoupled_weight_decay() -> None:
    source, parameter, before = stepped(partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5))
    found = predicted(source, parameter, 2, before)
    torch.testing.assert_close(found, parameter + 2 * (parameter - before))
    decay = predicted(source, parameter, 2) - found
    torch.testing.assert_close(decay, 2 * 0.01 * 0.5 * before)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "make", [MOMENTUM, partial(torch.optim.RMSprop, lr=0.01, momentum=0.9), partial(torch.optim.Adam, lr=0.01)]
)
def test_the_last_step_went_in_the_direction(make: Callable[..., torch.optim.Optimizer], maximize: bool) -> None:
    source, parameter, before = stepped(partial(make, maximize=maximize))
    torch.testing.assert_close(predicted(source, parameter, 1), predicted(source, parameter, 1, before))


@pytest.mark.parametrize(
    "make", [partial(torch.optim.SGD, lr=0.1), torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
def test_what_does_not_remember_its_direction_is_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="increment"):
        check_predictable(make([nn.Parameter(torch.ones(2))]))


# -- equivalences ------------------------------------------------------------------------------------------------------


def test_2bw_is_serial_training_with_a_delay_of_one_update() -> None:
    for num_microbatches in (4, 5):
        found = finals(chain(POLICIES["2bw"], num_microbatches=num_microbatches))
        assert found == pytest.approx(serial(1, num_microbatches), abs=1e-12)
