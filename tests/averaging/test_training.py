"""Parallel models train as they must, whatever the number of stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe import Averaging
from lightning_avgpipe.averaging.integrity import first_nonfinite, has_nonfinite
from lightning_avgpipe.engine.executor import Lane
from lightning_avgpipe.errors import NonFiniteError
from tests.averaging.models import Batches, Net, train
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import pipeline


def net(make: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(3)
    return make()


# -- gradients and hooks that may change them ------------------------------------------------------------------------


class Quiet(Net):
    def __init__(self) -> None:
        super().__init__("adamw", dropout=0.0)


def change(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:  # a process has those of its own stages
            parameter.grad.clamp_(-0.01, 0.002)


class AfterBackward(Quiet):
    def on_after_backward(self) -> None:
        change(self)


class BeforeStep(Quiet):
    """Looks at the optimizer, and changes its learning rate relative to what it was."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sign_()


class Clips(Quiet):
    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        change(self)


class Callback(L.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        change(module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


WARMED_UP: dict[str, Any] = {
    name: partial(Net, name, dropout=0.0, warm_up=True) for name in ("momentum", "adamw", "asgd", "slowing")
}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *(pytest.param(make, lambda: {"gradient_clip_val": 0.5}, id=name) for name, make in WARMED_UP.items()),
        (AfterBackward, dict),
        (BeforeStep, dict),
        (Clips, dict),
        pytest.param(Quiet, lambda: {"callbacks": [Callback()]}, id="Callback"),
        pytest.param(
            Quiet, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, id="clipped by value"
        ),
    ],
)
def test_models_that_never_meet_are_independent_runs_bitwise(
    make: Callable[[], Any], options: Callable[[], dict[str, Any]]
) -> None:
    found = train(net(make), loader(Net, 48, 8), 2, averaging=Averaging(alpha=0.0, outer_lr=1.0), trainer=options())
    batches = list(loader(Net, 48, 8))
    for n, model in enumerate(found.models):
        alone = net(make)
        runner = pipeline(2, strategy={"num_microbatches": 2}, max_epochs=1, **options())
        runner.fit(alone, Batches(batches[n::2]))
        assert_equal(state(alone), model)


def test_a_pipeline_without_a_batch_has_no_gradients_to_look_at() -> None:
    class Looks(Quiet):
        def __init__(self) -> None:
            super().__init__()
            self.backwards = self.steps = 0

        def on_after_backward(self) -> None:
            self.backwards += 1
            assert all(parameter.grad is not None for parameter in self.parameters())

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self.steps += 1
            self.log("norm", torch.tensor(float(self.steps)), on_step=True)

    model = Looks()
    found = train(model, loader(Net, 40, 8))  # of the third iteration only pipeline 0 has a batch
    assert (model.backwards, model.steps) == (5, 5)
    assert found.trainer.callback_metrics["norm"] == 5  # pipeline 0's in the last iteration


# -- the reference, batches, counts ------------------------------------------------------------------------------------


def reference_is_mean(found: Any) -> None:
    for name, tensor in found.reference.items():
        models = [model[name] for model in found.models]
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack(models).mean(0), rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(tensor, models[0]), name


@pytest.mark.parametrize(
    "options",
    [
        {"num_pipelines": 3, "averaging": Averaging(alpha=0.1, outer_lr=0.5)},
        {"averaging": Averaging(outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))},
        {"averaging": Averaging(outer_optimizer=partial(torch.optim.AdamW, lr=1e-3)), "num_pipelines": 4},
    ],
)
def test_the_reference_is_the_mean_of_the_models_and_what_fit_leaves(options: Any) -> None:
    model = net(partial(Net, "adam"))
    found = train(model, loader(Net, 56, 8), num_stages=2, **options)
    reference_is_mean(found)
    assert_equal(found.reference, state(model))
    for one, other in zip(found.models, found.models[1:], strict=False):
        assert not any(torch.equal(one[name], other[name]) for name, _ in model.named_parameters())


