"""Replicas: groups of processes that train the same models, each on its share of a batch, as ddp does.

::

    replica 0    stage 0 on rank 1     stage 1 on rank 0        a batch of its own
    replica 1    stage 0 on rank 3     stage 1 on rank 2        a batch of its own
                 sum of gradients      sum of gradients         one step, the same everywhere

Each stage sums by itself, as soon as its last backward has ended, while stages before it still drain. Losses count by
their share of what all replicas have, so the sum is the gradient of all their batches as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning import Plan

__all__ = ["check_shared", "sum_gradients", "weighed_together"]

_DENSE, _SPARSE = 0, 1


def check_shared(plan: Plan, replicas: Sequence[int]) -> None:
    """Look whether stages whose replicas take micro-batches in turns can do what a plan gives them.

    Args:
        plan: of the stages.
        replicas: of each stage; empty: one of each.
    Raises:
        PartitionError: a parameter has copies on several stages, or a step keeps something for the next micro-batch.
    """
    if max(replicas, default=1) == 1:
        return
    asked, instead = f"replicas={list(replicas)}", "or replicate whole pipelines (replicas=2)"
    if plan.copied:
        name, stages = next(iter(plan.copied.items()))
        raise PartitionError(
            f"'{name}' is used on the stages {', '.join(map(str, stages))}, and with {asked} copies of tied parameters "
            f"are not summed over both; keep its uses on one stage with split_points, {instead}"
        )
    if kept := sorted(".".join(filter(None, key)) for key in _kept_on(plan, replicas)):
        raise PartitionError(
            f"{plan.graph.step} keeps {', '.join(map(repr, kept))} for the next micro-batch, which with {asked} is "
            "another process's; keep it in a buffer (register_buffer) if no result depends on it, use num_stages "
            f"alone, {instead}"
        )


def _kept_on(plan: Plan, replicas: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Attributes that steps change and read on a stage with replicas, or before it: path of a module, and name."""
    graph, bounds = plan.graph, (*plan.cuts, len(plan.graph.nodes))
    last = max(bounds[k] for k, count in enumerate(replicas) if count > 1)
    early = {key for key, position in graph.reads if position <= last}
    yield from early.intersection((*graph.attributes, *(key for key, _ in graph.holders)))
    shared = {name for stage in plan.stages if replicas[stage.index] > 1 for name in stage.units}
    for path, name in {*graph.of_units, *graph.written}:
        if not path or any(f"{path}.".startswith(f"{unit}.") or f"{unit}.".startswith(f"{path}.") for unit in shared):
            yield path, name


def weighed_together(
    works: Sequence[Sequence[MicroBatch]], num_pipelines: int, replicas: ReplicaGroup
) -> list[list[MicroBatch]]:
    """The same micro-batches, each weighted by its share of what all replicas have of its pipeline.

    The processes that compute losses call it. Where nothing counts anywhere, replicas count alike.

    Args:
        works: micro-batches by pipeline; the end of an epoch may have fewer pipelines here than elsewhere.
        num_pipelines: N.
        replicas: connects these processes.
    """
    own = [sum(part.counted for part in parts) for parts in works]
    totals = torch.tensor([*own, *[0.0] * (num_pipelines - len(own))], dtype=torch.float64)
    replicas.members.sum(totals)
    return [
        [replace(part, weight=part.counted / total if total else part.weight / replicas.count) for part in parts]
        for parts, total in zip(works, totals.tolist(), strict=False)
    ]


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], replicas: ReplicaGroup) -> None:
    """Give all replicas the sum of their gradients, with the same bits. All of them call it.

    A parameter that one replica has no gradient for counts as zero there; one without any keeps none.

    Args:
        parameters: the same, in the same order, in all replicas.
    """
    kinds = torch.zeros(2, len(parameters), dtype=torch.int32)
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None:
            kinds[_SPARSE if parameter.grad.is_sparse else _DENSE, i] = 1
    dense, sparse = replicas.members.sum(kinds).bool().tolist()
    for parameter, is_dense, is_sparse in zip(parameters, dense, sparse, strict=True):
        if is_sparse and is_dense and parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if is_dense and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    replicas.sum([p.grad for p, is_dense in zip(parameters, dense, strict=True) if is_dense and p.grad is not None])
    for parameter, is_dense, is_sparse in zip(parameters, dense, sparse, strict=True):
        if is_sparse and not is_dense:
            _sum_sparse(parameter, replicas)


def _sum_sparse(parameter: nn.Parameter, replicas: ReplicaGroup) -> None:
    """Rows of a gradient travel with their numbers."""
    gradient = parameter.grad
    mine: tuple[Tensor, Tensor] | None = None
    if gradient is not None:
        gradient = gradient.coalesce()
        mine = gradient.indices().cpu(), gradient.values().cpu()
    found = [rows for rows in replicas.members.exchange_objects(mine) if rows is not None]
    indices, values = (torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (1, 0), strict=True))
    total = torch.sparse_coo_tensor(indices, values, parameter.shape, device=parameter.device).coalesce()
    parameter.grad = total.to(parameter.dtype)
