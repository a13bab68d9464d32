"""What Lightning does around training finds the model that it should."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.errors import ConfigurationError
from tests.averaging.models import Batches, Models, Net, Skips, train
from tests.comparing import assert_equal, state
from tests.models import MLP, Regression, loader
from tests.strategy.test_callbacks import Sized
from tests.strategy.test_precision import half_mixed
from tests.trainers import Reconfigures, pipeline, trainer

HOOKS = ("on_validation_start", "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end")


class Sees(L.Callback):
    """Whose weights the hooks of a validation and of training see."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Tensor]] = {}
        for hook in (*HOOKS, "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"):
            setattr(self, hook, lambda trainer, module, *_, hook=hook: self.note(hook, trainer, module))

    def note(self, hook: str, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            return
        self.seen[hook] = state(module)
        with trainer.strategy.reference() as reference:
            self.seen[f"{hook} reference"] = state(reference)
        if trainer.strategy.run.deployment.parallel.ensemble is not None:
            with trainer.strategy.parallel_model(0) as model:
                self.seen[f"{hook} own"] = state(model)
        assert_equal(state(module), self.seen[hook])


def test_evaluation_sees_the_reference_and_training_the_first_model() -> None:
    class Kept(Net):
        def on_validation_model_eval(self) -> None:
            self.seen_in_eval = state(self)
            super().on_validation_model_eval()

    torch.manual_seed(3)
    model, sees = Kept("adamw"), Sees()
    train(model, loader(Net, 48, 8), 2, loader(Net, 16, 8), trainer={"callbacks": [sees], "val_check_interval": 2})
    for hook in HOOKS:
        assert_equal(sees.seen[hook], sees.seen[f"{hook} reference"])
    assert_equal(model.seen_in_eval, sees.seen["on_validation_end"])
    for hook in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"):
        assert_equal(sees.seen[hook], sees.seen[f"{hook} own"])
    assert not torch.equal(sees.seen["on_train_batch_end"]["scale"], sees.seen["on_train_batch_end reference"]["scale"])


def test_logged_values_are_those_of_all_batches_together() -> None:
    torch.manual_seed(3)
    one = MLP()
    many = copy.deepcopy(one)
    metrics = []
    frozen = {"lr": 0.0}
    for module, make in ((one, lambda: trainer(max_epochs=1)), (many, None)):
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), **frozen)
        if make is None:
            runner = train(module, loader(MLP, 44, 8), 2).trainer
        else:
            runner = make()
            runner.fit(module, loader(MLP, 44, 16))
        metrics.append({name: value.item() for name, value in runner.callback_metrics.items()})
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-6)


class Finetuned(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).tanh())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_frozen_parameters_are_shared_until_they_train() -> None:
    torch.manual_seed(3)
    start = Finetuned()
    found = {}
    for epochs in (1, 3):
        model = copy.deepcopy(start)
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-2)
        options = {"max_epochs": epochs, "callbacks": [unfreezing]}
        found[epochs] = train(model, loader(MLP, 48, 8), 2, trainer=options)
    for name, parameter in start.named_parameters():
        shared = "backbone" in name and "backbone.1" not in name  # norms train all the time
        one, other = (model[name] for model in found[1].models)
        assert torch.equal(one, other) == shared
        assert torch.equal(one, parameter) == shared
        one, other = (model[name] for model in found[3].models)
        assert not torch.equal(one, other)
        torch.testing.assert_close(found[3].reference[name], (one + other) / 2, rtol=1e-6, atol=1e-6)


def test_pipelines_come_and_go_between_iterations() -> None:
    class Notes(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.samples: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.samples += batch[0][:, 0].tolist()
            return super().training_step(batch, batch_idx)

    torch.manual_seed(3)
    model = Notes()
    data = loader(MLP, 4 * 16, 4)
    settings = {1: {"num_pipelines": 3}, 3: {"num_pipelines": 2, "num_microbatches": 1}, 4: {"num_pipelines": 1}}
    callback = Reconfigures(settings)
    found = train(model, data, 1, num_pipelines=1, trainer={"callbacks": [callback], "num_sanity_val_steps": 0})
    assert callback.models == [1, 1, 3, 3, 2, *[1] * 6]
    assert found.trainer.global_step == 11
    everything = [value for batch in data for value in batch[0][:, 0].tolist()]
    assert sorted(model.samples[-64:]) == pytest.approx(sorted(everything))


class Explodes(Net):
    """A batch that begins with this number has an infinite gradient."""

    at = -1.0

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * torch.where(batch[0][0, 0] == self.at, torch.inf, 1.0)


def test_an_infinite_gradient_in_one_pipeline_skips_the_step_of_all() -> None:
    batches = list(loader(Net, 48, 8))
    models, scales = [], []
    for at, used in ((batches[3][0][0, 0].item(), batches), (-1.0, batches[:2] + batches[4:])):
        torch.manual_seed(3)
        model = Explodes("adam", dropout=0.0)
        model.at = at
        plugin = half_mixed()
        found = train(model, Batches(used), 2, trainer={"plugins": [plugin]})
        models.append(found.models)
        scales.append(plugin.scaler.get_scale())
    for one, other in zip(*models, strict=True):
        weights = [name for name, _ in model.named_parameters()]  # the norm has seen the batch
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in weights)
    assert scales == [2.0**9, 2.0**11]  # halved by the batch; grown after two without it


