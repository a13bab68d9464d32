"""Keep outputs of frozen layers on the host, by sample, so that the layers need not run again for the sample.

::

    micro-batch    samples 4 7 0 2      all are known: the forward begins after the frozen layers
                   samples 4 7 9 2      9 is not: the frozen layers run, and their output for 9 is kept

A sample is identified by a digest of what the frozen layers read of it. So the dataset need not number its samples, and
an augmented sample counts as a new one. In each epoch, the first iteration with a known micro-batch runs the frozen
layers anyway, to compare their outputs with the kept ones; no kept outputs are used before that.

The outputs are kept for one position in the step, by the process of the first stage that trains, until the next plan.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.planner import PlanSource
from lightning_avgpipe.planning.trained import TrainedParameters, requiring_gradient
from lightning_avgpipe.schedule import Schedule, num_forward_only
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.utils.tensors import is_strided, strided_parts

_log = logging.getLogger(__name__)

_FEWEST_HITS = 0.5  # least share of known samples in later epochs
_TRIALS = 3  # repetitions when reading kept outputs is timed

_Key = tuple[int, bytes]  # number of samples in the micro-batch, and the digest of one


def digests(data: Any, size: int, names: Collection[str] | None) -> list[bytes]:
    """Return a digest of each sample of a micro-batch.

    Args:
        data: the micro-batch, a tree.
        size: number of samples. Sparse tensors and those with another first dimension, and leaves that are no tensors,
            belong to every sample.
        names: names of the tensors that count; None: all.
    """
    shared, each = hashlib.blake2b(digest_size=16), [hashlib.blake2b(digest_size=16) for _ in range(size)]
    for name, leaf in tree.flatten_with_names(data)[0]:
        if not isinstance(leaf, Tensor):
            shared.update(pickle.dumps((name, leaf)))
        elif names is None or name in names:
            divided = is_strided(leaf) and leaf.ndim > 0 and leaf.shape[0] == size
            shape = tuple(leaf.shape[1:] if divided else leaf.shape)
            shared.update(f"{name} {shape} {leaf.dtype} {leaf.layout}".encode())
            hosts = [part.detach().cpu().contiguous() for part in strided_parts(leaf)]
            for part, found in zip(hosts[0], each, strict=True) if divided else ((host, shared) for host in hosts):
                found.update(as_bytes(part).numpy().data)
    tail = shared.digest()
    return [found.digest() + tail for found in each]


@dataclass(frozen=True)
class _Form:
    """What micro-batches of one size, with samples of one shape, have in common.

    Attributes:
        tensors: forms of the values.
        shared: for each value its contents if it has no row per sample, else None.
        descriptions: descriptions of what the frozen nodes returned.
        pickled: the pickled descriptions, to compare.
    """

    tensors: tuple[TensorForm, ...]
    shared: tuple[Tensor | None, ...]
    descriptions: Any
    pickled: bytes


class _Sample(NamedTuple):
    """The kept values of one sample: a row of each value, None where the form holds all of it."""

    form: _Form
    rows: list[Tensor | None]


class KeptOutputs:
    """The outputs of frozen layers that one process keeps: the shortcut of a step, the same on every process.

    Args:
        limit: bytes on the host. When they are used up, no further samples are kept.
        position: number of leading nodes that are frozen.
        cluster: cluster of the process.
        graph: call graph of the step.
        trained: record of the parameters that are trained now.
        stage: first stage that trains, whose process keeps the outputs.

    Attributes:
        position: as given.
        stage: as given.
        why_not: reason why nothing is kept; "" if outputs are kept.
    """

    def __init__(
        self, limit: float, position: int, cluster: Cluster, graph: CallGraph, trained: TrainedParameters, stage: int
    ) -> None:
        self.position, self.stage = position, stage
        self.why_not = ""
        self._left = limit
        self._cluster, self._graph, self._trained = cluster, graph, trained
        self._samples: dict[_Key, _Sample] = {}
        self._forms: dict[tuple[int, tuple[TensorForm, ...]], _Form] = {}
        self._keys: dict[int, list[_Key]] = {}  # by micro-batch of this iteration
        self._is_due = True  # whether outputs must be compared before any are read in this epoch
        self._is_used = False
        self._expected = 0  # samples that were kept when the epoch began
        self._seen = self._hits = 0  # samples in the epoch so far, and those of them that were kept

    def begin_epoch(self) -> None:
        """Begin an epoch: require a new comparison, and stop keeping if most samples of the last epoch were new."""
        seen, hits = self._seen, self._hits
        if hits < _FEWEST_HITS * min(seen, self._expected):
            self.stop(
                f"of {seen} samples of an epoch {hits} had come before: the dataloader augments at random or has new "
                "samples in each epoch"
            )
        elif seen:
            _log.info("of %d samples of the last epoch outputs of frozen layers were kept for %d", seen, hits)
        self._is_due, self._expected, self._seen, self._hits = True, len(self._samples), 0, 0

    def stop(self, why: str) -> None:
        """Forget all outputs, and keep none until the next plan."""
        if not self.why_not:
            _log.warning("outputs of frozen layers are not kept: %s", why)
        self.why_not = why
        self._samples, self._forms, self._keys = {}, {}, {}

    @property
    def leaves(self) -> frozenset[str]:
        """The names of the tensors of a batch that the frozen layers read."""
        return frozenset(leaf.name for leaf in self._graph.needed_leaves(0, self.position))

    def known(self, samples: Sequence[tuple[Any, int]], schedule: Schedule, num_pipelines: int) -> frozenset[int]:
        """Return the micro-batches of an iteration whose outputs are kept. Every process calls it.

        Args:
            samples: data and number of samples, by micro-batch.
            schedule: schedule of the iteration.
            num_pipelines: number of pipelines that train in it.
        """
        if num_pipelines > 1:
            self.stop(f"{num_pipelines} pipelines train, and outputs are kept for one")
            return frozenset()
        why, found, owner = self._why_none(schedule), frozenset[int](), self._cluster.stage_map.owner(self.stage)
        if self._cluster.rank == owner:
            if why:
                self.stop(why)
            there = {} if why or _lacks(samples, self.leaves) else dict(enumerate(samples))
            found = self.look_up({i: digests(*sample, self.leaves) for i, sample in there.items()})
        return found if why else self._cluster.group.broadcast(found, owner)

    def _why_none(self, schedule: Schedule) -> str:
        if not self._trained.names <= self._graph.trained:
            return "layers train that were frozen when the stages were planned"
        if num_forward_only(schedule) != self.stage:
            return f"stage {self.stage}, which would keep them, is not the first that trains"
        return f"stages of one process take turns in schedule={schedule.name!r}" if schedule.turns else ""

    def look_up(self, samples: Mapping[int, Sequence[bytes]]) -> frozenset[int]:
        """Begin an iteration, and find out for which of its micro-batches outputs are kept.

        Args:
            samples: micro-batch -> digests of its samples; empty if they cannot be computed.
        Returns:
            The micro-batches whose forwards may begin after the frozen layers.
        """
        self._keys = {} if self.why_not else {i: [(len(own), one) for one in own] for i, own in samples.items()}
        begins = set[int]()
        for i, keys in self._keys.items():
            there = [self._samples[key] for key in keys if key in self._samples]
            self._seen += len(keys)
            self._hits += len(there)
            if len(there) == len(keys) and all(sample.form is there[0].form for sample in there):
                begins.add(i)
        found = frozenset[int]() if self._is_due else frozenset(begins)
        self._is_used |= bool(found)
        return found

    def read(self, micro_batch: int, device: torch.device, forward_only: int) -> Message:
        """Return the kept values for a micro-batch that :meth:`look_up` returned, as a message."""
        samples = [self._samples[key] for key in self._keys[micro_batch]]
        form, tensors = samples[0].form, []
        for i, shared in enumerate(form.shared):
            if shared is not None:
                tensors.append(shared.to(device, copy=True))
            else:
                value = torch.stack([row for row in (sample.rows[i] for sample in samples) if row is not None])
                laid_out = form.tensors[i]  # rounding in kernels may depend on the order of dimensions in memory
                tensors.append(laid_out.from_wire(laid_out.on_wire(value.to(device)).contiguous()))
        asks = (False,) * len(tensors)
        return Message(micro_batch, tuple(tensors), asks, form.descriptions, forward_only=forward_only)

    def wants(self, micro_batch: int) -> bool:
        """Return whether :meth:`fill` keeps or compares the outputs for a micro-batch."""
        return micro_batch in self._keys

    def fill(self, micro_batch: int, tensors: Sequence[Tensor], descriptions: Any) -> None:
        """Keep the outputs of the frozen layers, and compare them with outputs that are kept for the same samples.

        Args:
            micro_batch: number of the micro-batch.
            tensors: values that are alive at the position.
            descriptions: descriptions of what the nodes before the position returned.
        Raises:
            VerificationError: the outputs differ, and kept outputs have been used.
        """
        keys, host = self._keys.pop(micro_batch), [t.detach().cpu() for t in tensors]
        divided = [t.ndim > 0 and t.shape[0] == len(keys) for t in host]
        name, pickled = (len(keys), tuple(map(TensorForm.of, tensors))), pickle.dumps(descriptions)
        form = self._forms.get(name)
        if form is None:
            shared = tuple(None if own else t.clone() for t, own in zip(host, divided, strict=True))
            form = self._forms[name] = _Form(name[1], shared, descriptions, pickled)
        elif pickled != form.pickled:
            return self._differ("what the frozen layers return besides tensors")
        for tensor, one in zip(host, form.shared, strict=True):
            if one is not None and not torch.equal(tensor, one):
                return self._differ(f"a tensor of shape {tuple(tensor.shape)}, which is not one row for each sample,")
        known = [self._samples.get(key) for key in keys]
        for row, (key, sample) in enumerate(zip(keys, known, strict=True)):
            parts = [t[row] if own else None for t, own in zip(host, divided, strict=True)]
            if sample is None:
                self._keep(key, form, parts)
            elif sample.form is not form or not all(map(_same, parts, sample.rows)):
                return self._differ("what the frozen layers give for the same sample")
        if None not in known:
            self._is_due = False
        return None

    def _keep(self, key: _Key, form: _Form, parts: Sequence[Tensor | None]) -> None:
        size = sum(part.nbytes for part in parts if part is not None)
        if size <= self._left and key not in self._samples:
            self._left -= size
            rows = [None if part is None else part.clone(memory_format=torch.contiguous_format) for part in parts]
            self._samples[key] = _Sample(form, rows)

    def _differ(self, what: str) -> None:
        found = (
            f"{what} is not what it was before: it depends on more than the sample (on others beside it, on "
            "chance, on time), or frozen weights have changed"
        )
        if self._is_used:
            raise VerificationError(f"{found}. Kept outputs of frozen layers are used by now; train without the cache")
        self.stop(found)


# -- plans ----------------------------------------------------------------------------------------------------------


class KeptOutputsSource(PlanSource):
    """Plans in which frozen layers take no time, because their outputs are kept; units are opened where they end."""

    def opened(self, subject: Divisible, units: Sequence[str]) -> Sequence[str]:
        """Return the units, opened until none that can be opened has both trained and frozen parameters."""
        while True:
            flags = {unit: {p.requires_grad for p in subject.module.get_submodule(unit).parameters()} for unit in units}
            mixed = [unit for unit in units if len(flags[unit]) > 1 and subject.opens(unit)]
            if not mixed:
                return units
            units = subject.refine(units, mixed)

    def costs(self, subject: Divisible, graph: CallGraph, costs: Costs) -> Costs:
        """Return costs in which nodes with kept outputs take no time, if reading the outputs is faster."""
        frozen, _ = frozen_prefix(graph, graph.trained)
        if costs.measured and sum(costs.forward[:frozen]) < _reading_s(graph, frozen, subject.device):
            return costs
        return replace(costs, forward=(0.0,) * frozen + tuple(costs.forward[frozen:]), kept=frozen)

    def kept(self, graph: CallGraph, costs: Costs) -> int:
        """Return how many leading nodes are frozen and have kept outputs; log why there are not more."""
        frozen, why = frozen_prefix(graph, graph.trained)
        if frozen and not costs.kept:
            frozen, why = 0, "computing them takes less time than reading them"
        if why and frozen:
            _log.info("outputs of frozen layers are kept up to %s: %s", graph.nodes[frozen - 1], why)
        elif why:
            _log.warning("outputs of frozen layers are not kept: %s", why)
        return frozen


def frozen_prefix(graph: CallGraph, trained: Collection[str]) -> tuple[int, str]:
    """Return how many leading nodes compute the same outputs for the same samples while they are frozen.

    Values that cross the cut after these nodes require no gradient. The nodes neither draw random numbers nor use
    anything that the step changes.

    Args:
        graph: call graph of the step.
        trained: full names of the parameters that are trained now.
    Returns:
        The number of nodes, 0 if there are none; and why there are not more, empty if these are all frozen nodes.
    """
    if graph.batch_writes:
        return 0, f"{graph.step} changes its batch"
    asking, most, why = requiring_gradient(graph, frozenset(trained)), len(graph.nodes) - 1, ""
    for path in sorted(graph.drawing | graph.host_drawing):
        if not any(is_within(path, unit) for unit in graph.units):  # code between units
            begins = min((call.begin for call in graph.followed_calls if call.path == path), default=0)
            if begins < most:
                most, why = begins, f"{f'the code of {path!r}' if path else graph.step} draws random numbers"
    assigning = {path for path, _ in graph.changed_by_units}
    for node in graph.nodes:
        found = (
            "draws random numbers" if node.draws or graph.host_drawing.intersection(node.drawn)
            else "uses what the step changes" if node.states or node.index in graph.upkeep
            else "writes into objects" if node.writes_objects
            else "assigns attributes" if node.kind == "call" and any(is_within(p, node.name) for p in assigning)
            else ""
        )  # fmt: skip
        if found:
            if node.index < most:
                most, why = node.index, f"{node} {found}"
            break
    frozen = [p for p in range(len(graph.nodes)) if graph.obstacles[p] is None and asking.isdisjoint(graph.live(p))]
    position = max((p for p in frozen if p <= most), default=0)
    return position, why if position < max(frozen, default=0) else ""


def _reading_s(graph: CallGraph, frozen: int, device: torch.device | None) -> float:
    """Measure the seconds to look up and read the outputs of a frozen prefix for one micro-batch, on dummy data.

    Args:
        graph: call graph of the step.
        frozen: number of nodes in the prefix.
        device: device to which outputs are read; None: the host.
    """
    data = [torch.zeros(leaf.nbytes, dtype=torch.uint8, device="cpu") for leaf in graph.needed_leaves(0, frozen)]
    kept = torch.zeros(graph.boundary_bytes[frozen], dtype=torch.uint8, device="cpu")
    times = []
    for _ in range(_TRIALS):
        begin = time.perf_counter()
        for tensor in data:
            hashlib.blake2b(tensor.numpy().data)
        kept.clone().to(device or torch.device("cpu"))
        times.append(time.perf_counter() - begin)
    return min(times)


def _lacks(samples: Sequence[tuple[Any, int]], names: Collection[str]) -> bool:
    """Return whether tensors of these names were not sent to this process."""
    leaves = (pair for data, _ in samples for pair in tree.flatten_with_names(data)[0])
    return any(isinstance(leaf, Absent) and name in names for name, leaf in leaves)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))
