"""Replicas: groups of processes that train the same models, each on its share of a batch, as ddp does.

::

    replica 0    stage 0 on rank 1     stage 1 on rank 0        a batch of its own
    replica 1    stage 0 on rank 3     stage 1 on rank 2        a batch of its own
                 sum of gradients      sum of gradients         one step, the same everywhere

Each stage sums its own gradients, during its last backward, while the stages before it still drain. Losses are weighted
by their share of the samples (or other counted units) of all replicas, so the sum is the gradient of all batches taken
as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives, TensorCollectives
from lightning_avgpipe.comm.topology import StageMap, all_parties
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observer, Observers
from lightning_avgpipe.engine.shared_statistics import SharedStatistics
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.schedule import Schedule, in_turn
from lightning_avgpipe.training.gradient_sums import GradientSums
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.utils.names import joined


def check_shared(graph: CallGraph, cuts: Sequence[int], stage_map: StageMap) -> None:
    """Check that stages whose replicas take micro-batches in turns can run a step.

    Args:
        graph: graph of the step; replicas of the last stage take turns only in training.
        cuts: K-1 positions of the cuts.
        stage_map: which process hosts which stage.

    Raises:
        PartitionError: the step keeps a value for the next micro-batch, which another replica runs.
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
    """Yield attributes that a step changes, and reads in or before a stage with replicas, as (module path, name)."""
    if not shared:
        return
    early = {key for key, position in graph.reads.items() if position <= bounds[shared[-1] + 1]}
    yield from early.intersection(graph.changed_between)
    nodes = (node for k in shared for node in graph.executed(bounds[k], bounds[k + 1]) if node.kind != "glue")
    units = {name for node in nodes for name in node.name.split(", ")}  # a region has several
    for path, name in {*graph.changed_by_units, *graph.written_tensors}:
        if not path or any(f"{path}.".startswith(f"{unit}.") or f"{unit}.".startswith(f"{path}.") for unit in units):
            yield path, name


def sharing_last(cluster: Cluster) -> Collectives | None:
    """Return the replicas of the last stage, if there are several and this process is one of them; else None."""
    replicas, counts = cluster.replicas, cluster.stage_map.stage_replicas
    shares = counts[-1:] > (1,) and cluster.stage_map.num_stages - 1 in cluster.stages
    return replicas.members if shares and replicas is not None else None


def weighing(
    works: Sequence[Sequence[MicroBatch]], num_pipelines: int, divides: bool, replicas: TensorCollectives
) -> Callable[[], list[list[MicroBatch]]]:
    """Start to weight micro-batches by their share of the counted samples that all replicas have in a pipeline.

    If the pipelines divide one batch, it is the share of the samples in all of them, times the number of pipelines. All
    processes that compute losses call it. If no replica counts any samples, replicas have equal weights.

    Args:
        works: micro-batches by pipeline; at the end of an epoch, replicas may have batches for different numbers of
            pipelines.
        num_pipelines: number of pipelines, N.
        divides: whether the pipelines divide one batch.
        replicas: group of these processes.

    Returns:
        A function that waits for the sum and returns the micro-batches with their weights.
    """
    counted = torch.zeros(2, num_pipelines, dtype=torch.float64, device="cpu")
    for n, parts in enumerate(works):
        counted[0, n], counted[1, n] = sum(part.mean_weight for part in parts), 1.0
    arrive = replicas.begin_sum([counted])

    @functools.cache
    def weighed() -> list[list[MicroBatch]]:
        arrive()
        totals, present = counted.tolist()
        if divides:
            totals = [sum(totals) / sum(map(bool, present))] * num_pipelines
        return [
            [
                replace(part, weight=part.mean_weight / total if total else part.weight / replicas.count)
                for part in parts
            ]
            for parts, total in zip(works, totals, strict=False)
        ]

    return weighed


