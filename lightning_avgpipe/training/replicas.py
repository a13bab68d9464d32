"""Replicas: groups of processes that train the same models, each on its share of a batch, as ddp does.

::

    replica 0    stage 0 on rank 1     stage 1 on rank 0        a batch of its own
    replica 1    stage 0 on rank 3     stage 1 on rank 2        a batch of its own
                 sum of gradients      sum of gradients         one step, the same everywhere

Each stage sums by itself, within its last backward, while the stages before it still drain. Losses are weighted by
their share of the samples (or other counted units) of all replicas, so the sum is the gradient of all batches as one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.routes import all_parties
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.shared_statistics import SharedStatistics
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.planning.problem import BUCKET_BYTES
from lightning_avgpipe.schedule import BACKWARD, WEIGHT_GRADIENT, Action, Schedule, in_turn
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.torch_compat import version_of


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


_DENSE, _SPARSE, _LATE = 0, 1, 2

Named = Mapping[str, nn.Parameter]


@dataclass
class _Sent:
    """The gradient of a parameter, as it was when its sum began."""

    gradient: Tensor
    version: int
    was_missing: bool

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Sent:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return cls(torch.zeros_like(parameter), 0, gradient is None)
        return cls(gradient, version_of(gradient), False)

    def still(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter's gradient is still the one that was sent."""
        if self.was_missing:
            return parameter.grad is None
        return parameter.grad is self.gradient and version_of(self.gradient) == self.version


@dataclass
class _Bucket:
    """Parameters whose gradients are summed as one message."""

    parameters: Sequence[nn.Parameter]
    missing: set[int]  # positions of parameters whose gradient of the last backward has not arrived
    sent: Sequence[_Sent] = ()
    end: Callable[[], None] | None = None

    def begin(self, replicas: ReplicaGroup) -> None:
        self.sent = [_Sent.of(parameter) for parameter in self.parameters]
        self.end = replicas.begin_sum([sent.gradient for sent in self.sent])


