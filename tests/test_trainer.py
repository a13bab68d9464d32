"""What a user does with a Trainer, with all stages in one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.models import MLP, ConvNet, Regression, TinyTransformer, loader
from tests.trainers import both, pipeline, trainer, twins


class Sum(MLP):
    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - batch[1]).square().sum() * 1e-3


class Ragged(MLP):
    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        inputs, targets = batch
        return [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])]


@pytest.mark.parametrize(
    ("model", "strategy"), [(ConvNet, {}), (TinyTransformer, {}), (Sum, {"loss_reduction": "sum"}), (Ragged, {})]
)
def test_fit_equals_single_device_to_rounding(model: type[Regression], strategy: dict[str, Any]) -> None:
    both(model, loader(model, 20, 8), loader(model, 8, 4, seed=1), strategy=strategy)


def test_validate_test_and_predict_equal_single_device() -> None:
    piped, plain = twins(TinyTransformer)
    data = loader(TinyTransformer, 10, 4)
    runs = [(plain, trainer()), (piped, pipeline(3))]
    for method in ("validate", "test"):
        expected, found = (getattr(runner, method)(module, data, verbose=False) for module, runner in runs)
        assert found[0] == pytest.approx(expected[0], abs=1e-6)
    expected, found = (runner.predict(module, data) for module, runner in runs)
    assert [p.shape for p in found] == [p.shape for p in expected]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))
    assert "log" not in vars(piped)


def test_outputs_of_a_step_are_those_of_the_whole_batch() -> None:
    class Outputs(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            prediction = self(batch[0])
            return {"loss": (prediction - batch[1]).square().mean(), "prediction": prediction, "names": ["a"]}

    class Monitor(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs, self.batch = outputs, batch

    watch = Monitor()
    pipeline(2, max_steps=1, callbacks=[watch]).fit(Outputs(), loader(MLP, 6, 6))
    assert watch.outputs["prediction"].shape == (6, 8)
    assert not watch.outputs["prediction"].requires_grad
    expected = (watch.outputs["prediction"] - watch.batch[1]).square().mean()
    torch.testing.assert_close(watch.outputs["loss"], expected)


@pytest.mark.parametrize("points", [None, ["blocks.1", "norm"]])
def test_a_plan_tells_what_each_stage_does(points: list[str] | None) -> None:
    runner = pipeline(3, strategy={"split_points": points}, max_steps=1)
    runner.fit(TinyTransformer(), loader(TinyTransformer, 8, 8))
    plan = runner.strategy.plan
    assert [stage.index for stage in plan.stages] == [0, 1, 2]
    begins = [stage.units[0] for stage in plan.stages]
    assert begins == ["embed", *points] if points else begins[0] == "embed"
    assert "position" in plan.stages[0].parameters
    assert plan.stages[2].units[-1] == "head"
    assert all(stage.sends and stage.boundary_bytes > 0 for stage in plan.stages[:2])
    assert sum(stage.share for stage in plan.stages) == pytest.approx(1.0)
    assert "embed" in str(plan)
