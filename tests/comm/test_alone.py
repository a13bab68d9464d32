"""A step that would gather over processes trains as on one device: all stages work on the same batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import all_reduce as all_reduce_with_gradient
from torchmetrics import MeanMetric

from lightning_avgpipe.errors import AvgPipeError
from tests import processes
from tests.comparing import assert_equal
from tests.models import MLP, loader
from tests.trainers import pipeline


def over_processes(value: Tensor) -> Tensor:
    """As losses and layers of many libraries do it."""
    if dist.is_available() and dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value


class _SumsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return over_processes(gradient)


class Gathers(MLP):
    """In the step, in a layer's backward, and by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.metric = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _SumsGradients.apply(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.center = 0.9 * self.center + 0.1 * over_processes(out.detach().mean(0))
        if dist.is_initialized():
            out = all_reduce_with_gradient(out) / dist.get_world_size()
        gathered = self.all_gather(out, sync_grads=True)
        assert gathered.shape == out.shape
        self.log("mean", self.metric(out.mean()), sync_dist=True)
        return (out - self.center - batch[1]).square().mean()

    def on_before_backward(self, loss: Tensor) -> None:
        over_processes(loss.detach())


class AsksNobody(MLP):
    """Uses collectives whether or not there are other processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        assert (rank, size) == (0, 1)
        out = all_reduce_with_gradient(self(batch[0]))
        gathered = [torch.zeros_like(out) for _ in range(size)]
        dist.all_gather(gathered, out.detach(), group=dist.new_group())
        several: list[Any] = [None]
        dist.all_gather_object(several, batch_idx)
        dist.broadcast_object_list(several)
        dist.barrier()
        mean = gathered[rank].mean()
        work = dist.all_reduce(mean, async_op=True)
        work.wait()
        return (out - batch[1]).square().mean() * (1 + 0.01 * several[0]) + mean


class AsksNobodyAlone(AsksNobody):
    """The same without collectives."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        return (out - batch[1]).square().mean() * (1 + 0.01 * batch_idx) + out.detach().mean()


class HasGroup(MLP):
    """Gathers in a group of its own that was made before training."""

    def setup(self, stage: str) -> None:
        self.group = dist.new_group([0, 1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach(), group=self.group)
        return loss


class Overheard(MLP):
    """While a step runs, another thread asks for the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            seen = other.submit(lambda: (dist.is_initialized(), dist.get_rank(), dist.get_world_size())).result()
        self.seen.append((dist.is_initialized(), seen))
        return super().training_step(batch, batch_idx)


def trained(devices: int, make: Any, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make()
    strategy = {"num_microbatches": 2, "timeout": "30s", **options}
    pipeline(2, devices, strategy, max_epochs=1).fit(model, loader(MLP, 32, 8))
    return dict(model.state_dict())


def on_two() -> Any:
    asking = trained(2, AsksNobody)  # first: later Trainers make groups, too
    gathering = [trained(2, Gathers, costs="measured"), trained(2, Gathers, recompute=True, num_pipelines=2)]
    assert dist.is_initialized()
    model = Overheard()
    pipeline(2, 2, {"timeout": "30s"}, max_epochs=1).fit(model, loader(MLP, 16, 8))
    with pytest.raises(AvgPipeError) as refused:
        trained(2, HasGroup)
    return gathering, asking, model.seen, str(refused.value)


found = processes.shared(2, lambda rank: on_two())


def test_a_step_that_gathers_over_processes_trains_as_in_one_process(found: list[Any]) -> None:
    expected = [trained(1, Gathers), trained(1, Gathers, recompute=True, num_pipelines=2)]
    for gathering, *_ in found:
        assert_equal(gathering, expected)


def test_collectives_without_asking_find_one_process(found: list[Any]) -> None:
    expected = trained(1, AsksNobodyAlone)
    for _, asking, *_ in found:
        assert_equal(asking, expected)


def test_other_threads_see_all_processes_while_a_step_runs(found: list[Any]) -> None:
    for rank, (*_, seen, _) in enumerate(found):
        assert seen and all(which == (False, (True, rank, 2)) for which in seen)


def test_a_group_of_several_processes_is_refused_in_a_step(found: list[Any]) -> None:
    assert all("a step uses a process group of 2 processes" in refused for *_, refused in found)
