"""A hook that changes the weights of pipeline 0's model alone is told of."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.errors import ConfigurationError
from tests.averaging.models import Net, train
from tests.models import MLP, loader


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


class InHook(L.Callback):
    """Changes weights in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module, *_: clamp(module))


class InStep(MLP):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        clamp(self)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_hook_that_changes_the_weights_it_sees_is_refused(hook: str) -> None:
    says = r"changed 'layers.0.weight', .* and \d more of pipeline 0's model, which hooks see, and not of the 1 other"
    with pytest.raises(ConfigurationError, match=says):
        train(MLP(), loader(MLP, 64, 8), 2, trainer={"callbacks": [InHook(hook)], "max_epochs": 2})


def test_code_after_the_step_is_told_of_too() -> None:
    with pytest.raises(ConfigurationError, match="code after the step in optimizer_step"):
        train(InStep(), loader(MLP, 64, 8), averaging=Averaging(every=2))


class Everywhere(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for n in range(trainer.strategy.num_pipelines):
            with trainer.strategy.parallel_model(n) as model:
                clamp(model)


def test_who_changes_all_models_goes_on() -> None:
    options = {"callbacks": [Everywhere()], "max_epochs": 3}
    found = train(Net("adamw"), loader(Net, 48, 8), 2, loader(Net, 16, 8), trainer=options)
    assert found.trainer.global_step == 9
    for model in found.models:
        assert max(p.abs().max() for name, p in model.items() if "weight" in name) <= 0.1


def test_pruning_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"ModelPruning puts other parameters .* num_pipelines=2 .* remove"):
        train(MLP(), loader(MLP, 16, 8), trainer={"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]})
