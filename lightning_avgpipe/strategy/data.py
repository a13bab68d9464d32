"""Dataloaders of a pipeline: one process of each group reads, and sends the others what they need of each batch.

Each group of processes trains on its own part of the data, and evaluates on all of it::

    training      group 0    samples 0 2 4 ..      a distributed sampler, injected as with ddp but over groups
                  group 1    samples 1 3 5 ..
    evaluation    each       all samples           every metric is exact, since no sample is left out or repeated
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from lightning_avgpipe.capture.batch_use import leaf_names
from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.batches import Needs, Passed
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.sample_layout import BatchInfo
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.hooks import changes_batches
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import (
    RunningStage,
    TrainerFn,
    _Stateful,
    is_overridden,
    pl,
    rank_zero_warn,
    sized_len,
)
from lightning_avgpipe.utils.patching import noop, replaced
from lightning_avgpipe.utils.random_streams import RandomState
from lightning_avgpipe.utils.source import is_within
from lightning_avgpipe.utils.tensors import same_contents
from lightning_avgpipe.utils.torch_compat import version_of

_HOST = torch.device("cpu")
# The Python modules in which loops read batches, on all processes, and those that call hooks.
_READING = f"{pl.__name__}.loops.fetchers", f"{__package__}.batches"
_CALLING = f"{pl.__name__}.trainer.call", f"{pl.__name__}.core.module"


class _End:
    """A marker that follows the last batch."""


class _Later:
    """A marker for a batch that is sent after its transfer hooks."""


class Distributor:
    """Sends the batches of one run of the trainer from the process that reads to the others of its group.

    Attributes:
        batch_stream: this process's end of the batch stream.
        needs: returns which tensors of a batch a process gets; None: all.
        sends_when_read: whether a batch is sent when it is read, one batch before it is used; else after its transfer
            hooks.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        self.batch_stream = cluster.batches
        self.needs: Needs | None = None
        self.sends_when_read = not changes_batches(trainer)
        self._trainer = trainer
        self._sends = cluster.reads and cluster.group.world_size > 1
        self._stream = self.batch_stream.begin()
        self._sealed: list[list[tuple[Tensor, int]]] = []  # by pipeline

    def readable_ahead(self, dataloader: Any) -> float:
        """Return how many batches of a dataloader may each be read while the previous one is not used yet.

        This is at most the limit of the running loop, so that nothing is read that the loop does not take. It is 0 if
        the position of the data is saved in checkpoints, which must not be ahead of the training.
        """
        if not self.sends_when_read or hasattr(dataloader, "state_dict") or saves_position(dataloader, self._trainer):
            return 0
        combined = getattr(self._trainer._active_loop, "_combined_loader", None)
        # the limits of the iterator count batches, also if a step takes one batch for each of several models
        if combined is None or combined._iterator is None or combined._iterator.limits is None:
            return math.inf
        limits = zip(combined.flattened, combined._iterator.limits, strict=True)
        return next((limit for one, limit in limits if one is dataloader), math.inf)

    def pass_on(self, batch: Any) -> Any:
        """Send a batch from the reader, after its transfer hooks, and return it on every process."""
        return self.batch_stream.accept(self.batch_stream.pass_on(self._stream, batch, self.needs))

    def seal(self, batch: Any, pipeline: int) -> Any:
        """Record the versions of the tensors in a pipeline's batch, so that :meth:`check_seal` finds later changes."""
        if self._sends:
            del self._sealed[pipeline:]
            self._sealed.append([(t, version_of(t)) for t in tree.tensors(batch) if not t.is_inference()])
        return batch

    def check_seal(self, batch: Any, pipeline: int) -> None:
        """Check that a pipeline's batch has not changed since it was sent.

        Raises:
            ConfigurationError: a tensor has changed; the message names it.
        """
        if pipeline >= len(self._sealed) or not self._sealed[pipeline]:
            return
        sealed, self._sealed[pipeline] = self._sealed[pipeline], []
        leaves = zip(leaf_names(batch), tree.tensors(batch), strict=True)
        now = [(name, tensor) for name, tensor in leaves if not tensor.is_inference()]
        pairs = zip(now, sealed, strict=False)
        changed = [name for (name, t), (old, version) in pairs if t is not old or version_of(t) != version]
        if changed or len(now) != len(sealed):
            what = ", ".join(changed) if len(now) == len(sealed) else "the number of tensors"
            raise ConfigurationError(
                f"a hook changed {what} of the batch after it was sent to the other stages, "
                "which would use the old numbers; change batches in on_after_batch_transfer, which runs once, "
                "before they are sent"
            )


