"""Numbers on the wire: training whose values and gradients travel rounded between two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import Averaging, AvgPipeStrategy, Links
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.utils.lightning import pl
from tests import processes
from tests.comparing import assert_equal, state
from tests.models import Regression, loader
from tests.trainers import logged, pipeline, trainer

WIDTH = 16
SAMPLES, BATCH = 48, 12


class _Rounded(torch.autograd.Function):
    """What a hop does to a value, and to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].bfloat16().float()


class Half(nn.Sequential):
    """Layers; the output is rounded where no wire does it."""

    def __init__(self, rounds: bool, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return _Rounded.apply(x) if self.rounds else x


class Halves(Regression):
    """Two stages; what is between them is an activation of two dimensions."""

    def __init__(self, rounds: bool = False) -> None:
        super().__init__("sgd")
        self.first = Half(rounds, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.second = Half(False, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.validated: list[float] = []

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(float(self.loss(batch)))


def fit(devices: int, wire: str | None, rounds: bool = False, stages: int = 2, **strategy: Any) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    pl.seed_everything(3)
    model = Halves(rounds)
    given = {"num_microbatches": 3, "split_points": ["second"], "links": Links(wire=wire), **strategy}  # type: ignore[arg-type]
    pipeline(stages, devices, given, max_epochs=2).fit(model, loader(Halves, SAMPLES, BATCH))
    return state(model)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative distance of all weights."""
    flat, others = (torch.cat([weights[name].flatten() for name in one]) for weights in (one, other))
    return float((flat - others).norm() / flat.norm())


ROLLING = {"num_pipelines": 2, "averaging": Averaging(rolling=True)}
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "exact": (None, {}), "bf16": ("bf16", {}),
    "int8": ("int8", {"schedule": "1f1b"}), "int8 in another order": ("int8", {"schedule": "afab"}),
    "rolling": (None, ROLLING), "rolling int8": ("int8", ROLLING), "rolling int8 again": ("int8", ROLLING),
    "zb_h1 int8": ("int8", {"schedule": "zb_h1"}),
    "2bw": (None, {"weight_policy": "2bw"}), "2bw int8": ("int8", {"weight_policy": "2bw"}),
}  # fmt: skip


def validate(wire: str | None) -> list[float]:
    torch.manual_seed(3)
    model = Halves()
    strategy = {"num_microbatches": 3, "split_points": ["second"], "links": Links(wire=wire)}  # type: ignore[arg-type]
    pipeline(2, 2, strategy).validate(model, loader(Halves, SAMPLES, BATCH), verbose=False)
    return model.validated


def verified() -> tuple[list[str], str]:
    """What is said of verification, and where it is asked for."""
    with logged() as said:
        fit(2, "bf16")
    with pytest.raises(AvgPipeError) as refused:
        fit(2, "bf16", verify=True)
    return [text for text in said if "not compared with plain ones" in text], str(refused.value)


def automatic() -> tuple[str, bool]:
    links = Links(wire="auto")
    strategy = AvgPipeStrategy(num_stages=2, split_points=["second"], links=links, costs_cache=None)
    trainer(devices=2, strategy=strategy, max_epochs=1).fit(Halves(), loader(Halves, SAMPLES, BATCH))
    return str(strategy.plan), strategy.plan is not None and strategy.plan.measured


def in_rank() -> dict[str, Any]:
    weights = {name: fit(2, wire, **options) for name, (wire, options) in CASES.items()}
    found = {"validated": [validate(wire) for wire in ("int8", None)], "auto": automatic()}
    return {"weights": weights, **found, "verified": verified()}


ranks = processes.shared(2, lambda rank: in_rank())


@pytest.fixture(scope="module")
def in_two(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """The weights of two processes, which agree."""
    found, other = (rank["weights"] for rank in ranks)
    assert_equal(found, other)
    return found


def test_bf16_on_the_wire_is_rounding_in_one_process_bit_for_bit(in_two: dict[str, dict[str, Tensor]]) -> None:
    rounding, exact = fit(1, None, rounds=True), fit(1, None)
    assert_equal(in_two["bf16"], rounding)
    assert 0 < distance(exact, rounding) < 1e-3
    assert_equal(in_two["exact"], exact)


def test_int8_is_the_same_whatever_the_order_and_stays_close(in_two: dict[str, dict[str, Tensor]]) -> None:
    assert_equal(in_two["int8"], in_two["int8 in another order"])
    assert_equal(in_two["rolling int8"], in_two["rolling int8 again"])
    pairs = {"int8": "exact", "zb_h1 int8": "exact", "rolling int8": "rolling", "2bw int8": "2bw"}
    for rounded, exact in pairs.items():
        assert 0 < distance(in_two[exact], in_two[rounded]) < 1e-2


def test_evaluation_is_exact(ranks: list[dict[str, Any]]) -> None:
    int8, exact = ranks[0]["validated"]
    assert int8 and int8 == exact


def test_auto_leaves_values_as_they_are_where_links_are_fast(ranks: list[dict[str, Any]]) -> None:
    for text, measured in (rank["auto"] for rank in ranks):
        assert measured and "a micro-batch" in text and " as int8" not in text and " as bf16" not in text


def test_verification_says_that_rounded_values_are_not_those_of_a_plain_run(ranks: list[dict[str, Any]]) -> None:
    (said,), _ = ranks[0]["verified"]
    assert "not compared with plain ones" in said and "Links(wire='bf16')" in said
    assert all("verify once with wire=None" in rank["verified"][1] for rank in ranks)


def broadcast() -> list[dict[str, Tensor]]:
    options = {"schedule": "broadcast", "split_points": ["first.2", "second"]}
    return [fit(3, wire, stages=3, **options) for wire in ("int8", "int8", None)]


@pytest.mark.slow
def test_int8_goes_with_values_that_pass_stages(tmp_path: Path) -> None:
    first, _, last = processes.everywhere(3, broadcast, folder=tmp_path)
    assert_equal(first[0], last[1])
    assert 0 < distance(last[2], first[0]) < 1e-2
