"""Any precision: the pipeline calls the plugin's interface, so it trains as one device does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from tests import processes
from tests.comparing import assert_equal, assert_same_parameters
from tests.models import MLP, TinyTransformer, loader
from tests.trainers import both, loaders, pipeline, single, staged, twins


def half_mixed() -> MixedPrecision:
    """On the CPU Lightning makes bfloat16 of ``precision="16-mixed"``; as a plugin it is taken at its word."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


class Copied(Precision):
    """A user's own: computes in double, with scaled inputs and a scaled loss, and clips in its own way."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double()

    def convert_input(self, data: Any) -> Any:
        inputs, targets = data
        return inputs.double() / 4.0, targets.double()

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def pre_backward(self, tensor: Tensor, module: L.LightningModule) -> Tensor:  # type: ignore[override]
        return super().pre_backward(tensor, module) * 4.0

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        loss = closure()
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                parameter.grad /= 4.0
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return loss


def options(name: str) -> dict[str, Any]:
    plugins = {"16-mixed": half_mixed, "own": Copied}
    return {"plugins": [plugins[name]()]} if name in plugins else {"precision": name}


PRECISIONS = ("64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", "own")


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_trains_as_on_one_device_bitwise(name: str) -> None:
    make = partial(MLP, "sgd" if name == "16-true" else "adamw")  # half has no 1e-8, AdamW's epsilon
    runners = both(make, loaders(MLP, 32), loader(MLP, 8, 4), gradient_clip_val=0.1, **options(name))
    logged = [{k: v.item() for k, v in runner.callback_metrics.items() if "step" not in k} for runner in runners]
    assert len({next(runner.lightning_module.parameters()).dtype for runner in runners}) == 1
    coarse = 1e-2 if name in ("bf16-true", "16-true") else 1e-6  # logged values have the precision of the loss
    assert logged[1] == pytest.approx(logged[0], rel=coarse)


def test_evaluation_has_the_precision_of_one_device() -> None:
    plain, piped = twins(TinyTransformer)
    data = loader(TinyTransformer, 6, 3)
    expected = single(**options("bf16-mixed")).predict(plain, data)
    found = staged(strategy={"num_microbatches": 1}, **options("bf16-mixed")).predict(piped, data)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class Overflowing(MLP):
    """In some batches of an epoch the gradients of one layer are infinite."""

    def __init__(self, where: int, batches: Collection[int]) -> None:
        super().__init__("adamw")
        self.batch_idx = 0
        self.batches = batches
        self.layers[where].weight.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient * float("inf") if self.batch_idx in self.batches else gradient

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx


class Steps(L.Callback):
    """The scale and the weights that this rank holds, after each batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.changed: list[bool] = []
        self.before: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        own = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
        if self.before:
            self.changed.append(any(not torch.equal(self.before[name], own[name]) for name in own))
        self.before = own


def fit_overflowing(devices: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for where in (0, 8):
        torch.manual_seed(3)
        model, steps = Overflowing(where, [1]), Steps()
        runner = pipeline(
            2, devices, {"num_microbatches": 4}, callbacks=[steps], plugins=[half_mixed()], gradient_clip_val=0.1
        )
        runner.fit(model, loader(MLP, 32, 8), loader(MLP, 8, 8))
        found.append((steps.scales, steps.changed, model.state_dict()))
    torch.manual_seed(3)
    model = MLP()
    model.layers[:4].requires_grad_(False)  # a stage without gradients
    runner = pipeline(2, devices, {"split_points": ["layers.4"]}, plugins=[half_mixed()])
    runner.fit(model, loader(MLP, 32, 8))
    found.append((runner.precision_plugin.scaler.get_scale(), None, model.state_dict()))
    return found


def test_an_infinite_gradient_on_any_stage_skips_the_step_on_all(tmp_path: Path) -> None:
    one = fit_overflowing(1)
    for rank in processes.everywhere(2, fit_overflowing, 2, folder=tmp_path):
        for (scales, changed, weights), (expected_scales, _, expected) in zip(rank, one, strict=True):
            assert scales == expected_scales
            assert_equal(weights, expected)
            if changed is not None:
                assert changed == [False, True, True, True, False, True, True]  # the second batch of each epoch
                assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0, 1024.0]


def test_scale_and_weights_after_an_overflow_are_those_of_one_device() -> None:
    small, large = loaders(MLP, 32)
    states = []
    for make, data, batches in ((single, small, range(4, 8)), (staged, large, [1])):
        torch.manual_seed(3)
        model, runner = Overflowing(8, batches), make(plugins=[half_mixed()])
        runner.fit(model, data)
        states.append((runner.precision_plugin.scaler.get_scale(), model))
    assert states[0][0] == states[1][0] == 1024.0
    assert_same_parameters(states[0][1], states[1][1])
