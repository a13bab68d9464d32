"""Stages change while training runs: weights, optimizer states and parallel models move, and no number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.comm.topology import DeviceLayout
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.training.holdings import move_state
from tests import processes
from tests.comparing import assert_equal
from tests.models import MLP, CountingLinear, Normed, Regression, TiedTransformer, loader
from tests.strategy.test_precision import half_mixed
from tests.trainers import pipeline

Points = dict[int, Any]  # after so many batches: where stages begin, or how many there are


class Meta(MLP):
    """Begins without contents."""

    def __init__(self, optimizer: str = "sgd") -> None:
        with torch.device("meta"):
            super().__init__(optimizer)


class Counting(MLP):
    """Counts in an attribute, between units, and computes with it."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[:3](x)
        self.count += 1
        return self.layers[3:](x) * (1 + 0.01 * self.count)


class CountingInside(MLP):
    """The same in a unit."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.layers[5] = CountingLinear(8, 8)


class Remembering(MLP):
    """Notes its losses, which only the last stage has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = super().training_step(batch, batch_idx)
        return self.last


COUNTING = (Counting, CountingInside, Remembering)
FIRST: dict[type[Regression], list[str]] = {
    **{kind: ["layers.4"] for kind in (MLP, Meta, *COUNTING)}, Normed: ["layers.2"], TiedTransformer: ["blocks.1"],
}  # fmt: skip
LATER: dict[type[Regression], Points] = {
    **{kind: {1: ["layers.7"], 4: ["layers.2"]} for kind in (MLP, Meta)},
    **{kind: {1: ["layers.7"]} for kind in COUNTING},
    Normed: {1: ["layers.4"], 4: ["layers.1"]}, TiedTransformer: {1: ["blocks.2"], 4: ["blocks.0"]},
}  # fmt: skip


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9)


