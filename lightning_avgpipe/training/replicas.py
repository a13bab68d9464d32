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

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import PartitionError

__all__ = ["check_shared", "sum_gradients", "weighed_together"]

_DENSE, _SPARSE = 0, 1


def check_shared(graph: CallGraph, cuts: Sequence[int], stage_map: StageMap) -> None:
    """Look whether stages whose replicas take micro-batches in turns can do what a step wants of them.

    Args:
        graph: of the step; only training shares the last stage.
        cuts: K-1 positions.
        stage_map: who hosts what.
    Raises:
        PartitionError: the step keeps something for the next micro-batch, which another process has.
    """
    trains = graph.step == "training_step"
    ends = (*cuts, len(graph.nodes))
    shared = [k for k in range(len(ends)) if len(stage_map.hosts(k, trains)) > 1]
    if kept := sorted({".".join(filter(None, key)) for key in _kept_on(graph, (0, *ends), shared)}):
        raise PartitionError(
            f"{graph.step} keeps {', '.join(map(repr, kept))} for the next micro-batch, which with "
            f"replicas={list(stage_map.stage_replicas)} is another process's; collect what steps return in "
            "on_train_batch_end, keep it in a buffer (register_buffer) if no result depends on it, use num_stages "
            "alone, or replicate whole pipelines (replicas=2)"
        )


def _kept_on(graph: CallGraph, bounds: Sequence[int], shared: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Attributes that a step changes and reads on a stage with replicas, or before it: path of a module, and name."""
    if not shared:
        return
    early = {key for key, position in graph.reads if position <= bounds[shared[-1] + 1]}
    yield from early.intersection((*graph.attributes, *(key for key, _ in graph.holders)))
    nodes = (node for k in shared for node in graph.executed(bounds[k], bounds[k + 1]) if node.kind != "glue")
    units = {name for node in nodes for name in node.name.split(", ")}  # of a region several
    for path, name in {*graph.of_units, *graph.written}:
        if not path or any(f"{path}.".startswith(f"{unit}.") or f"{unit}.".startswith(f"{path}.") for unit in units):
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