def expected_batches(dataloader: Any) -> BatchInfo:
    """Return what is known about the sizes of a dataloader's batches, on the reader if another process reads."""
    told = getattr(dataloader, "expected_batches", None)
    if isinstance(told, BatchInfo):
        return told
    sampler = getattr(dataloader, "batch_sampler", None)
    # Lightning may have wrapped the sampler
    sampler = vars(sampler).get("_batch_sampler", sampler) if hasattr(sampler, "__dict__") else sampler
    if not isinstance(dataloader, DataLoader) or type(sampler) is not BatchSampler:
        return BatchInfo()  # other loaders and samplers may make batches of any size
    return BatchInfo(sampler.batch_size, dataloader.collate_fn is default_collate)


def expected_now(trainer: pl.Trainer, dataloader_idx: int, changed: bool) -> BatchInfo:
    """Return what is expected of the batch that the running loop works on.

    Args:
        trainer: trainer that runs the loop.
        dataloader_idx: index of the batch's dataloader, if the loop reads dataloaders one after the other.
        changed: whether hooks may have changed batches since the dataloader made them.
    """
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    loaders = [] if combined is None else combined.flattened
    if combined is not None and combined._mode == "sequential":
        loaders = loaders[dataloader_idx : dataloader_idx + 1]
    told = {expected_batches(loader) for loader in loaders}
    expected = told.pop() if len(told) == 1 else BatchInfo()
    return replace(expected, changed=changed)


def saves_position(dataloader: Any, trainer: pl.Trainer) -> str:
    """Return the class name of the dataloader or datamodule that saves the data's position; empty if none does."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(dataloader, _Stateful):
        return class_of(dataloader).__name__
    return type(datamodule).__name__ if is_overridden("state_dict", datamodule) else ""


def shared_dataloader(
    dataloader: Any, trainer: pl.Trainer, cluster: Cluster, distributor: Callable[[], Distributor]
) -> Any:
    """Return a dataloader for this process: on the reader one that sends each batch, elsewhere one that receives.

    Shuffling, collation and augmentation happen once, so inputs and labels agree on all stages, and an iterable dataset
    may end at any batch. Every process calls it.

    Raises:
        ConfigurationError: the position of the data would be saved in checkpoints, but rank 0 does not read it.
    """
    if isinstance(dataloader, _Mirror):  # left by an earlier run in a CombinedLoader of the user
        dataloader = vars(dataloader)["_dataloader"]
    # it may divide itself among processes; where each process is a group, that is right in training only
    divides = not trainer.training and isinstance(getattr(dataloader, "dataset", None), IterableDataset)
    if cluster.world.world_size == 1 or (cluster.group.world_size == 1 and not divides):
        return dataloader
    resumable = isinstance(dataloader, _Stateful)
    # a datamodule saves the position of the training data
    saves = saves_position(dataloader, trainer) if resumable or trainer.state.fn == TrainerFn.FITTING else ""
    with alone():  # as when it is read
        facts = sized_len(dataloader), resumable, saves, expected_batches(dataloader)
    length, resumable, saves, expected = cluster.group.broadcast(facts, cluster.stage_map.reader)
    if saves and cluster.stage_map.reader != 0:
        raise ConfigurationError(
            f"Links(reader='first') with a {saves} that saves its state: checkpoints are saved by "
            "rank 0, which does not have this state; use Links(reader='last')"
        )
    kind = _Alone if cluster.group.world_size == 1 else _Reader if cluster.reads else _Follower
    mirrored = kind(dataloader, distributor, length)
    # set as attributes, since isinstance() with a protocol does not call __getattr__ from Python 3.12 on
    vars(mirrored).update(expected_batches=expected, mirrored_class=type(dataloader))
    if resumable and cluster.reads:
        vars(mirrored).update(state_dict=dataloader.state_dict, load_state_dict=dataloader.load_state_dict)
    elif resumable:  # on every rank Lightning compares the number of stateful loaders with that in the checkpoint
        vars(mirrored).update(state_dict=dict, load_state_dict=noop)
    return mirrored


def class_of(dataloader: Any) -> type:
    """Return the class of the user's dataloader, also for its mirror."""
    return getattr(dataloader, "mirrored_class", type(dataloader))  # type: ignore[no-any-return]


