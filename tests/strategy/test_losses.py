"""What training_step may return, and what becomes of the gradients."""

from __future__ import annotations

import math
from collections import UserDict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import Averaging, AvgPipeStrategy, Links
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.training.stepping import global_norm
from tests import processes
from tests.comparing import assert_close, assert_equal, assert_same_parameters, state
from tests.models import MLP, TiedTransformer, UNet, loader
from tests.threads import alone
from tests.trainers import MICROBATCHES, both, loaders, pipeline, single, staged, trainer, twins


class Detached(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class Frozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class PerSample(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square()


WRONG = [
    (Detached, "a loss that needs no gradient.*unfreeze"),
    (Frozen, "a loss that needs no gradient.*unfreeze"),
    (PerSample, r"a loss of shape \(2, 8\).*loss\.mean\(\)"),
]


@pytest.mark.parametrize(("model", "message"), WRONG, ids=lambda case: getattr(case, "__name__", ""))
def test_a_loss_that_no_backward_can_start_from_is_refused_before_the_first_step(model: Any, message: str) -> None:
    runner = pipeline(2, strategy={"num_microbatches": 4, "num_pipelines": 2})
    with pytest.raises(ConfigurationError, match=message):
        runner.fit(model(), loader(MLP, 16, 8))
    assert runner.global_step == 0


class OneElement(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).reshape(1)


class InMapping(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        extra = {} if batch_idx else {"first": 1}
        return UserDict(loss=loss, rows=batch[0], twice=2 * loss.detach(), **extra)


@pytest.mark.parametrize("model", [OneElement, InMapping])
def test_any_form_that_lightning_takes_trains_as_on_one_device(model: Any) -> None:
    both(model, loaders(model, 24))


# -- skipping --------------------------------------------------------------------------------------------------------


class Skips(MLP):
    """Skips what has a negative first target: early, or when it has computed everything."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        bad = bool(batch[1][0, 0] < 0)
        if bad and self.early:
            return None
        loss = super().training_step(batch, batch_idx)
        self.log("trained", loss)
        return None if bad else loss


def data(signs: list[int]) -> tuple[Any, Any]:
    """Micro-batches and batches, with the sign of the targets of each micro-batch."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * len(signs), 8, generator=generator)
    targets = 0.1 + torch.rand(2 * len(signs), 8, generator=generator)
    samples = TensorDataset(inputs, targets * torch.tensor(signs).repeat_interleave(2)[:, None])
    return DataLoader(samples, batch_size=2), DataLoader(samples, batch_size=8)


SIGNS = [-1, 1, -1, 1, -1, -1, -1, -1, 1, 1, 1, -1]
FIRST_BATCH = [-1, -1, -1, -1, 1, -1, 1, 1, -1, 1, 1, 1]


@pytest.mark.parametrize(
    ("num_stages", "early", "recompute", "signs"),
    [(1, True, False, SIGNS), (3, True, False, FIRST_BATCH), (2, False, False, SIGNS), (2, True, True, FIRST_BATCH)],
)
def test_micro_batches_that_the_step_skips_contribute_nothing(
    num_stages: int, early: bool, recompute: bool, signs: list[int]
) -> None:
    make = partial(Skips, early=early)
    expected, found = both(make, data(signs), num_stages=num_stages, strategy={"recompute": recompute})
    assert found.global_step == expected.global_step


def test_a_model_whose_batch_is_skipped_stays_while_others_train() -> None:
    _, batches = data([-1, -1, -1, -1, 1, 1, 1, 1])
    model = Skips(early=True)
    before = [p.detach().clone() for p in model.parameters()]
    seen = []

    class Sees(Skips):
        def on_train_batch_end(self, *args: Any) -> None:
            for n in range(2):
                with self.trainer.strategy.parallel_model(n):
                    seen.append([p.detach().clone() for p in self.parameters()])

    model.__class__ = Sees
    pipeline(
        2,
        strategy={"num_pipelines": 2, "num_microbatches": 4, "averaging": Averaging(alpha=0.0, outer_lr=1)},
        max_epochs=1,
    ).fit(model, batches)
    assert_equal(seen[0], before)
    assert not all(torch.equal(a, b) for a, b in zip(seen[1], before, strict=True))


class Waits(MLP):
    """Trains from its third batch on, by a count of its own."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.log("calls", float(self.calls), on_step=False, on_epoch=True, reduce_fx="max")
        return loss if self.calls > 2 else None


def wait_in_rank(devices: int) -> tuple[dict[str, Tensor], int, int, float]:
    model = twins(Waits)[0]
    runner = trainer(strategy=AvgPipeStrategy(num_stages=2, num_microbatches=1), devices=devices, max_epochs=1)
    runner.fit(model, data(SIGNS)[0])
    return model.state_dict(), model.calls, runner.global_step, float(runner.callback_metrics["calls"])


# -- means over targets ----------------------------------------------------------------------------------------------


class Tokens(MLP):
    """A mean over the targets that are not ignored, of which micro-batches have unequal numbers, one of them none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def loss(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(
            self.head(self.layers(self.embed(batch["ids"]))).flatten(0, 1), batch["labels"].flatten()
        )
        self.log("largest", loss, reduce_fx="max", on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}


class Weighs(Tokens):
    def loss_weight(self, batch: Any) -> Tensor:
        return (batch["labels"] != -100).sum()


class HasAnother(Tokens):
    def loss_weight(self, epoch: int) -> float:
        return 0.0


def tokens() -> DataLoader[Any]:
    ids = torch.randint(0, 11, (16, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for i in range(16):
        labels[i, : i % 7] = -100
    labels[4:6] = -100
    return DataLoader([{"ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)], batch_size=8)


WEIGHTS = [(Tokens, lambda batch: (batch["labels"] != -100).sum()), (Weighs, None), (HasAnother, "labels")]


@pytest.mark.parametrize(("model", "loss_weight"), WEIGHTS)
def test_weighted_micro_batches_have_loss_gradients_and_logs_of_the_batch(model: Any, loss_weight: Any) -> None:
    strategy = {"num_microbatches": 4, "loss_weight": loss_weight}
    one, other = both(model, tokens(), tokens(), strategy=strategy)
    names = ("train_loss_step", "train_loss_epoch", "val_loss")
    expected, found = ({name: float(runner.callback_metrics[name]) for name in names} for runner in (one, other))
    assert found == pytest.approx(expected, abs=1e-6)
    assert_close(other.lightning_module.gradients, one.lightning_module.gradients, rtol=1e-4)


def test_unequal_numbers_of_targets_are_told() -> None:
    with pytest.warns(UserWarning, match=r"'labels' of the batch holds ignored targets \(-100\).*loss_weight='labels'"):
        pipeline(2, strategy={"num_microbatches": 4}, max_epochs=1).fit(Tokens().double(), tokens())


def test_a_weight_that_cannot_be_is_refused() -> None:
    for weight, message in (("label", "no such tensor, but 'ids', 'labels'"), (lambda batch: -1, "returned -1")):
        runner = pipeline(2, strategy={"num_microbatches": 4, "loss_weight": weight})
        with pytest.raises(ConfigurationError, match=message):
            runner.fit(Tokens(), tokens())
        assert runner.global_step == 0


def weigh_in_rank() -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, links = Tokens(), Links(reader="first")
    pipeline(2, 2, {"num_microbatches": 4, "loss_weight": "labels", "links": links}).fit(model, tokens())
    return model.state_dict()


# -- in two processes ------------------------------------------------------------------------------------------------


in_two = processes.shared(2, lambda rank: (wait_in_rank(2), weigh_in_rank()))


def test_a_step_that_counts_what_it_skips_trains_when_it_has_counted(in_two: Any) -> None:
    model = twins(Waits)[0]
    expected = trainer(max_epochs=1)
    expected.fit(model, data(SIGNS)[0])
    assert in_two[0][0][1] == model.calls == 12
    for (weights, _, steps, logged), _ in in_two:
        assert (steps, logged) == (expected.global_step, 12.0)
        assert_equal(weights, state(model))


def test_the_process_of_the_loss_gets_what_weighs(in_two: Any) -> None:
    torch.manual_seed(3)
    expected = Tokens()
    trainer().fit(expected, tokens())
    for _, weights in in_two:
        assert_close(weights, state(expected), rtol=1e-4)


# -- gradients are accumulated on top of micro-batches, and clipped by one norm over all stages ----------------------


@pytest.mark.parametrize(
    ("model", "accumulate", "batches", "steps"),
    [(MLP, 4, 8, 4), (UNet, 2, 8, 8), (MLP, 2, 5, 6)],  # the last batches of an epoch are a step, even if they are few
)
def test_accumulated_batches_equal_one_device_bitwise(
    model: type[Any], accumulate: int, batches: int, steps: int
) -> None:
    make, options = partial(model, "adamw"), {"accumulate": accumulate, "gradient_clip_val": 0.1}
    one, two = both(make, loaders(model, 8 * batches), **options)
    assert two.global_step == one.global_step == steps


def test_a_scheduler_of_accumulation_is_followed() -> None:
    plain, piped = twins(MLP)
    small, large = loaders(MLP, 64)
    one = trainer(max_epochs=4, callbacks=[GradientAccumulationScheduler({0: 4, 1: 16, 3: 8})])
    two = staged(max_epochs=4, callbacks=[GradientAccumulationScheduler({1: 4, 3: 2})])
    one.fit(plain, small)
    two.fit(piped, large)
    assert two.global_step == one.global_step == 8 + 2 + 2 + 4
    assert_same_parameters(plain, piped)


def test_a_validation_between_accumulated_batches_leaves_the_gradients_alone() -> None:
    models, data = twins(MLP), (loader(MLP, 64, 8), loader(MLP, 8, 4))
    for model, interval in zip(models, (1, 1.0), strict=True):
        runner = staged(val_check_interval=interval, num_sanity_val_steps=0, max_epochs=1, accumulate=4)
        runner.fit(model, *data)
    assert_same_parameters(*models)


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.02), ("value", 0.02), ("norm", 1e9)])
def test_clipped_training_equals_one_device_bitwise(algorithm: str, limit: float) -> None:
    both(MLP, loaders(MLP, 32), gradient_clip_val=limit, gradient_clip_algorithm=algorithm)


class ByLightning(MLP):
    """Clips half of the time."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


class ByTorch(MLP):
    """Calls torch's function under its own name, for one half of the model at a time, and logs the norms."""

    def on_after_backward(self) -> None:
        self.log_dict(grad_norm(self, 2, group_separator="."))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("norm_all", clip_grad_norm_(self.parameters(), 1e9))
        self.log("norm_inf", clip_grad_norm_(self.layers[:4].parameters(), 0.01, norm_type=math.inf))
        self.log("norm_3", clip_grad_norm_(self.layers[4:].parameters(), 0.02, norm_type=3))


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_the_norm_of_gradients_of_several_data_types_has_the_bits_of_torch(norm_type: float) -> None:
    torch.manual_seed(3)
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for count in range(1, len(kinds) + 1):
        parameters = [nn.Parameter(torch.randn(7).to(kind)) for kind in kinds[:count]]
        for parameter in parameters[count > 2 :]:
            parameter.grad = torch.randn_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        found = global_norm(gradients, parameters, alone(1), norm_type)
        expected = get_total_norm(gradients, norm_type)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


class InHook(MLP):
    """As before configure_gradient_clipping existed."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, "inf"))
        clip_grad_norm_(self.parameters(), 0.02)


class InCallback(MLP):
    """Leaves it to a callback."""

    def configure_callbacks(self) -> Any:
        def clip(trainer: Any, module: Any, optimizer: Any) -> None:
            clip_grad_norm_(module.parameters(), 0.02)

        return [LambdaCallback(on_before_optimizer_step=clip)]


class InTwoGroups(MLP):
    """Gives its optimizer the parameters in another order than its own, in which norms are added up."""

    def configure_optimizers(self) -> Any:
        of_biases, of_weights = ([p for n, p in self.named_parameters() if kind in n] for kind in ("bias", "weight"))
        return torch.optim.SGD([{"params": of_biases, "lr": 0.05}, {"params": of_weights}], lr=0.1)


MODELS = (MLP, ByLightning, ByTorch, InHook, InCallback, InTwoGroups)


def options(model: type[MLP]) -> dict[str, Any]:
    return {"gradient_clip_val": 0.02} if model in (MLP, InTwoGroups) else {}


def norms(runner: L.Trainer) -> dict[str, float]:
    return {key: float(value) for key, value in runner.callback_metrics.items() if "norm" in key}


def fit_all() -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    found = []
    for model in MODELS:
        torch.manual_seed(3)
        module, runner = model(), pipeline(2, 2, {"num_microbatches": MICROBATCHES}, **options(model))
        runner.fit(module, loader(MLP, 32, 8))
        found.append((module.state_dict(), norms(runner)))
    return found


@pytest.mark.slow
def test_every_way_of_clipping_takes_the_norm_over_all_processes(tmp_path: Path) -> None:
    for rank in processes.everywhere(2, fit_all, folder=tmp_path):
        for model, (weights, found) in zip(MODELS, rank, strict=True):
            torch.manual_seed(3)
            plain, runner = model(), single(**options(model))
            runner.fit(plain, loaders(MLP, 32)[0])
            assert_equal(weights, state(plain), model.__name__)
            assert found == pytest.approx(norms(runner), rel=1e-6)


def test_outside_of_the_hooks_torch_and_lightning_are_as_they_were() -> None:
    before = torch.nn.utils.clip_grad._get_total_norm, grad_norm.__code__, dict(vars(grad_norm))
    staged(gradient_clip_val=1.0).fit(InHook(), loader(MLP, 8, 8))
    assert before == (torch.nn.utils.clip_grad._get_total_norm, grad_norm.__code__, vars(grad_norm))


# -- hooks that see the gradients of a part of a step's batches --------------------------------------------------------


class Shifting(TiedTransformer):
    """Changes gradients after each of the batches that make a step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        for parameter in self.parameters():
            if parameter.grad is not None and not parameter.grad.is_meta:
                parameter.grad.mul_(0.5).add_(0.01)


def shifted(devices: int, strategy: dict[str, Any] | None = None) -> tuple[Shifting, dict[str, Tensor]]:
    torch.manual_seed(3)
    model, options = Shifting(), {"accumulate_grad_batches": 3, "max_epochs": 2, "use_distributed_sampler": False}
    runner: Any = trainer(**options) if strategy is None else pipeline(2, devices, strategy, **options)
    batches = list(loader(Shifting, 40, 8))
    if devices == 4:  # each replica has a half of each batch
        here = runner.strategy.group_number
        batches = [[part[4 * here :][:4] for part in batch] for batch in batches]
    runner.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return model, state(model)


def shifted_by_processes(count: int) -> Any:
    strategy = {"replicas": 2} if count == 4 else {}
    model, weights = shifted(count, {"num_microbatches": 2, "verify": False, **strategy})
    return model.norms, weights


@pytest.mark.parametrize("count", [1, 2, 4])  # of processes; four are two replicas
def test_hooks_that_see_gradients_of_accumulated_batches_see_whole_ones(count: int, tmp_path: Path) -> None:
    expected, weights = shifted(1)
    if count == 1:
        model, found = shifted(1, {"num_microbatches": 2, "verify": False})
        results = [(model.norms, found)]
    else:
        results = processes.everywhere(count, shifted_by_processes, count, folder=tmp_path)
    for norms, tensors in results:
        assert norms == pytest.approx(expected.norms, rel=1e-4)
        assert_close(tensors, weights, rtol=1e-4)
