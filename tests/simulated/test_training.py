"""Training on the simulated device: the host's weights, no race, nothing freed early, no wait per micro-batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightning_avgpipe import Averaging, AvgPipeTuner
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.observer import Work
from lightning_avgpipe.engine.shared_statistics import SharedStatistics
from lightning_avgpipe.schedule import FORWARD, Action
from lightning_avgpipe.training.stepping import scaling_together
from tests.models import MLP, ConvNet, loader
from tests.simulated import device
from tests.simulated.accelerator import SimulatedAccelerator
from tests.threads import TIMEOUT, Hub, Injector, MemoryNetwork
from tests.trainers import pipeline

Simulated = Callable[..., Any]


def fit(
    on_device: bool, kind: type, strategy: dict[str, Any], options: dict[str, Any], count: int = 3, devices: int = 1
) -> dict[str, Tensor]:
    """Weights after training on batches of 8."""
    torch.manual_seed(4)
    module = kind()
    accelerator: Any = SimulatedAccelerator() if on_device else "cpu"
    runner = pipeline(devices=devices, strategy=strategy, accelerator=accelerator, max_epochs=1, **options)
    runner.fit(module, loader(kind, 8 * count, 8))
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


class Manual(MLP):
    """Steps itself, and clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        return loss


def compared(*args: Any) -> tuple[list[str], list[str]]:
    """Names of weights that differ from the host's, and what was found."""
    with device.reported() as report:
        ours = fit(True, *args)
    return [name for name, tensor in fit(False, *args).items() if not torch.equal(tensor, ours[name])], list(
        report.errors
    )


class HasExample(MLP):
    """Lightning's summary calls it before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.layers[0].weight.device  # the simulated device would copy
        return super().forward(x)


class AsksWeights(MLP):
    """Puts a table where a layer's weight is, and multiplies by that weight itself, outside of the layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        linear = next(layer for layer in self.modules() if isinstance(layer, torch.nn.Linear))
        table = torch.arange(linear.in_features, device=linear.weight.device)
        return super().training_step(batch, batch_idx) + (linear.weight[:, table] @ linear.weight.T).square().mean()


class Counting(MLP):
    """Changes an attribute in each step, so that its pipelines share a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total = self.total + loss.detach()
        return loss + 0.1 * self.total


def beside(kind: type, strategy: dict[str, Any], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of weights that differ with and without streams of their own, and what was found."""
    averaging = dataclasses.replace(strategy.get("averaging", Averaging()), streams=False)
    one = fit(True, kind, {**strategy, "averaging": averaging}, options, 16)
    with device.reported() as report:
        several = fit(True, kind, strategy, options, 16)
    return [name for name, tensor in one.items() if not torch.equal(tensor, several[name])], list(report.errors)


class Logging(MLP):
    """Counts in a metric, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen(loss)
        self.log("seen", self.seen, on_step=True, on_epoch=True)
        return loss


class Numbers(MLP):
    """Logs numbers and a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("samples", len(batch[0]), reduce_fx="sum")
        self.log("rate", 0.5)
        self.log("mixed", 0.25 if batch_idx % 2 else loss)
        self.log("loss", loss)
        return loss


class Summed(Metric):
    """A metric object that by itself waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.total = self.total + value.detach()

    def compute(self) -> Tensor:
        return self.total


class Summing(MLP):
    """Logs what a metric object has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Summed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", self.seen(loss))
        return loss