class _Mirror:
    """A dataloader that takes the place of this process's own, and has its attributes.

    Lightning's loops, which run on all processes, get the batches of a common stream. User code that iterates over it,
    such as a hook that may run on one process only, reads the process's own dataloader.
    """

    def __init__(self, dataloader: Any, distributor: Callable[[], Distributor], length: int | None = None) -> None:
        vars(self).update(_dataloader=dataloader, _distributor=distributor, _length=length, _stream=None)

    def __iter__(self) -> Iterator[Any]:
        return self._streamed() if is_within(_READING, _CALLING) else iter(vars(self)["_dataloader"])

    @abstractmethod
    def _streamed(self) -> Iterator[Any]:
        """Return an iterator over the batches of a new stream."""

    def _begun(self) -> tuple[Distributor, int]:
        """Begin a new stream of batches, which ends the last one; return the distributor and the stream's number."""
        distributor: Distributor = vars(self)["_distributor"]()
        stream = vars(self)["_stream"] = distributor.batch_stream.begin(vars(self)["_stream"])
        return distributor, stream

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_dataloader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_dataloader"], name, value)


class _Alone(_Mirror):
    """A dataloader whose code sees one process only, while its length is asked for and while it is read.

    Data that divide themselves among processes would leave out the parts of those that do not read.
    """

    def _streamed(self) -> Iterator[Any]:
        # The iterator is made at once, as on one device, since this starts workers and draws random numbers.
        with alone():
            return self._read(iter(self._dataloader))

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with alone():
                batch = next(batches, _End)
            if batch is _End:
                return
            yield batch

    def __len__(self) -> int:
        with alone():
            return len(vars(self)["_dataloader"])  # a TypeError if it has no length


class _Reader(_Alone):
    """The reader's dataloader, which sends each batch, and the end, to the other processes."""

    def _streamed(self) -> Iterator[Any]:
        return self._passed_on(super()._streamed())

    def _passed_on(self, batches: Iterator[Any]) -> Iterator[Any]:
        distributor, stream = self._begun()

        def pass_on(batch: Any) -> tuple[Any, Passed]:
            if batch is _End or not distributor.sends_when_read:
                return batch, distributor.batch_stream.pass_on(stream, _End if batch is _End else _Later)
            return batch, distributor.batch_stream.pass_on(stream, batch, distributor.needs)

        limit = distributor.readable_ahead(self)
        batch, passed = pass_on(next(batches, _End))
        for number in itertools.count(1):
            if batch is _End:
                break
            following = pass_on(next(batches, _End)) if 1 < number < limit else None
            distributor.batch_stream.accept(passed)
            yield batch
            if number == 1:
                second, affects = _read_watched(batches, batch)
                following = pass_on(second)
                limit = 0 if affects else limit
            batch, passed = following or pass_on(next(batches, _End))
        distributor.batch_stream.accept(passed)


def _read_watched(batches: Iterator[Any], batch: Any) -> tuple[Any, bool]:
    """Read the second batch of an epoch, and find out whether later batches may be read ahead.

    They may not if reading draws random numbers, since a validation or a hook between two batches may draw too, or if
    it overwrites the memory of the previous batch. (The first batch says nothing: with it samplers draw the order of
    the whole epoch.)

    Args:
        batches: iterator over the batches after the first.
        batch: the first batch.
    Returns:
        The second batch, or the marker of the end, and whether reading it had such an effect.
    """
    before, contents = RandomState(_HOST), [tensor.clone() for tensor in tree.tensors(batch)]
    second = next(batches, _End)
    overwrites = not all(map(same_contents, contents, tree.tensors(batch)))
    return second, overwrites or not RandomState(_HOST).is_same(before)