def test_the_models_that_step_without_the_first_share_a_loss_scale() -> None:
    batches = list(loader(Net, 48, 8))
    batches[0][0].zero_()
    models = []
    for interval in (1, 1000):
        torch.manual_seed(3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        found = train(Skips("adam", dropout=0.0), Batches(batches), 2, num_pipelines=3, trainer={"plugins": [plugin]})
        models.append(found.models)
        assert scaler.get_scale() == (2.0**12 if interval == 1 else 2.0**10)  # grown once an iteration
    assert_equal(*models)


def test_parameters_that_begin_to_train_step_with_unscaled_gradients_in_every_model() -> None:
    models = []
    for scale in (2.0**8, 2.0**12):
        torch.manual_seed(3)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        options = {
            "max_epochs": 2,
            "callbacks": [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-2)],
            "plugins": [MixedPrecision("16-mixed", "cpu", scaler)],
        }
        models.append(train(Finetuned(), loader(MLP, 48, 8), 2, trainer=options).models)
        assert scaler.get_scale() == scale  # no step was skipped
    assert_equal(*models)


class Hooked(Net):
    """Its optimizer has a hook of the user's."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


def test_optimizers_of_other_models_have_the_hooks_that_the_user_has_registered() -> None:
    found: list[list[int]] = []

    def count(trainer: Any, *_: Any) -> None:
        others = trainer.strategy.run.deployment.parallel.ensemble.optimizers.of(1)
        found.append([len(each._optimizer_step_post_hooks) for each in (*trainer.optimizers, *others)])

    train(Hooked(), loader(Net, 32, 8), trainer={"callbacks": [LambdaCallback(on_train_batch_end=count)]})
    assert found == [[1, 1]] * 2


class Limited(MLP):
    """Runs out of memory if a micro-batch has more than two samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_a_batch_size_finder_finds_what_all_models_have_room_for() -> None:
    found = []
    for callbacks, size in (([BatchSizeFinder(max_trials=4, steps_per_trial=2)], 2), ([], 4)):
        torch.manual_seed(3)
        data, model, models = Sized(), Limited("momentum"), Models()
        data.batch_size = size
        runner = pipeline(
            2, strategy={"num_pipelines": 2, "num_microbatches": 2}, callbacks=[*callbacks, models], max_epochs=1
        )
        runner.fit(model, datamodule=data)
        assert (data.batch_size, runner.global_step) == (4, 6)
        found.append([*models.models, models.reference, state(model)])
    assert_equal(*found)


# -- what would leave pipeline 0's model alone -------------------------------------------------------------------------


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def turn(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.copy_(parameter.flip(0))


def changes(hook: str, change: Callable[[nn.Module], None] = clamp) -> list[L.Callback]:
    return [LambdaCallback(**{hook: lambda trainer, module, *_: change(module)})]


class InStep(MLP):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        clamp(self)


class BetweenClosureAndStep(MLP):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for parameter in self.layers[0].parameters():
            parameter.grad *= 0.5
        optimizer.step()


class Outside(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.zeros(3, requires_grad=True)], lr=0.1)


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Sharp(MLP):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.1)


class TwoKinds(torch.optim.SGD):
    def eval(self) -> None:
        pass


class ScheduleFree(MLP):
    def configure_optimizers(self) -> Any:
        return TwoKinds(self.parameters(), lr=0.1)


WIDER = {0: {"num_pipelines": 2}}
SEEN_ALONE = r"changed 'layers.0.weight', .* and \d more of pipeline 0's model, which hooks see, and not of the 1 other"
AVERAGES = "averages the weights of one model, but num_pipelines=2 .* remove it"


