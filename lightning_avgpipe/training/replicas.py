"""Replicas: groups of processes that train the same models, each on its share of a batch, as ddp does.

::

    replica 0    stage 0 on rank 1     stage 1 on rank 0        a batch of its own
    replica 1    stage 0 on rank 3     stage 1 on rank 2        a batch of its own
                 sum of gradients      sum of gradients         one step, the same everywhere

Each stage sums by itself, within its last backward, while the stages before it still drain. Losses are weighted by
their share of the samples (or other counted units) of all replicas, so the sum is the gradient of all batches as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives, ReplicaGroup
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.utils.names import joined


def check_shared(graph: CallGraph, cuts: Sequence[int], stage_map: StageMap) -> None:
    """Check that stages whose replicas take micro-batches in turns can run a step.

    Args:
        graph: graph of the step; only training shares the last stage.
        cuts: K-1 positions of the cuts.
        stage_map: which process hosts which stage.

    Raises:
        PartitionError: the step keeps a value for the next micro-batch, which another process runs.
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
    """Yield attributes that a step changes and reads on or before a stage with replicas: path of a module, and name."""
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
    """Return the replicas of the last stage, on each of them; None if there is one, and on other processes."""
    replicas, counts = cluster.replicas, cluster.stage_map.stage_replicas
    shares = counts[-1:] > (1,) and cluster.stage_map.num_stages - 1 in cluster.stages
    return replicas.members if shares and replicas is not None else None


def weighing(
    works: Sequence[Sequence[MicroBatch]], num_pipelines: int, replicas: ReplicaGroup
) -> Callable[[], list[list[MicroBatch]]]:
    """Begin to weight micro-batches by their share of the counted samples that all replicas have in a pipeline.

    The processes that compute losses call it. If nothing counts in any replica, replicas have equal weights.

    Args:
        works: micro-batches by pipeline; at the end of an epoch replicas may have different numbers of pipelines.
        num_pipelines: number of pipelines, N.
        replicas: group of these processes.

    Returns:
        A function that waits for the sum and returns the micro-batches with their weights.
    """
    own = [sum(part.counted for part in parts) for parts in works]
    counted = torch.tensor([*own, *[0.0] * (num_pipelines - len(own))], dtype=torch.float64, device="cpu")
    arrive = replicas.begin_sum([counted])

    @functools.cache
    def weighed() -> list[list[MicroBatch]]:
        arrive()
        return [
            [replace(part, weight=part.counted / total if total else part.weight / replicas.count) for part in parts]
            for parts, total in zip(works, counted.tolist(), strict=False)
        ]

    return weighed