def can_run_together(schedule: Schedule, counts: tuple[int, ...]) -> bool:
    """Return whether all actions of a schedule can run if those of the replicas of a stage begin and end together.

    Args:
        schedule: schedule with rows of all stages, and a number of micro-batches that is a multiple of each count.
        counts: number of replicas of each stage, which take micro-batches in turns.
    """
    rows = [list(in_turn(row, 0, count)) for row, count in zip(schedule.rows, counts, strict=True)]
    done: set[tuple[str, int, int]] = set()  # forward or gradient, stage, micro-batch
    last, moved = len(rows) - 1, True
    while moved:
        moved = False
        for k, row in enumerate(rows):
            while row:
                kind = row[0].kind
                together = range(row[0].micro_batch, row[0].micro_batch + counts[k])
                before = {"forward": k - 1, "backward": k + 1}.get(kind.consumes or "", -1)
                if 0 <= before <= last and not all((kind.consumes, before, i) in done for i in together):
                    break
                done |= {(kind.produces or "", k, i) for i in together}
                row.pop(0)
                moved = True
    return not any(rows)


class ReplicaSync:
    """The synchronisation of replicas in one run of the trainer. Without replicas all methods do nothing.

    Args:
        module: module that is trained.
        cluster: the connected processes.
        models: models that are trained.
        observers: observers of iterations.
        normalises: whether batch normalisation uses statistics over all replicas (sync_batchnorm).
    """

    def __init__(
        self, module: nn.Module, cluster: Cluster, models: ParallelPipelines, observers: Observers, normalises: bool
    ) -> None:
        self._module = module
        self._cluster = cluster
        self._models = models
        self._observers = observers
        self._gradient_sums: GradientSums | None = None
        self._normalises = normalises
        self._connected: StageMap | None = None  # stage map whose replicas are connected for batch normalisation
        self._statistics: list[Observer] = []
        self._checked: set[tuple[str, int]] = set()

    def agree(self, count: int, skipped: frozenset[int], num_pipelines: int, sums: bool) -> tuple[int, frozenset[int]]:
        """Agree on which models had a batch, and which of these had no loss; sum gradients if they are complete.

        Every process calls it.

        Args:
            count: number of pipelines that had a batch on this replica.
            skipped: numbers of those whose batch had no loss on this replica.
            num_pipelines: number of pipelines, N.
            sums: whether gradients are summed over replicas now.
        Returns:
            The number of pipelines that had a batch on any replica, and the numbers of those that had no loss on any.
        """
        replicas = self._cluster.replicas
        if replicas is None:
            return count, skipped
        votes = torch.zeros(2, num_pipelines, dtype=torch.int32, device="cpu")
        votes[0, :count] = 1
        votes[1, [n for n in range(count) if n not in skipped]] = 1
        if sums:
            with self._observers.activity("averaging"):
                votes = self._sums().finish(self._summed(num_pipelines), votes)
        else:
            replicas.members.sum(votes)
        fed, trained = votes.bool().tolist()
        self.copy_changed(range(num_pipelines))
        return sum(fed), frozenset(n for n in range(sum(fed)) if not trained[n])

    def copy_changed(self, numbers: Iterable[int]) -> None:
        """Copy the tensors that training steps themselves change, of these models, from the first replica to others."""
        if self._cluster.replicas is not None:
            self._cluster.replicas.copy([t for n in numbers for t in self._models.changed_by_steps(n)])

    def count_once(self, num_pipelines: int) -> None:
        """Keep the sums of gradients on the first replica only, before further batches add to them."""
        replicas = self._cluster.replicas
        if replicas is not None and replicas.members.rank:
            for parameter in self._summed(num_pipelines).values():
                parameter.grad = None

    def check_trains(self, micro_batch: int) -> None:
        """Refuse a micro-batch without a loss if replicas normalise together, since all would wait for its backward.

        Raises:
            ConfigurationError: replicas normalise together.
        """
        if self._normalises:
            raise ConfigurationError(
                f"micro-batch {micro_batch} has no loss (the step returned None, or its weight is 0), and with "
                "sync_batchnorm=True other replicas would wait for its backward; return a loss of zero that depends on "
                "the outputs (0.0 * outputs.sum()), or remove sync_batchnorm"
            )

    def observers(self, schedule: Schedule, num_pipelines: int, steps: bool) -> list[Observer]:
        """Return the observers of a training iteration, which come before all others. Every process calls it.

        Args:
            schedule: schedule of pipeline 0.
            num_pipelines: number of pipelines, N.
            steps: whether the iteration ends with an optimizer step, so that its gradients are complete.
        Raises:
            ConfigurationError: replicas normalise together, and cannot with this schedule.
        """
        if self._normalises:
            self._share_statistics(schedule)
        if self._cluster.replicas is None or not steps:
            return self._statistics
        sums, stage_map = self._sums(), self._cluster.stage_map
        if num_pipelines > 1:  # sums start early for a single pipeline only
            sums.watch({}, {})
        else:
            rows = {k: in_turn(schedule.rows[k], *stage_map.share(k, self._cluster.rank)) for k in self._cluster.stages}
            sums.watch(self._summed(1), rows)
        return [sums, *self._statistics]

    def _share_statistics(self, schedule: Schedule) -> None:
        """Connect the replicas of each stage for batch normalisation, and check that they can run a schedule."""
        stage_map = self._cluster.stage_map
        if self._connected != stage_map:
            replicas = [replace(p, what="batch normalisation") for p in all_parties(stage_map) if p.what == "replicas"]
            members = self._cluster.connect(replicas, "for batch normalisation")
            self._statistics = [] if members is None else [SharedStatistics(members, stage_map.shares_devices)]
            self._connected = stage_map
            self._checked.clear()
        self._check_normalising(schedule, stage_map)

    def _check_normalising(self, schedule: Schedule, stage_map: StageMap) -> None:
        """Raise ConfigurationError if replicas have different numbers of micro-batches, or would deadlock."""
        number = schedule.num_microbatches
        key = schedule.name, number
        if stage_map.stage_replicas and key not in self._checked:
            counts = stage_map.stage_replicas
            if any(number % count for count in counts):
                raise ConfigurationError(
                    f"sync_batchnorm=True normalises over the micro-batches that replicas={list(counts)} have at the "
                    f"same time, and {number} micro-batches do not divide by these; use another num_microbatches, and "
                    "drop_last=True where the last batch of an epoch has fewer"
                )
            if not can_run_together(schedule, counts):
                raise ConfigurationError(
                    f"sync_batchnorm=True with replicas={list(counts)}: in the schedule {schedule.name!r} replicas "
                    "would wait for each other forever, because stages have different numbers of replicas; use "
                    "schedule='afab', or the same number of replicas for each stage"
                )
            self._checked.add(key)
        if stage_map.replicas > 1:
            assert self._cluster.replicas is not None
            numbers = self._cluster.replicas.members.exchange_objects(number)
            if len(set(numbers)) > 1:
                raise ConfigurationError(
                    f"sync_batchnorm=True normalises over the micro-batches that replicas have at the same time, and "
                    f"the batches of the replicas were split into {', '.join(map(str, numbers))} micro-batches; let "
                    "their data loaders give batches of equal size (drop_last=True)"
                )

    def _sums(self) -> GradientSums:
        """Return the gradient sums of the current replicas, which a new stage map may have changed."""
        replicas = self._cluster.replicas
        assert replicas is not None
        if self._gradient_sums is None or self._gradient_sums.replicas is not replicas:
            self._gradient_sums = GradientSums(replicas)
        return self._gradient_sums

    def _summed(self, models: int) -> dict[str, nn.Parameter]:
        """Return the parameters of the first ``models`` models whose gradients replicas sum, by name."""
        copied, ensemble = self._models.summed_with_copies, self._models.ensemble
        if ensemble is not None:
            own = [ensemble.models.parameters(n) for n in range(models)]
        else:
            own = [{name: p for name, p in self._module.named_parameters() if not p.is_meta}] * models
        return {f"{n}.{name}": p for n, mine in enumerate(own) for name, p in mine.items() if name not in copied}