@pytest.mark.parametrize(
    ("make", "callbacks", "options", "message"),
    [
        (MLP, lambda: changes("on_train_batch_end"), {}, SEEN_ALONE),
        (MLP, lambda: changes("on_train_batch_end", turn), {}, SEEN_ALONE),  # the same numbers elsewhere
        (MLP, lambda: changes("on_train_epoch_end"), {}, SEEN_ALONE),
        (InStep, list, {"averaging": Averaging(every=2)}, "code after the step in optimizer_step"),
        (BetweenClosureAndStep, list, {}, r"changes the gradient of 'layers\.0\.bias' .* on_before_optimizer_step"),
        (MLP, lambda: [StochasticWeightAveraging(0.1)], {}, f"StochasticWeightAveraging {AVERAGES}"),
        (MLP, lambda: [Reconfigures(WIDER), StochasticWeightAveraging(0.1)], {"num_pipelines": 1}, AVERAGES),
        (MLP, lambda: [WeightAveraging()], {}, f"WeightAveraging {AVERAGES}"),
        (MLP, lambda: [Reconfigures(WIDER), WeightAveraging()], {"num_pipelines": 1}, AVERAGES),
        (
            MLP,
            lambda: [ModelPruning("l1_unstructured", amount=0.5)],
            {},
            r"ModelPruning puts other parameters .* num_pipelines=2 .* remove",
        ),
        (Outside, list, {}, r"SGD trains a tensor of shape \(3,\) that is not a parameter"),
        (ScheduleFree, list, {}, "TwoKinds has a method eval, .* num_pipelines=1"),
        (Sharp, list, {}, r"Twice evaluates its closure several times .* with 2 parallel"),
    ],
)
def test_what_would_change_one_model_alone_is_refused(
    make: type[MLP], callbacks: Callable[[], list[L.Callback]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train(make(), loader(MLP, 48, 8), 2, trainer={"callbacks": callbacks(), "max_epochs": 2}, **options)


def test_who_changes_all_models_goes_on() -> None:
    def clamp_all(trainer: Any, *_: Any) -> None:
        for n in range(trainer.strategy.num_pipelines):
            with trainer.strategy.parallel_model(n) as model:
                clamp(model)

    options = {"callbacks": [LambdaCallback(on_train_batch_end=clamp_all)], "max_epochs": 2}
    found = train(Net("adamw"), loader(Net, 48, 8), 2, loader(Net, 16, 8), trainer=options)
    assert found.trainer.global_step == 6
    for model in found.models:
        assert max(p.abs().max() for name, p in model.items() if "weight" in name) <= 0.1


def test_a_failure_leaves_the_reference() -> None:
    class Fails(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                with trainer.strategy.reference() as reference:
                    self.reference = state(reference)
                raise RuntimeError("stop")

    fails, model = Fails(), MLP()
    with pytest.raises(RuntimeError, match="stop"):
        train(model, loader(MLP, 64, 8), 2, trainer={"callbacks": [fails]})
    assert_equal(fails.reference, state(model))


class Masks(L.Callback):
    """Gives a weight a hook that stops its gradient from the second epoch on: then, or from the start."""

    def __init__(self, early: bool) -> None:
        self.early = early

    def on_fit_start(self, trainer: L.Trainer, module: Any) -> None:
        if self.early:
            module.layers[0].weight.register_hook(lambda gradient: gradient * (trainer.current_epoch == 0))

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if not self.early and trainer.current_epoch == 1:
            module.layers[0].weight.register_hook(lambda gradient: gradient * 0)


def test_a_hook_of_a_gradient_that_comes_late_acts_on_every_model() -> None:
    found = []
    for early in (True, False):
        torch.manual_seed(3)
        options = {"callbacks": [Masks(early)], "max_epochs": 2}
        found.append(train(MLP(), loader(MLP, 32, 8), trainer=options).models)
    assert_equal(*found)


class Looks(MLP):
    """Looks at the reference and at another model in a hook that is called for each model."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool, bool]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        before = self.layers[0].weight
        with strategy.reference():
            pass
        after_reference = self.layers[0].weight is before
        with strategy.parallel_model(1):
            pass
        self.found.append((id(before), after_reference, self.layers[0].weight is before))


def test_a_hook_that_has_looked_at_another_model_finds_its_own_again() -> None:
    module = Looks()
    train(module, loader(MLP, 32, 8))
    assert len({number for number, *_ in module.found}) == 2
    assert all(same for _, *after in module.found for same in after)