class _Follower(_Mirror):
    """The dataloader of a process that does not read: yields its part of each batch, or None if that comes later."""

    def __len__(self) -> int:
        length: int | None = vars(self)["_length"]
        if length is None:
            raise TypeError("the dataloader of the process that reads has no length")
        return length

    def _streamed(self) -> Iterator[Any]:
        distributor, stream = self._begun()
        while True:
            item = distributor.batch_stream.accept(distributor.batch_stream.pass_on(stream))
            if item is _End:
                return
            yield None if item is _Later else item

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # only the reader knows the position
            raise AttributeError(name)
        value = super().__getattr__(name)
        # Lightning's wrapper records which samples are in a batch, but only on the process that reads
        return getattr(value, "_batch_sampler", value) if name == "batch_sampler" else value


def sampling_over_groups(trainer: pl.Trainer, num_groups: int) -> AbstractContextManager[None]:
    """Return a context within which Lightning gives training dataloaders a distributed sampler over groups.

    It respects ``use_distributed_sampler=False`` and a sampler that is distributed already. It warns of data that
    cannot be sampled, which the user's code must divide among groups.
    """
    if num_groups == 1:
        return nullcontext()
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode != RunningStage.TRAINING or not trainer._accelerator_connector.use_distributed_sampler:
            return prepare(dataloader, shuffle, mode)
        with replaced(connector, "_requires_distributed_sampler", _divisible):
            found = prepare(dataloader, shuffle, mode)
        if not _divides(getattr(found, "sampler", None)):
            rank_zero_warn(
                f"{num_groups} groups of processes train on data of their own, but Lightning cannot "
                f"divide a {type(dataloader).__name__} with an iterable dataset or without sampler: each group reads "
                "all of it unless your code takes a part by trainer.strategy.group_number and "
                "trainer.strategy.num_groups"
            )
        return found

    return replaced(connector, "_prepare_dataloader", prepare_dataloader)


def _divisible(dataloader: DataLoader[Any]) -> bool:
    """Return whether a distributed sampler can divide a dataloader that has none yet."""
    return not _divides(dataloader.sampler) and not isinstance(dataloader.dataset, IterableDataset)


def _divides(sampler: Any) -> bool:
    """Return whether a sampler divides data among processes, also if it only resembles torch's DistributedSampler."""
    return isinstance(getattr(sampler, "num_replicas", None), int)


def check_sampler(dataloader: Any, readers: int, world_size: int) -> None:
    """Check that a sampler of the user does not divide the data among all processes, since only some of them read.

    Args:
        dataloader: the user's dataloader, or any other iterable.
        readers: number of groups of processes that each read a part of the data; 1 in evaluation.
        world_size: number of all processes.
    Raises:
        ConfigurationError: a sampler divides the data among all processes, as for ddp; samples would be left out.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    samplers = getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None)
    divides: Any = next(filter(_divides, samplers), None)
    if divides is not None and divides.num_replicas == world_size != readers:
        raise ConfigurationError(
            f"{type(divides).__name__} divides the data among all {world_size} processes, as for ddp; here only "
            f"{readers} of these parts would be read, since the processes of a group work on the same batch, and all "
            "other samples would be left out. Remove the sampler: training data are divided among the groups of "
            "processes, and in evaluation each group reads all"
        )


def check_equal_lengths(dataloader: Any, cluster: Cluster, num_pipelines: int) -> None:
    """Check that a dataloader gives all groups the same number of iterations. Every process calls it.

    Raises:
        ConfigurationError: the numbers differ, so that a group would wait for the others at the end of the epoch.
    """
    if cluster.stage_map.num_groups == 1:
        return
    told = cluster.world.exchange_objects(sized_len(dataloader))
    lengths = [told[ranks[0]] for ranks in cluster.stage_map.layout]
    iterations = {None if length is None else math.ceil(length / num_pipelines) for length in lengths}
    if len(iterations) > 1:
        found = ", ".join("unknown" if length is None else str(length) for length in lengths)
        raise ConfigurationError(
            f"the groups have dataloaders of {found} batches; all groups must run the same number of iterations, of "
            f"{num_pipelines} batches each. Give them parts of the same size, or leave it to "
            "use_distributed_sampler=True"
        )