class Asking(Logging):
    """Asks for its device, and has parts that do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = L.LightningModule()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.ones(batch[0].shape, device=self.device) + torch.ones(1, device=self.part.device)
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


CLIPS, MEASURED = {"gradient_clip_val": 0.1}, {"costs": "measured", "costs_cache": None}


@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    [
        (MLP, {}, CLIPS),
        (MLP, {"num_pipelines": 2}, CLIPS),
        (MLP, {"recompute": True}, CLIPS),
        (MLP, {"num_pipelines": 4}, {}),
        (MLP, {"num_pipelines": 2, "averaging": Averaging(rolling=True)}, {}),
        (MLP, {"weight_policy": "stash"}, {}),
        (MLP, {"weight_policy": "spectrain"}, {}),
        (MLP, {"schedule": "zb_h1"}, {}),
        (AsksWeights, {}, {}),
        (AsksWeights, MEASURED, {}),
        (HasExample, {}, {"enable_model_summary": True}),
        (Asking, {}, {}),
    ],
    ids=str,
)
def test_weights_and_metric_objects_are_those_of_the_host(
    simulated: Simulated, kind: type, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    assert simulated(compared, kind, {"num_microbatches": 4, **strategy}, options, 8) == ([], [])


@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    [
        (MLP, {"num_pipelines": 4}, {"gradient_clip_val": 0.1}),
        (MLP, {"num_pipelines": 2, "averaging": Averaging(rolling=True)}, {}),
        (MLP, {"num_pipelines": 2, "recompute": True}, {}),
        (ConvNet, {"num_pipelines": 2}, {}),
        (Counting, {"num_pipelines": 2}, {}),
        (Logging, {"num_pipelines": 2, "recompute": True}, {}),
        (Numbers, {"num_pipelines": 2, "recompute": True}, {}),
        (Numbers, {"num_pipelines": 2, "averaging": Averaging(rolling=True)}, {}),
        (Logging, {"num_pipelines": 2}, {"accumulate_grad_batches": 2}),
    ],
    ids=str,
)
def test_pipelines_on_streams_of_their_own_train_what_they_train_on_one(
    simulated: Simulated, kind: type, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    assert simulated(beside, kind, {"num_microbatches": 4, **strategy}, options) == ([], [])


def stream_waits(count: int, strategy: dict[str, Any]) -> int:
    """How often streams wait for each other in so many batches."""
    before = device.backend.stream_waits()
    fit(True, Numbers, strategy, {}, count)
    return device.backend.stream_waits() - before  # type: ignore[no-any-return]


def stream_waits_with(*counts: int) -> list[int]:
    """Those of four batches for each of two pipelines, by the number of micro-batches."""
    options = {"num_pipelines": 2, "averaging": Averaging(on_nonfinite=None)}
    few, many = ([stream_waits(n, {"num_microbatches": m, **options}) for m in counts] for n in (8, 16))
    return [more - less for less, more in zip(few, many, strict=True)]


def test_no_stream_waits_for_what_another_pipeline_logs(simulated: Simulated) -> None:
    few, many = simulated(stream_waits_with, 2, 8)
    assert few == many


class Capturable(MLP):
    """Its optimizer counts steps on the device."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, capturable=True)


def resumed(kind: type[MLP], folder: Path) -> tuple[list[str], list[str]]:
    """Names of weights that differ from those of one run after half of it was resumed, and what was found."""

    def trained(epochs: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
        torch.manual_seed(4)
        module, strategy = kind("adamw"), {"num_microbatches": 4, "num_pipelines": 2}
        keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        runner = pipeline(
            strategy=strategy, accelerator=SimulatedAccelerator(), max_epochs=epochs, callbacks=[keeps],
            enable_checkpointing=True,
        )  # fmt: skip
        runner.fit(module, loader(MLP, 32, 8), ckpt_path=ckpt_path)
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}

    with device.reported() as report:
        whole, rest = trained(2), trained(2, str(folder / "epoch=0.ckpt"))
    return [name for name, tensor in whole.items() if not torch.equal(tensor, rest[name])], list(report.errors)


@pytest.mark.parametrize("kind", [MLP, Capturable])
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted(
    kind: type[MLP], simulated: Simulated, tmp_path: Path
) -> None:
    assert simulated(resumed, kind, tmp_path) == ([], [])


def waits(
    count: int, kind: type, strategy: dict[str, Any], options: dict[str, Any], devices: int = 1
) -> Counter[tuple[str, str]]:
    """How often, by file of the package and function, the main thread waits during so many batches."""
    with device.reported() as report:
        fit(True, kind, strategy, options, count, devices)
    places: Counter[tuple[str, str]] = Counter()
    for wait, found in report.waits.items():
        if wait.thread == "MainThread":
            places[wait.file, wait.function] += found
    return places


def per_iteration(kind: type, strategy: dict[str, Any], options: dict[str, Any]) -> dict[tuple[str, str], float]:
    few, many = waits(4, kind, strategy, options), waits(8, kind, strategy, options)
    iterations = 4 / strategy.get("num_pipelines", 1)
    return {place: (found - few[place]) / iterations for place, found in many.items() if found != few[place]}


