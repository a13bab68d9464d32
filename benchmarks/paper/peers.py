"""Train the stages written by hand with other engines, torch.distributed.pipelining and DeepSpeed, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import TIMEOUT
from benchmarks.paper.slowed import SlowDevice
from benchmarks.paper.stages import HandStage, blocks, cut, tensors, tied
from benchmarks.paper.workloads import Workload

__all__ = ["PEERS", "NotPossible", "Step"]

Step = Callable[[Any], None]  # trains on a batch
Make = Callable[[Workload, nn.Module, Any, int, SlowDevice], Step]


class NotPossible(Exception):
    """An error that says why an engine cannot train a model as it is."""


def torch_pipelining(schedule: str) -> Make:
    """Return what makes a step of ``ScheduleGPipe`` or ``Schedule1F1B``.

    That takes a workload, its model, a batch, M, and the device of this process.
    """

    def make(workload: Workload, model: nn.Module, batch: Any, num_microbatches: int, device: SlowDevice) -> Step:
        from torch.distributed import pipelining

        dist.init_process_group("gloo", timeout=TIMEOUT)
        rank, size = dist.get_rank(), dist.get_world_size()
        shared = tied(workload.name, model)
        ends = dist.new_group([0, size - 1]) if shared is not None else None
        part = cut(blocks(workload.name, model.train()), tensors(workload.name, batch), size)[rank]
        device.take_torch()
        parameters = list(part.parameters())
        optimizer = workload.optimizer(parameters)
        stage = pipelining.PipelineStage(part, rank, size, torch.device("cpu"))
        made = getattr(pipelining, schedule)(stage, num_microbatches, loss_fn=lambda loss, target: loss)

        def step(batch: Any) -> None:
            given = tensors(workload.name, batch)
            some = next(iter(given.values()))
            optimizer.zero_grad()
            if rank == 0:
                made.step(some, **given)
            elif rank == size - 1:
                made.step(target=some, losses=[], return_outputs=False, **given)
            else:
                made.step(**given)
            if shared is not None and rank in (0, size - 1):
                dist.all_reduce(shared.grad, group=ends)
            if workload.clip is not None:
                _clip(parameters, workload.clip)
            optimizer.step()

        return step

    return make


def _clip(parameters: list[Tensor], most: float) -> None:
    """Clip gradients by the norm over all stages."""
    squares = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    dist.all_reduce(squares)
    factor = torch.clamp(most / (squares.sqrt() + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class _Passing(nn.Module):
    """A stage that hands on the tensors of the batch beside its values, since DeepSpeed gives them to the first one."""

    def __init__(self, names: list[str], part: HandStage) -> None:
        super().__init__()
        self.names, self.part = names, part

    def forward(self, given: tuple[Tensor, ...]) -> Any:
        values, batch = given[: -len(self.names)], given[-len(self.names) :]
        made = self.part(*values, **dict(zip(self.names, batch, strict=True)))
        if self.part.is_last:
            return made
        return (*(made if isinstance(made, tuple) else (made,)), *batch)


def deepspeed_pipeline(
    workload: Workload, model: nn.Module, batch: Any, num_microbatches: int, device: SlowDevice
) -> Step:
    """Make a step of DeepSpeed's PipelineModule, which runs 1F1B."""
    if tied(workload.name, model) is not None:
        raise NotPossible("its tied weights want the model as a list with TiedLayerSpec, which is not written here")
    if numbers := [name for name, p in model.named_parameters() if p.dim() == 0]:
        raise NotPossible(f"it cannot broadcast {numbers[0]}, a parameter without dimensions")
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
        from deepspeed.pipe import PipelineModule
    except ImportError as error:
        raise NotPossible(f"not installed ({error})") from error
    deepspeed.init_distributed("gloo", timeout=TIMEOUT)
    device.take_deepspeed()
    given = tensors(workload.name, batch)
    parts = cut(blocks(workload.name, model.train()), given, dist.get_world_size())
    layers = [_Passing(list(given), part) for part in parts]
    pipeline = PipelineModule(
        layers, num_stages=len(layers), loss_fn=lambda loss, target: loss, partition_method="uniform"
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch_size // num_microbatches,
        "gradient_accumulation_steps": num_microbatches,
        "steps_per_print": 10**9, "gradient_clipping": workload.clip or 0.0,
    }  # fmt: skip
    optimizer = workload.optimizer(list(pipeline.parameters()))
    engine, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=config)

    def micro_batches(batch: Any) -> Iterator[Any]:
        split = [t.tensor_split(num_microbatches) for t in tensors(workload.name, batch).values()]
        for values in zip(*split, strict=True):
            yield values, values[-1]

    def step(batch: Any) -> None:
        engine.train_batch(micro_batches(batch))

    return step


PEERS: dict[str, Make] = {
    "torch gpipe": torch_pipelining("ScheduleGPipe"),
    "torch 1f1b": torch_pipelining("Schedule1F1B"),
    "deepspeed": deepspeed_pipeline,
}
