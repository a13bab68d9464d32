"""Batches in two processes: each gets the tensors that its stages need, one batch ahead of the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import Links
from lightning_avgpipe.utils.placeholder import Absent
from tests import processes
from tests.driver import Engine
from tests.models import MLP, ConvNet, Regression, loader
from tests.trainers import pipeline


class Sees(ConvNet):
    """Notes which tensors of a batch are really there."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.seen: list[tuple[bool, ...]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(tuple(not isinstance(batch[name], Absent) for name in ("image", "label")))


class Augments(Sees):
    """Random changes in the transfer hooks: they must be the same for all stages."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        flip = torch.rand(len(batch["label"])) < 0.5
        return {"image": batch["image"] + flip[:, None, None, None], "label": (batch["label"] + flip) % 5}


def fit(rank: int, kind: type[Sees], devices: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    model = kind("adamw")
    runner = pipeline(2, devices, {"num_microbatches": 3, **options}, max_epochs=2, limit_train_batches=3)
    runner.fit(model, loader(Sees, 24, 6, shuffle=True), loader(Sees, 12, 6, seed=1))
    return {"weights": {k: v.clone() for k, v in model.state_dict().items()}, "seen": model.seen}


# each time the first batches travel whole: what the stages need is known after the first
CASES: dict[str, tuple[Any, dict[str, Any], tuple[bool, bool], tuple[bool, bool]]] = {
    "by default": (Sees, {}, (True, True), (True, False)),
    "read by the first stage": (Sees, {"links": Links(reader="first")}, (False, True), (True, True)),
    "whole": (Sees, {"links": Links(send_batch="all")}, (True, True), (True, True)),
    "augmented": (Augments, {}, (True, True), (True, False)),
}


def fit_all(rank: int) -> dict[str, dict[str, Any]]:
    return {name: fit(rank, model, 2, options) for name, (model, options, _, _) in CASES.items()}


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return processes.results(processes.run(2, fit_all, folder=tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("name", CASES)
def test_each_process_gets_what_it_needs(name: str, in_two: list[dict[str, dict[str, Any]]]) -> None:
    model, _, *needed = CASES[name]
    one = fit(0, model, 1, {})
    for rank, expected in zip(in_two, needed, strict=True):
        assert len(rank[name]["seen"]) == 6 and rank[name]["seen"][0] == (True, True)
        assert set(rank[name]["seen"][2:]) == {expected}
        for key, value in one["weights"].items():
            assert torch.equal(rank[name]["weights"][key], value), key


class ChangesLate(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            batch[0].mul_(2)


class LooksAtInputs(MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[1].sum()


def fail(rank: int, name: str) -> None:
    model = {"ChangesLate": ChangesLate, "LooksAtInputs": LooksAtInputs}[name]()
    pipeline(2, 2, max_epochs=1).fit(model, loader(MLP, 24, 6))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ChangesLate", r"a hook changed [0] of the batch after it was sent"),
        ("LooksAtInputs", r"'[1]', a tensor of the batch that was not sent to this process"),
    ],
)
def test_a_hook_that_cannot_work_is_told_what_to_do(name: str, message: str, tmp_path: Path) -> None:
    for outcome in processes.run(2, fail, name, folder=tmp_path):
        assert outcome.error is not None and message in outcome.error


class Uses(Regression):
    """Inputs through views, a mask made from the batch that a late block takes, labels, and an unused tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    @staticmethod
    def example(size: int) -> Any:
        return {
            "x": torch.randn(size, 2, 4), "mask": torch.ones(size), "y": torch.randn(size, 8), "id": torch.arange(size),
        }  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        h = self.a(batch["x"].flatten(1))
        late = batch["mask"][:, None] * 2
        return nn.functional.mse_loss(self.c(self.b(h) * late), batch["y"])


def test_the_plan_says_what_each_stage_needs() -> None:
    engine = Engine(Uses(), 3, Uses.example(4), split_points=["b", "c"])
    needed = [[leaf.name for leaf in stage.leaves] for stage in engine.plan.stages]
    assert needed == [["['x']", "['mask']"], ["['mask']"], ["['mask']", "['y']"]]
    assert "each micro-batch sends ['x'], ['mask'] to stage 0 (72 B); ['mask'] to stage 1 (8 B)" in str(engine.plan)
