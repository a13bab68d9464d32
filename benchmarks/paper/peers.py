"""Other engines for the stages written by hand: torch.distributed.pipelining and DeepSpeed, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import TIMEOUT
from benchmarks.paper.settings import MICROBATCHES
from benchmarks.paper.stages import FIRST_INPUTS, by_hand, tensors, tied
from benchmarks.paper.workloads import Workload

__all__ = ["PEERS", "NotPossible", "Step"]

Step = Callable[[Any], None]  # trains on a batch
STAGES = 2


class NotPossible(Exception):
    """This engine cannot train the model as it is, or is not installed; says why."""


def torch_pipelining(schedule: str) -> Callable[[Workload, nn.Module], Step]:
    """ScheduleGPipe or Schedule1F1B: makes a step from a workload and its model."""

    def make(workload: Workload, model: nn.Module) -> Step:
        from torch.distributed import pipelining

        dist.init_process_group("gloo", timeout=TIMEOUT)
        rank = dist.get_rank()
        part = by_hand(workload.name, model, rank).train()
        optimizer = workload.optimizer(list(part.parameters()))
        stage = pipelining.PipelineStage(part, rank, STAGES, torch.device("cpu"))
        made = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=lambda loss, target: loss)
        shared = tied(workload.name, model)

        def step(batch: Any) -> None:
            given = tensors(workload.name, batch)
            optimizer.zero_grad()
            if rank == 0:
                made.step(*(given[name] for name in FIRST_INPUTS[workload.name]))
            else:
                made.step(target=next(iter(given.values())), losses=[], return_outputs=False, **given)
            if shared is not None:
                dist.all_reduce(shared.grad)
            if workload.clip is not None:
                _clip(list(part.parameters()), workload.clip)
            optimizer.step()

        return step

    return make


def _clip(parameters: list[Tensor], most: float) -> None:
    """By the norm over both stages."""
    squares = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    dist.all_reduce(squares)
    factor = torch.clamp(most / (squares.sqrt() + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class _First(nn.Module):
    """Passes on, beside what it computes, the tensors of the batch: DeepSpeed gives them to the first stage alone."""

    def __init__(self, workload: str, part: nn.Module) -> None:
        super().__init__()
        self.workload, self.part = workload, part

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        taken = given[: len(FIRST_INPUTS[self.workload])]
        return self.part(*taken), *given


class _Last(nn.Module):
    """Takes them by name."""

    def __init__(self, names: list[str], part: nn.Module) -> None:
        super().__init__()
        self.names, self.part = names, part

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        hidden, *others = given
        return self.part(hidden, **dict(zip(self.names, others, strict=True)))


def deepspeed_pipeline(workload: Workload, model: nn.Module) -> Step:
    """DeepSpeed's PipelineModule, which runs 1F1B: makes a step."""
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
    names = [*FIRST_INPUTS[workload.name], *{"bert": ["labels"], "gnmt": ["words", "labels"]}[workload.name]]
    layers = [
        _First(workload.name, by_hand(workload.name, model, 0)),
        _Last(names, by_hand(workload.name, model, 1)),
    ]
    pipeline = PipelineModule(layers, num_stages=STAGES, loss_fn=lambda loss, target: loss, partition_method="uniform")
    size = workload.batch_size // MICROBATCHES
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**9, "gradient_clipping": workload.clip or 0.0,
    }  # fmt: skip
    optimizer = workload.optimizer(list(pipeline.parameters()))
    engine, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=config)

    def parts(batch: Any) -> Iterator[Any]:
        given = tensors(workload.name, batch)
        for values in zip(*(given[name].tensor_split(MICROBATCHES) for name in names), strict=True):
            yield values, values[-1]

    def step(batch: Any) -> None:
        engine.train_batch(parts(batch))

    return step


PEERS: dict[str, Callable[[Workload, nn.Module], Step]] = {
    "torch gpipe": torch_pipelining("ScheduleGPipe"),
    "torch 1f1b": torch_pipelining("Schedule1F1B"),
    "deepspeed": deepspeed_pipeline,
}