class Freezes(L.Callback):
    """Freezes a layer in the midst of training."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.layers[2].requires_grad_(False)
            self.models = []
            for n in range(2):
                with trainer.strategy.parallel_model(n) as model:
                    self.models.append(state(model))


@pytest.mark.parametrize("every", [1, 3])
def test_an_outer_optimizer_with_momentum_and_decay_leaves_frozen_layers_at_their_mean(every: int) -> None:
    freezes, model = Freezes(), MLP()
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, weight_decay=0.1)
    averaging = Averaging(alpha=1.0, every=every, outer_optimizer=outer)
    train(model, loader(MLP, 64, 8), averaging=averaging, trainer={"callbacks": [freezes], "max_epochs": 3})
    for name, tensor in state(model).items():
        mean = torch.stack([models[name] for models in freezes.models]).mean(0)
        assert torch.allclose(tensor, mean, rtol=1e-6) == name.startswith("layers.2.")


def test_results_depend_on_neither_stages_nor_schedules_nor_their_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for num_stages, schedule, order in [(1, "1f1b", 0), (3, "afab", 0), (2, "advance_forward", 1)]:
        with monkeypatch.context() as patched:
            if order:
                calls = torch.Generator().manual_seed(order)
                patched.setattr(Lane, "urgency", lambda lane, calls=calls: torch.rand((), generator=calls).item())
            model = net(partial(Net, "adamw"))
            found = train(model, loader(Net, 44, 8), num_stages, loader(Net, 8, 4), num_pipelines=3, schedule=schedule)
        metrics = {name: value for name, value in found.trainer.callback_metrics.items() if "val" not in name}
        results.append([*found.models, found.reference, metrics])
    assert_equal(results, [results[0]] * len(results))


def test_batches_are_read_once_and_in_turn_and_lightning_sees_those_of_pipeline_0() -> None:
    class Counts(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.trained: list[Any] = []
            self.transferred = 0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.transferred += 1
            return batch

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen.append((batch_idx, batch[0][0, 0].item()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.trained += batch[0][:, 0].tolist()
            return super().training_step(batch, batch_idx)

    data = loader(MLP, 30, 4)  # eight batches
    model = Counts()
    runner = pipeline(1, strategy={"num_pipelines": 3, "num_microbatches": 1}, max_epochs=1)
    runner.fit(model, data)
    samples = [value for batch in data for value in batch[0][:, 0].tolist()]
    assert runner.global_step == runner.num_training_batches == 3
    assert model.transferred == 8
    assert model.seen == [(i, pytest.approx(samples[12 * i])) for i in range(3)]
    assert sorted(model.trained[-30:]) == pytest.approx(sorted(samples))


def test_limits_steps_and_schedulers_count_iterations() -> None:
    class Scheduled(MLP):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    strategy = {"num_pipelines": 2, "num_microbatches": 2}
    for options, iterations, steps in [
        ({"limit_train_batches": 3}, 3, 3),
        ({"limit_train_batches": 0.5}, 3, 3),
        ({"max_steps": 4}, 5, 4),
        ({"accumulate_grad_batches": 2}, 5, 3),
    ]:
        runner = pipeline(1, strategy=strategy, **{"max_epochs": 1, **options})
        runner.fit(Scheduled(), loader(MLP, 80, 8))
        assert (runner.num_training_batches, runner.global_step) == (iterations, steps), options
        assert runner.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**steps)
        # the scheduler's last value counts for every model alike


# -- a gradient that is NaN does not reach the reference model -------------------------------------------------------


CPU = torch.device("cpu")
INFINITE, NAN = float("inf"), float("nan")


class Poisoned(MLP):
    """The samples of one batch make its loss infinite, and its gradients no numbers; normalised on the way."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