def waits_with(kind: type, options: dict[str, Any], *counts: int) -> list[dict[tuple[str, str], float]]:
    """Of the iterations of a few batches each, by the number of micro-batches."""
    return [per_iteration(kind, {"num_microbatches": count, **options}, {}) for count in counts]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (MLP, {}, {}),
        (Numbers, {}, {}),
        (Summing, {}, {}),
        (ConvNet, {}, {("engine/loss.py", "_numbers"): 1}),  # ignored targets are looked for
        pytest.param(
            MLP,
            {"num_pipelines": 2},
            {
                ("strategy/gradient_check.py", "_check"): 1,
                ("averaging/integrity.py", "check"): 0.5,
                ("engine/pipeline.py", "_wait_for_device"): 1,  # two in every iteration, from the fourth on
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_no_wait_per_micro_batch_and_two_at_most(
    simulated: Simulated, kind: type, options: dict[str, Any], expected: dict[tuple[str, str], float]
) -> None:
    assert simulated(waits_with, kind, options, 2, 8) == [expected, expected]


def samples(data: Any) -> Tensor:
    """The weight of a micro-batch, as a number on its device."""
    return torch.ones(len(data[0]), device=data[0].device).sum()


def test_the_host_waits_once_for_the_weights_of_all_micro_batches(simulated: Simulated) -> None:
    expected = {("engine/loss.py", "_numbers"): 1}
    for weight in (samples, "1"):
        assert simulated(waits_with, MLP, {"loss_weight": weight}, 2, 8) == [expected, expected]


def found_infinite(count: int) -> Counter[str]:
    """Waits until a loss scaler has looked at the gradients of so many models."""
    place = torch.device(device.NAME, 0)
    network: Any = MemoryNetwork(Hub(Injector()), 0)
    cluster = Cluster(StageMap(1), Process(0, place, TIMEOUT.total_seconds(), network))
    layers = [torch.nn.Linear(2, 2, device=place) for _ in range(count)]
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
    scaler = torch.amp.GradScaler(device.NAME)
    precision = SimpleNamespace(scaler=scaler)
    scaler.scale(torch.ones((), device=place))
    for layer in layers:
        layer(torch.ones(1, 2, device=place)).sum().backward()
    with device.reported() as report, scaling_together(precision, cluster, lambda optimizer: optimizers[1:]):
        scaler.unscale_(optimizers[0])
    return Counter({wait.why: number for wait, number in report.waits.items()})


def test_a_loss_scaler_waits_once_for_the_gradients_of_all_models(simulated: Simulated) -> None:
    one, three = simulated(found_infinite, 1), simulated(found_infinite, 3)
    assert one == three == {"copy to the host": 1, "copy to the device": 1}  # what all processes have found


def normalised() -> int:
    """How often the host waits for the statistics of all replicas of a stage, in a forward and a backward."""

    class Alone:
        ranks = (0,)
        process_group: Any

        def allgather(self, parts: list[Tensor], mine: Tensor) -> Any:
            parts[0].copy_(mine)

        def wait_for(self, work: Any, what: str) -> None: ...

    members: Any = Alone()
    members.process_group = members
    layer = torch.nn.BatchNorm1d(4).to(device.NAME)
    x = torch.arange(32.0, device=device.NAME).view(8, 4).requires_grad_()

    def do() -> None:
        layer(x).square().sum().backward()

    with device.reported() as report:
        SharedStatistics(members, on_host=False).perform(Work(0, 0, Action(FORWARD, 0)), do)
    return report.waits.total()


def test_statistics_of_all_replicas_are_not_waited_for(simulated: Simulated) -> None:
    assert simulated(normalised) == 0


def tuned(strategy: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether the tuner takes lanes of one process to run in turns, and what was found."""
    tuner = AvgPipeTuner()
    with device.reported() as report:
        fit(True, MLP, strategy, {"callbacks": [tuner]}, 16)
    assert tuner.result is not None
    return tuner.result.profile.in_turns, list(report.errors)


@pytest.mark.parametrize("streams", [True, False])
def test_the_tuner_expects_side_by_side_what_has_streams_of_its_own(simulated: Simulated, streams: bool) -> None:
    assert simulated(tuned, {"averaging": Averaging(streams=streams)}) == (not streams, [])


def tuned_weights() -> tuple[list[str], list[str]]:
    """Names of weights that differ from the host's after tuning, before which no plan has moved them."""
    found: dict[bool, dict[str, Tensor]] = {}
    with device.reported() as report:
        for on_device in (True, False):
            options = {"callbacks": [AvgPipeTuner(microbatch_candidates=[4])]}
            found[on_device] = fit(on_device, MLP, {"num_pipelines": 1, "schedule": "1f1b"}, options)
    return [name for name, tensor in found[False].items() if not torch.equal(tensor, found[True][name])], list(
        report.errors
    )


def test_weights_stay_on_the_device_when_trials_are_over(simulated: Simulated) -> None:
    assert simulated(tuned_weights) == ([], [])
