"""Numbers on the wire: training whose values and gradients travel rounded between two processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import Averaging, AvgPipeStrategy, Links
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.lightning import pl
from tests import processes
from tests.models import Regression, loader
from tests.trainers import pipeline

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


def fit(
    rank: int, devices: int, wire: str | None, strategy: dict[str, Any], rounds: bool = False, stages: int = 2
) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    pl.seed_everything(3)
    model = Halves(rounds)
    given = {"num_microbatches": 3, "split_points": ["second"], "links": Links(wire=wire), **strategy}  # type: ignore[arg-type]
    runner = pipeline(stages, devices, given, max_epochs=3)
    runner.fit(model, loader(Halves, SAMPLES, BATCH))
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained(folder: Path, devices: int, wire: str | None, rounds: bool = False, **strategy: Any) -> dict[str, Tensor]:
    """The weights that all processes agree on."""
    found = processes.results(processes.run(devices, fit, devices, wire, strategy, rounds, folder=folder))
    assert all(torch.equal(found[0][name], other[name]) for other in found for name in other)
    return found[0]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative distance of all weights."""
    flat, others = (torch.cat([weights[name].flatten() for name in one]) for weights in (one, other))
    return float((flat - others).norm() / flat.norm())


def test_bf16_on_the_wire_is_rounding_in_one_process_bit_for_bit(tmp_path: Path) -> None:
    wired = trained(tmp_path, 2, "bf16")
    rounding, exact = trained(tmp_path, 1, None, rounds=True), trained(tmp_path, 1, None)
    assert same(wired, rounding)
    assert 0 < distance(exact, wired) < 1e-3
    assert same(trained(tmp_path, 2, None), exact)


def test_int8_repeats_bit_for_bit_whatever_the_order_and_stays_close(tmp_path: Path) -> None:
    first = trained(tmp_path, 2, "int8", schedule="1f1b")
    assert same(first, trained(tmp_path, 2, "int8", schedule="1f1b"))
    assert same(first, trained(tmp_path, 2, "int8", schedule="afab"))
    assert 0 < distance(trained(tmp_path, 1, None), first) < 1e-2


@pytest.mark.parametrize(
    "strategy",
    [
        {"num_pipelines": 2, "averaging": Averaging(rolling=True)},
        {"weight_policy": "2bw"},
        {"schedule": "zb_h1"},
    ],
)
def test_int8_goes_with_what_changes_the_order_and_the_weights(strategy: dict[str, Any], tmp_path: Path) -> None:
    first = trained(tmp_path, 2, "int8", **strategy)
    assert same(first, trained(tmp_path, 2, "int8", **strategy))
    assert 0 < distance(trained(tmp_path, 2, None, **strategy), first) < 1e-2


def broadcast(rank: int, wire: str | None) -> dict[str, Tensor]:
    return fit(rank, 3, wire, {"schedule": "broadcast", "split_points": ["first.2", "second"]}, stages=3)


def test_int8_goes_with_values_that_pass_stages(tmp_path: Path) -> None:
    found = [processes.results(processes.run(3, broadcast, wire, folder=tmp_path)) for wire in ("int8", "int8", None)]
    assert same(found[0][0], found[1][2])
    assert 0 < distance(found[2][0], found[0][0]) < 1e-2


def validate(rank: int, wire: str | None) -> list[float]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Halves()
    strategy = {"num_microbatches": 3, "split_points": ["second"], "links": Links(wire=wire)}  # type: ignore[arg-type]
    pipeline(2, 2, strategy).validate(model, loader(Halves, SAMPLES, BATCH), verbose=False)
    return model.validated


def test_evaluation_is_exact(tmp_path: Path) -> None:
    int8, exact = (processes.results(processes.run(2, validate, wire, folder=tmp_path)) for wire in ("int8", None))
    assert int8[0] and int8 == exact


def verify(rank: int, asked: bool) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_avgpipe")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    fit(rank, 2, "bf16", {"verify": True if asked else "auto"})
    return records


def test_verification_says_that_rounded_values_are_not_those_of_a_plain_run(tmp_path: Path) -> None:
    records = processes.results(processes.run(2, verify, False, folder=tmp_path))[0]
    found = [text for text in records if "not compared with plain ones" in text]
    assert len(found) == 1 and "Links(wire='bf16')" in found[0]
    for outcome in processes.run(2, verify, True, folder=tmp_path):
        assert outcome.error is not None and "verify once with wire=None" in outcome.error


def automatic(rank: int) -> tuple[str, bool]:
    torch.set_num_threads(1)
    links = Links(wire="auto")
    strategy = AvgPipeStrategy(num_stages=2, split_points=["second"], links=links, costs_cache=None)
    runner = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(Halves(), loader(Halves, SAMPLES, BATCH))
    return str(strategy.plan), strategy.plan is not None and strategy.plan.measured


def test_auto_leaves_values_as_they_are_where_links_are_fast(tmp_path: Path) -> None:
    for text, measured in processes.results(processes.run(2, automatic, folder=tmp_path)):
        assert measured and "a micro-batch" in text and " as int8" not in text and " as bf16" not in text


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"wire='fp8'"):
        Links(wire="fp8")  # type: ignore[arg-type]