def data(poisoned: int | None, batches: int = 8) -> Any:
    """The same batches, of which one may have an infinite value."""
    torch.manual_seed(7)
    found = [MLP.example(8) for _ in range(batches)]
    if poisoned is not None:
        found[poisoned][0][3, 3] = INFINITE
    return torch.utils.data.DataLoader(found, batch_size=None)


def trained(poisoned: int | None, optimizer: str = "sgd", num_stages: int = 2, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Poisoned(optimizer)
    models = train(model, data(poisoned), num_stages, **options)
    return model.state_dict(), models


@pytest.mark.parametrize("value", [INFINITE, -INFINITE, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_number_among_many_is_found(value: float, dtype: torch.dtype) -> None:
    huge = torch.tensor(-1e300, dtype=torch.float64)  # its square is infinite, and so is the norm of the next
    complexes = torch.full((2,), complex(3e38, 3e38), dtype=torch.complex64)
    sound = [torch.ones(100, 3, dtype=dtype), torch.zeros(0), torch.full((4,), 60000.0, dtype=dtype), huge, complexes]
    assert not has_nonfinite(sound, CPU)
    assert not has_nonfinite([], CPU)
    ill = torch.ones(50, 7, dtype=dtype)
    ill[20, 3] = value
    sparse = torch.sparse_coo_tensor([[1]], [value], (4,), check_invariants=True)
    for among in ([*sound, ill], [sparse]):
        assert has_nonfinite(among, CPU) == 1
    assert first_nonfinite({"a": huge, "b": ill, "c": ill}) == "b"


def test_by_default_parallel_models_stop_before_any_has_stepped() -> None:
    message = r"pipeline 1, batch_idx 1: the gradient of 'layers\.0\.weight' is infinite or NaN.* as it was"
    with pytest.raises(NonFiniteError, match=message):
        trained(3)


def test_a_single_model_goes_on_by_default_as_with_any_strategy_and_stops_if_that_is_wanted() -> None:
    weights, _ = trained(3, num_pipelines=1)
    assert all(torch.isnan(w).all() for name, w in weights.items() if name.endswith("weight"))
    with pytest.raises(NonFiniteError, match=r"^batch_idx 3: the gradient of 'layers\.0\.weight'"):
        trained(3, num_pipelines=1, averaging=Averaging(on_nonfinite="raise"))


@pytest.mark.parametrize(("optimizer", "poisoned"), [("sgd", 2), ("adamw", 3)])
def test_a_model_that_is_skipped_is_left_out_of_the_mean_and_trains_again(optimizer: str, poisoned: int) -> None:
    logger = CSVLogger(".", version=0)
    with pytest.warns(UserWarning, match=f"batch_idx 1: pipeline {poisoned % 2} had a gradient that is infinite"):
        weights, models = trained(
            poisoned,
            optimizer,
            averaging=Averaging(on_nonfinite="skip"),
            trainer={"logger": logger, "log_every_n_steps": 1},
        )
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert models.trainer.strategy.skipped_models == 1
    assert "avgpipe/skipped_models" in Path("lightning_logs/version_0/metrics.csv").read_text()


def test_the_reference_goes_on_with_the_mean_of_the_others() -> None:
    def reference(after: int, poisoned: int | None, **options: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def keep(trainer: Any, module: Any, *_: Any) -> None:
            with trainer.strategy.reference():
                if trainer.global_step == after:
                    found.update({name: p.detach().clone() for name, p in module.named_parameters()})

        trained(poisoned, trainer={"callbacks": [LambdaCallback(on_train_batch_end=keep)]}, **options)
        return found

    # one step: of three models the last one's batch is poisoned, and the reference moves as the two others do
    left_out = reference(1, 2, num_pipelines=3, averaging=Averaging(alpha=1.0, outer_lr=1.0, on_nonfinite="skip"))
    others = reference(1, None, num_pipelines=2, averaging=Averaging(alpha=1.0, outer_lr=1.0))
    assert_close(left_out, others, rtol=1.3e-6)
