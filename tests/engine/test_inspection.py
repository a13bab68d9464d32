"""A step that reaches another model's tensors, or differs between stages, is refused before anything has stepped."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn

from lightning_avgpipe.errors import ConfigurationError, PartitionError, StepChangedError
from tests.averaging.models import train
from tests.comparing import assert_equal, state
from tests.models import MLP, Regression, loader
from tests.trainers import Reconfigures, pipeline


class Layers(Regression):
    """Subclasses hold tensors of theirs in unusual places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("constant", torch.full((8,), 0.5))
        self.keep()

    def keep(self) -> None:
        """Somewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.norm(self.first(x)).tanh()).tanh()) * self.scale


class Calls(nn.Module):
    """A unit that calls what it was given."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def times(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * tensor


def adding(held: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x + held.it


# What a class gives is called with the last layer's output; by the name that is to be found.
HIDDEN: dict[str, Callable[[Any], tuple[str, Callable[[Tensor], Tensor]]]] = {
    "a closure": lambda net: ("scale", times(net.scale)),
    "a partial": lambda net: ("second.weight", functools.partial(F.linear, weight=net.second.weight)),
    "a plain object": lambda net: ("second.bias", adding(SimpleNamespace(it=net.second.bias))),
    "a closure in a unit": lambda net: ("scale", Calls(times(net.scale))),
    "an alias without gradient": lambda net: ("scale", Calls(times(net.scale.detach()))),
    "a buffer that changes": lambda net: ("norm.running_var", Calls(times(net.norm.running_var))),
    "glue that begins with it": lambda net: ("scale", lambda x, w=net.scale: x * torch.exp(w)),
}


class Hidden(Layers):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def keep(self) -> None:
        self.name, self.function = HIDDEN[self.kind](self)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "num_stages", "recompute"),
    [*((kind, 2, False) for kind in HIDDEN), ("a closure", 1, True), ("a buffer that changes", 3, ["second"])],
)
def test_what_no_model_can_exchange_is_refused(kind: str, num_stages: int, recompute: Any) -> None:
    model = Hidden(kind)
    before = state(model)
    says = rf"pipeline 1 ran, training_step used '{model.name}' \(at test_inspection.py:\d+ in .* of another parallel"
    if num_stages > 2 and kind == "a buffer that changes":  # which its stage cannot leave, with one model either
        says = r"unit 'function' at test_inspection.py:\d+ in forward reads a tensor that unit 'norm'"
    with pytest.raises((ConfigurationError, PartitionError), match=says):
        train(model, loader(MLP, 32, 8), num_stages, recompute=recompute)
    assert_equal(dict(model.named_parameters()), {name: before[name] for name, _ in model.named_parameters()})


def test_it_is_refused_when_parallel_models_come_later() -> None:
    later = Reconfigures({0: {"num_pipelines": 2}})
    with pytest.raises(ConfigurationError, match="while pipeline 1 ran, training_step used 'scale'"):
        train(Hidden("a closure"), loader(MLP, 32, 8), num_pipelines=1, trainer={"callbacks": [later]})


class Pair(NamedTuple):
    weight: Tensor
    name: str


class Nested(Layers):
    def keep(self) -> None:
        self.pairs = (Pair(self.scale, "scale"), [("second", {"weight": self.second.weight})])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.pairs[1][0][1]["weight"]
        return super().forward(x) * self.pairs[0].weight + F.linear(x, weight)


class Plain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + F.linear(x, self.second.weight)


class Constants(Layers):
    """A frozen parameter and a buffer that never changes are the same for all models, wherever they are held."""

    def keep(self) -> None:
        self.first.bias.requires_grad_(False)
        self.function = Calls(times(self.constant))
        self.bias = functools.partial(torch.add, self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias(self.function(super().forward(x)))


class PlainConstants(Layers):
    def keep(self) -> None:
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first.bias + super().forward(x) * self.constant


@pytest.mark.parametrize(
    ("kinds", "num_stages"),
    [
        pytest.param((Nested, Plain), 2, id="each model's own, in containers within each other"),
        pytest.param((Constants, PlainConstants), 3, id="what all models share"),
    ],
)
def test_what_models_have_may_be_held_anywhere(kinds: Any, num_stages: int) -> None:
    found = []
    for kind in kinds:
        torch.manual_seed(3)
        found.append(train(kind(), loader(MLP, 48, 8), num_stages, num_pipelines=3).models)
    assert_equal(*found)


def test_what_begins_to_train_is_looked_at_then() -> None:
    class Finetuned(Layers):
        def keep(self) -> None:
            self.backbone = nn.Sequential(self.first, self.second)
            self.function = Calls(times(self.first.bias))

        def forward(self, x: Tensor) -> Tensor:
            return self.function(super().forward(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)

    unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-2)
    train(Finetuned(), loader(MLP, 32, 8), trainer={"callbacks": [unfreezing]})
    with pytest.raises(ConfigurationError, match=r"used 'first.bias' \(at"):
        train(Finetuned(), loader(MLP, 32, 8), trainer={"callbacks": [unfreezing], "max_epochs": 2})


# -- what the step asks of a node is the same where it is executed and on the last stage, whose run counts -----------


class _Body(MLP):
    """Its step computes between the first units, which a first stage executes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first, *others = self.layers
        return nn.functional.mse_loss(nn.Sequential(*others)(self.between(first(x))), y)

    def between(self, x: Tensor) -> Tensor:
        return x

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


class _Scaled(_Body):
    def between(self, x: Tensor) -> Tensor:
        return x * (1 + time.perf_counter_ns() * 1e-12)


class _Chosen(_Body):
    def between(self, x: Tensor) -> Tensor:
        return x.clamp(min=-float(time.perf_counter_ns()), max=None)


class _Ungraded(_Body):
    def between(self, x: Tensor) -> Tensor:
        with open("calls", "ab+") as file:  # what lies on a disk nobody puts back
            file.write(b".")
            even = file.tell() % 2 == 0
        with torch.set_grad_enabled(even):
            return x * 2


@pytest.mark.parametrize(("model", "what"), [(_Scaled, "mul"), (_Chosen, "clamp"), (_Ungraded, "mul")])
def test_what_differs_between_stages_is_an_error_before_the_first_step(model: Any, what: str) -> None:
    trainer = pipeline(2, strategy={"num_microbatches": 1, "verify": False}, max_epochs=1)
    message = rf"test_inspection.py:\d+ in between the step asks .*{what}.*where stage 0 executed it"
    with pytest.raises(StepChangedError, match=message):
        trainer.fit(model(), loader(MLP, 16, 8))
    assert trainer.global_step == 0
    with pytest.raises(StepChangedError, match=message):
        pipeline(2, strategy={"num_microbatches": 1}).validate(model(), loader(MLP, 16, 8))