class Moving(L.Callback):
    """Asks for other stages after some batches, and notes which parameters this process held by each plan."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.plan = ""
        self.held: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        units = str([stage.units for stage in trainer.strategy.plan.stages])
        if units != self.plan:
            self.plan = units
            here = {p: name for name, p in module.named_parameters() if not p.is_meta}
            self.held.append(set(here.values()))
            assert trainer.optimizers[0].state.keys() <= here.keys(), "states of what has gone are left"
        if trainer.fit_loop.total_batch_idx in self.points:
            wanted = self.points[trainer.fit_loop.total_batch_idx]
            trainer.strategy.reconfigure(**{"num_stages" if isinstance(wanted, int) else "split_points": wanted})


def fit(
    devices: int, model: type[Regression], points: Points, path: Path, strategy: Any, **options: Any
) -> list[set[str]]:
    """Train, and save everything; returns the parameters that this process held, by plan."""
    torch.manual_seed(3)
    module, moving = model(strategy.pop("optimizer", "adamw")), Moving(points)
    callbacks = [moving, *options.pop("callbacks", list)()]
    strategy = {"num_microbatches": 2, "split_points": FIRST[model], "advance": 0, **strategy}
    runner = pipeline(2, devices, strategy, callbacks=callbacks, **options)
    runner.fit(module, loader(model, 32, 4), loader(model, 4, 4))
    runner.save_checkpoint(path)
    return moving.held


def assert_same_training(one: Path, other: Path) -> None:
    """Weights, optimizer states, parallel models and their optimizers."""
    states = [torch.load(path, weights_only=True) for path in (one, other)]
    assert states[0]["optimizer_states"][0]["state"], "there is something to compare"
    for key in ("state_dict", "optimizer_states", "AvgPipeStrategy"):
        assert_equal(*(state[key] for state in states), key)


@pytest.mark.parametrize(
    ("model", "points", "strategy", "options"),
    [
        (Normed, LATER[Normed], {"num_pipelines": 2, "averaging": Averaging(every=2)}, {}),
        (MLP, LATER[MLP], {}, {"accumulate_grad_batches": 3}),
        (Normed, {1: 4, 3: 1}, {"num_pipelines": 2, "split_points": None}, {}),  # more of them, or fewer
    ],
)
def test_other_stages_in_one_process_change_no_number(
    model: type[Regression], points: Points, strategy: Any, options: Any, tmp_path: Path
) -> None:
    assert len(fit(1, model, {}, tmp_path / "still", dict(strategy), **options)) == 1
    assert len(fit(1, model, points, tmp_path / "moved", dict(strategy), **options)) == 3
    assert_same_training(tmp_path / "still", tmp_path / "moved")


def several(cases: list[tuple[Any, Any, Any]], folder: Path) -> list[list[set[str]]]:
    return [
        fit(2, model, LATER[model], folder / f"two{i}", dict(strategy), **options)
        for i, (model, strategy, options) in enumerate(cases)
    ]


def compare_in_two(cases: list[tuple[Any, Any, Any]], folder: Path) -> None:
    """Moving between two processes is as staying in one. Of tied weights as moving in one: gradients are summed."""
    held = zip(*processes.everywhere(2, several, cases, folder, folder=folder), strict=True)
    for i, ((model, strategy, options), (here, there)) in enumerate(zip(cases, held, strict=True)):
        assert len(here) == len(there) == 1 + len(LATER[model])
        assert model is TiedTransformer or not any(map(set.intersection, here, there)), "what has gone is still held"
        names = {name for name, _ in model().named_parameters()}
        assert all(held == names for held in map(set.union, here, there)), "nobody holds it"
        fit(1, model, LATER[model] if model is TiedTransformer else {}, folder / "one", dict(strategy), **options)
        assert_same_training(folder / "one", folder / f"two{i}")


def more(num_pipelines: int, folder: Path) -> int:
    given = {"split_points": None, "num_pipelines": num_pipelines, "advance": "auto", "costs": "measured"}
    return len(fit(2, Normed, {1: 4, 4: 2}, folder / "two", given))


@pytest.mark.slow
@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_two_processes_go_on_with_more_stages(num_pipelines: int, tmp_path: Path) -> None:
    given = {"split_points": None, "num_pipelines": num_pipelines, "advance": "auto"}
    fit(1, Normed, {}, tmp_path / "one", given)
    assert processes.everywhere(2, more, num_pipelines, tmp_path, folder=tmp_path) == [3, 3]
    states = [torch.load(tmp_path / name, weights_only=True) for name in ("one", "two")]
    for state in states:
        state["AvgPipeStrategy"].pop("advance", None)
    for key in ("state_dict", "optimizer_states", "AvgPipeStrategy"):
        assert_equal(*(state[key] for state in states), key)


@pytest.mark.parametrize(("num_stages", "message"), [(3, "a multiple of 2; use num_stages=2"), (4, "")])
def test_numbers_of_stages_that_groups_cannot_host_are_refused(num_stages: int, message: str) -> None:
    layout = DeviceLayout(4)
    with pytest.raises(ConfigurationError, match=message or "2 groups with num_stages=2 and would be 1"):
        checks.stages(num_stages, 2, layout)
    checks.stages(num_stages * 4, 4, layout)


EVERYTHING: dict[str, list[tuple[Any, Any, Any]]] = {
    "between two steps": [(MLP, {"optimizer": "sgd"}, {"accumulate_grad_batches": 3})],
    "weights and states": [
        (Normed, {}, {}),
        (MLP, {"num_pipelines": 2, "averaging": Averaging(every=2)}, {}),
        (Remembering, {}, {}),
        (Meta, {}, {}),
        (Meta, {"num_pipelines": 2}, {}),
    ],
    "with other options": [
        (TiedTransformer, {}, {}),
        (TiedTransformer, {"optimizer": "sgd", "num_pipelines": 2}, {}),
        (Normed, {"num_pipelines": 2, "averaging": Averaging(outer_optimizer=outer)}, {}),
        (Normed, {"costs": "measured", "costs_cache": None}, {"precision": "bf16-mixed"}),
        (MLP, {"optimizer": "sgd", "num_pipelines": 2}, {"plugins": [half_mixed()]}),  # with a loss scale
        (MLP, {"recompute": True, "schedule": "afab"}, {"gradient_clip_val": 0.1}),
        (MLP, {}, {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)]}),
    ],
}


@pytest.mark.parametrize(
    "name", ["between two steps", *(pytest.param(n, marks=pytest.mark.slow) for n in [*EVERYTHING][1:])]
)
def test_whatever_is_trained_moves_between_processes(name: str, tmp_path: Path) -> None:
    compare_in_two(EVERYTHING[name], tmp_path)


# -- what cannot be had ------------------------------------------------------------------------------------------------


def refused(folder: Path) -> list[str]:
    found = []
    for model in (Counting, CountingInside):
        try:
            fit(2, model, LATER[model], folder / "never", {})
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_what_a_step_keeps_in_attributes_is_refused_where_it_would_move(tmp_path: Path) -> None:
    for found in processes.everywhere(2, refused, tmp_path, folder=tmp_path):
        assert "training_step keeps 'count' for the next batch" in found[0]
        assert "training_step keeps 'layers.5.calls' for the next batch" in found[1]
        assert "register_buffer" in found[0]


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (["layers.99"], PartitionError, "'layers.99' is not a submodule of MLP"),
        (["layers.2", "layers.4"], ConfigurationError, "names 2 units, but num_stages=2 needs 1"),
    ],
)
def test_names_that_cannot_be_are_refused_where_they_are_given(
    points: list[str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        fit(1, MLP, {1: points}, tmp_path / "never", {})


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (torch.optim.Adafactor, ""),
        (torch.optim.AdamW, ""),
        (torch.optim.NAdam, ""),
        (torch.optim.AdamW, "fused"),
        (torch.optim.NAdam, "capturable"),
    ],
)
def test_all_states_of_an_optimizer_go_to_the_device_of_its_parameters_but_counters(kind: Any, option: str) -> None:
    model = nn.ParameterList([torch.randn(3, 4), torch.randn(4), torch.tensor(1.0)])
    optimizer = kind(model.parameters())
    sum(parameter.square().sum() for parameter in model).backward()
    optimizer.step()
    optimizer.param_groups[0][option] = True  # its kernels count on the device
    move_state(optimizer, torch.device("meta"))
    left = {name for state in optimizer.state.values() for name, value in state.items() if not value.is_meta}
    assert not left if option else left in ({"step"}, {"step", "mu_product"})