class GradientSums(Observer):
    """The sums of gradients over replicas; all replicas get the same bits.

    Args:
        replicas: group of the replicas.
        bucket_bytes: size from which a bucket takes no further parameter.

    Attributes:
        replicas: as given.
    """

    def __init__(self, replicas: ReplicaGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._spoiled: set[str] = set()  # parameters whose gradients have changed after they were sent
        self._dealt: Sequence[Sequence[str]] = ()  # names, by bucket; the same in all replicas
        self._names: Sequence[str] = ()  # of all parameters when the buckets were made
        self._buckets: Sequence[_Bucket] = ()
        self._begun = 0
        self._last: Mapping[int, Action] = {}

    def watch(self, named: Named, rows: Mapping[int, Sequence[Action]]) -> None:
        """Prepare for an iteration that ends in a step. All replicas call it.

        Args:
            named: parameters to sum, by name; the same names, in the same order, in all replicas. If they differ from
                those of the last step, all are summed after the backward.
            rows: actions of each stage on this process.
        """
        dealt = self._dealt if tuple(named) == self._names else ()
        self._buckets = [_Bucket([named[name] for name in names], set(range(len(names)))) for names in dealt]
        self._begun = 0
        self._last = {}
        for stage, row in rows.items():
            if backwards := [action for action in row if action.kind in (BACKWARD, WEIGHT_GRADIENT)]:
                self._last[stage] = backwards[-1]

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Perform an action; in the last backward of a stage, begin the sums of buckets that become complete."""
        if self._last.get(work.stage) != work.action or not self._buckets:
            return do()
        with contextlib.ExitStack() as listening:
            for bucket in self._buckets:
                for i, parameter in enumerate(bucket.parameters):
                    if i in bucket.missing and parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(self._arrival(bucket, i))
                        listening.callback(hook.remove)
            return do()

    def _arrival(self, bucket: _Bucket, i: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            bucket.missing.discard(i)
            if not bucket.missing and bucket.end is None:
                self._begin_complete()

        return arrived

    @torch.no_grad()
    def _begin_complete(self, every: bool = False) -> None:
        while self._begun < len(self._buckets):
            bucket = self._buckets[self._begun]
            if bucket.missing and not every:
                return
            self._begun += 1
            bucket.begin(self.replicas)

    def agree(self, processes: Collectives) -> None:
        """Begin the remaining sums at the end of an iteration, before any other collective of the replicas."""
        self._begin_complete(every=True)

    @torch.no_grad()
    def finish(self, named: Named, votes: Tensor) -> Tensor:
        """Give all replicas the sums of their gradients. All of them call it.

        A missing gradient counts as zero if another replica has one; a parameter without any gradient keeps none.

        Args:
            named: parameters as of :meth:`watch`; if that was not called, no sum has begun yet.
            votes: int32 tensor of any shape that is summed in the same message.

        Returns:
            The sum of votes.
        """
        parameters, buckets = list(named.values()), self._buckets
        self._buckets = ()
        early = {id(p): sent for bucket in buckets for p, sent in zip(bucket.parameters, bucket.sent, strict=True)}
        kinds = _kinds(parameters, early)
        together = self.replicas.members.sum(torch.cat([kinds.flatten(), votes.flatten()]))
        dense, sparse, late = together[: kinds.numel()].view(kinds.shape).bool().tolist()
        rest = []
        for parameter, is_dense, is_sparse, is_late in zip(parameters, dense, sparse, late, strict=True):
            if is_sparse and is_dense and parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            if not is_dense:
                continue
            if not is_late and parameter.grad is None:
                parameter.grad = early[id(parameter)].gradient
            elif is_late and id(parameter) in early and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # the early sum overwrites its tensor
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if is_late:
                rest.append(parameter.grad)
        for bucket in buckets:
            assert bucket.end is not None
            bucket.end()
        self.replicas.sum(rest)
        for parameter, is_dense, is_sparse in zip(parameters, dense, sparse, strict=True):
            if is_sparse and not is_dense:
                _sum_sparse(parameter, self.replicas)
        self._spoiled |= {
            name for (name, p), is_late in zip(named.items(), late, strict=True) if is_late and id(p) in early
        }
        suits = zip(named, dense, sparse, strict=True)
        self._names = tuple(named)
        suitable = [name for name, d, s in suits if d and not s and name not in self._spoiled]
        self._dealt = _deal(named, suitable, self._bucket_bytes)
        return together[kinds.numel() :].view(votes.shape)


def _kinds(parameters: Sequence[nn.Parameter], early: Mapping[int, _Sent]) -> Tensor:
    """Return whether each gradient is dense, is sparse, or is in no sum that has begun, as 0 or 1; shape ``(3, P)``."""
    kinds = torch.zeros(3, len(parameters), dtype=torch.int32, device="cpu")
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None:
            kinds[_SPARSE if parameter.grad.is_sparse else _DENSE, i] = 1
        sent = early.get(id(parameter))
        kinds[_LATE, i] = sent is None or not sent.still(parameter)
    return kinds


def _deal(named: Named, names: Sequence[str], bucket_bytes: int) -> list[list[str]]:
    """Divide names into buckets, the last first. The result is the same in all replicas."""
    dealt: list[list[str]] = []
    kind, size = None, 0
    for name in reversed(names):
        parameter = named[name]
        if kind != parameter.dtype or size >= bucket_bytes:
            dealt.append([])
            kind, size = parameter.dtype, 0
        dealt[-1].append(name)
        size += parameter.numel() * parameter.element_size()
    return dealt


def _sum_sparse(parameter: nn.Parameter, replicas: ReplicaGroup) -> None:
    """Sum a sparse gradient: the replicas exchange rows with their numbers."""
    gradient = parameter.grad
    mine: tuple[Tensor, Tensor] | None = None
    if gradient is not None:
        gradient = gradient.coalesce()
        mine = gradient.indices().cpu(), gradient.values().cpu()
    found = [rows for rows in replicas.members.exchange_objects(mine) if rows is not None]
    indices, values = (torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (1, 0), strict=True))
    total = torch.sparse_coo_tensor(indices, values, parameter.shape, device=parameter.device).coalesce()
    parameter.grad = total.to(parameter.dtype)


_WHAT = "batch normalisation"


class StatisticsSharing:
    """A provider of observers that share statistics of batch normalisation among replicas.

    Args:
        cluster: cluster with open channels, one stage on each process.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connected: StageMap | None = None
        self._observers: list[Observer] = []
        self._checked: set[tuple[str, int]] = set()

    def observers(self, schedule: Schedule) -> list[Observer]:
        """Return the observers of an iteration of training. Every process calls it.

        Raises:
            ConfigurationError: replicas have different numbers of micro-batches, or would wait for each other forever.
        """
        stage_map = self._cluster.stage_map
        if self._connected != stage_map:
            replicas = [replace(p, what=_WHAT) for p in all_parties(stage_map) if p.what == "replicas"]
            members = self._cluster.connect(replicas, f"for {_WHAT}")
            self._observers = [] if members is None else [SharedStatistics(members, stage_map.shares_devices)]
            self._connected = stage_map
            self._checked.clear()
        self._check(schedule, stage_map)
        return self._observers

    def _check(self, schedule: Schedule, stage_map: StageMap) -> None:
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
            if not meets(schedule, counts):
                raise ConfigurationError(
                    f"sync_batchnorm=True with replicas={list(counts)}: in the schedule {schedule.name!r} replicas "
                    "would wait for each other for ever, as stages do not divide micro-batches alike; use "
                    "schedule='afab', or as many replicas of each stage"
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


def meets(schedule: Schedule, counts: tuple[int, ...]) -> bool:
    """Return whether all actions can run if those of the replicas of a stage begin and end together.

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
