"""Habits of modules that libraries have written: what they train, validate and predict is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_avgpipe import AvgPipeStrategy
from tests import processes
from tests.comparing import assert_equal, state
from tests.strategy.steps import Layers
from tests.trainers import trainer


class Habit(Layers):
    """Validates and predicts as it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", Habit.training_step(self, batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Fills(Habit):
    """Fills a tensor with what submodules return."""

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.zeros(len(x), 8)
        early = self.a(x).relu()
        filled[:, :4] = early[:, :4]
        filled[:, 4:] = self.c(self.b(early).relu())[:, 4:]
        return self.d(filled)


class Decodes(Habit):
    """Goes on until it has drawn an end for every sample."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        memory, tokens = self.a(batch[0]), torch.zeros(len(batch[0]), 6, dtype=torch.int64)
        tokens[:, 0] = self.d(self.c(memory)).argmax(1)
        for n in range(5):
            if (active := tokens[:, n] > 1).sum() == 0:
                break
            out = self.d(self.c(memory[active] + tokens[active, : n + 1].sum(1, keepdim=True)))
            tokens[active, n + 1] = (out + (n + 1) * batch[0][active]).argmax(1)
        return tokens


class WeighsByData(Habit):
    """Divides a term of its loss by the number of samples that there are, as Bayesian networks do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = len(self.trainer.train_dataloader.dataset)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx) + self.d.weight.square().sum() / samples


class AsksForRank(Habit):
    """Takes its share of the samples, if there are several processes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[self.share]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0], batch[1][self.share]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0], batch[1][self.share]), batch_idx)

    @property
    def share(self) -> slice:
        return slice(self.global_rank, None, self.trainer.world_size)


class KeepsResults(Habit):
    """Keeps what a submodule has returned, for somebody to look at."""

    def forward(self, x: Tensor) -> Tensor:
        early = self.b(self.a(x).relu())
        self.kept = {"weights": early.softmax(1)}
        return self.d(self.c(early.relu()))


class SetsBack(Habit):
    """Sets an attribute at the end to what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon = self.usual_horizon = 4

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * (torch.arange(8) < 2 * self.horizon)
        loss = super().training_step((x, batch[1]), batch_idx)
        self.horizon = self.usual_horizon
        return loss


class OnFirstDevice(Habit):
    """Is on the device of its first weight, and makes tensors there."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return next(self.parameters()).device

    def on_train_start(self) -> None:
        self.log("warmup", 4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("precision", 0.5)

    def on_validation_epoch_end(self) -> None:
        self.log("total", torch.zeros((), device=self.device) + 3)


class AsksForDevices(Habit):
    """Moves batches to the device of all its weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (device,) = {parameter.device for parameter in self.parameters()}
        return super().training_step([part.to(device) for part in batch], batch_idx)


class Noisy(nn.Linear):
    """Scales what it computes with, past autograd, whenever it is called."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("noise", torch.ones(8, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.sigmoid() * self.noise.data.mul_(0.9)).T


class Samples(Habit):
    """Calls a layer twice, whose backwards see what the last call has left (Bayesian layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Noisy()

    def through(self, x: Tensor) -> Tensor:
        early = self.a(x).relu()
        return self.d(self.c(self.b(early) + self.b(early.square())).relu())


@torch.jit.script
def scattered(x: Tensor, index: Tensor) -> Tensor:
    """A function of TorchScript, as those that add up neighbours."""
    return torch.zeros_like(x).index_add(0, index, x)


class Scripts(Habit):
    """Calls a function of TorchScript between submodules."""

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x)) // 2
        early = scattered(self.b(self.a(x).relu()), index)
        return self.d(scattered(self.c(early).relu(), index))


class UsesNumPy(Habit):
    """Calls a function of NumPy on a tensor."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_scale", (1 + np.exp(self(batch[0]))).mean())


class CountsClasses(Habit):
    """Has metrics within metrics."""

    def __init__(self) -> None:
        super().__init__()
        of_each = ClasswiseWrapper(MulticlassAccuracy(8, average=None))
        self.metrics = MetricCollection({"all": MulticlassAccuracy(8), "each": of_each})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metrics.update(self(batch[0]), batch[1].argmax(1))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class Collects(Habit):
    """Collects what layers return by hooks, and empties the list at the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for layer in (self.a, self.b, self.c):
            layer.register_forward_hook(lambda layer, inputs, output: self.collected.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + sum(output.square().mean() for output in self.collected)
        self.collected.clear()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.collected = []

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = super().predict_step(batch, batch_idx)
        self.collected = []
        return predicted

    def on_train_end(self) -> None:
        assert not self.collected


LARGEST = {"output": 1.0}


class Watched(nn.Linear):
    """Notes in a variable outside of modules how large its output was."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        LARGEST["output"] = output.max().item()
        return output


class WatchesLayers(Habit):
    """Scales the loss by what an early layer has noted in the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = Watched(8, 8), 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = LARGEST["output"]

    def on_train_start(self) -> None:
        LARGEST["output"] = 1.0


HABITS = [
    Fills,
    Decodes,
    WeighsByData,
    AsksForRank,
    KeepsResults,
    SetsBack,
    OnFirstDevice,
    AsksForDevices,
    Samples,
    Scripts,
    UsesNumPy,
    CountsClasses,
    Collects,
    WatchesLayers,
]


def result(make: Callable[[], Habit], devices: int, strategy: Any) -> dict[str, Any]:
    """Weights after an epoch, metrics and predictions."""
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(*torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(2))), batch_size=8)
    runner, module = trainer(strategy=strategy, devices=devices, max_epochs=1), make()
    runner.fit(module, data, data)
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    return {"weights": state(module), "metrics": metrics, "predicted": runner.predict(module, data)}


def stages() -> AvgPipeStrategy:
    return AvgPipeStrategy(num_stages=2, num_microbatches=1, costs="flops", verify=False)


in_two = processes.shared(2, lambda rank: {make: result(make, 2, stages()) for make in HABITS})


@pytest.mark.filterwarnings("ignore:.* reads numbers of values")
@pytest.mark.parametrize("make", HABITS)
def test_stages_do_what_one_device_does(make: Any, in_two: Any) -> None:
    expected = result(make, 1, "auto")
    for found in (result(make, 1, stages()), *(rank[make] for rank in in_two)):
        assert_equal(expected, found)
