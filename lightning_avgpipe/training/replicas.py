"""Replicas: groups of processes that train the same models, each on its share of a batch, as ddp does.

::

    replica 0    stage 0 on rank 1     stage 1 on rank 0        a batch of its own
    replica 1    stage 0 on rank 3     stage 1 on rank 2        a batch of its own
                 sum of gradients      sum of gradients         one step, the same everywhere

Each stage sums by itself, within its last backward, while stages before it still drain. Losses count by their share of
what all replicas have, so the sum is the gradient of all their batches as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.utils.names import joined


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
    shared = [k for k in range(len(ends)) if len(stage_map.ranks(k, trains)) > 1]
    if kept := sorted({joined(*key) for key in _kept_on(graph, (0, *ends), shared)}):
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


def sharing_last(cluster: Cluster) -> Collectives | None:
    """The replicas of the last stage, on each of them; None if there is one."""
    replicas, counts = cluster.replicas, cluster.stage_map.stage_replicas
    shares = counts[-1:] > (1,) and cluster.stage_map.num_stages - 1 in cluster.stages
    return replicas.members if shares and replicas is not None else None


def weighing(
    works: Sequence[Sequence[MicroBatch]], num_pipelines: int, replicas: ReplicaGroup
) -> Callable[[], list[list[MicroBatch]]]:
    """Begin to weigh micro-batches by their share of what all replicas have of their pipeline.

    The processes that compute losses call it, and what is returned: the same micro-batches with their weights. Where
    nothing counts anywhere, replicas count alike.

    Args:
        works: micro-batches by pipeline; the end of an epoch may have fewer pipelines here than elsewhere.
        num_pipelines: N.
        replicas: connects these processes.
    """
    own = [sum(part.counted for part in parts) for parts in works]
    counted = torch.tensor([*own, *[0.0] * (num_pipelines - len(own))], dtype=torch.float64)
    arrive = replicas.begin_sum([counted])

    @functools.cache
    def weighed() -> list[list[MicroBatch]]:
        arrive()
        return [
            [replace(part, weight=part.counted / total if total else part.weight / replicas.count) for part in parts]
            for parts, total in zip(works, counted.tolist(), strict=False)
        ]

    return weighed
