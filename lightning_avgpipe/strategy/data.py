"""Dataloaders of a pipeline: one process reads, the others get what they need of each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, default_collate

from lightning_avgpipe.capture.batch_use import leaf_names
from lightning_avgpipe.comm.batch_stream import BatchStream, Needs, Passed
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.sample_layout import Expected
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.torch_compat import version_of

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class _End:
    """Takes the place of a batch after the last one."""


class _Later:
    """Takes the place of a batch that travels after its transfer hooks."""


def has_transfer_hooks(trainer: pl.Trainer) -> bool:
    """Whether the user's code changes batches on their way to the device."""
    owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    return any(is_overridden(hook, owner) for owner in owners if owner is not None for hook in _TRANSFER_HOOKS)


def batches_wanted(trainer: pl.Trainer, dataloader: Any) -> float:
    """How many batches the loop that runs now takes of a dataloader, which may have more."""
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    if combined is None or combined.limits is None:
        return float("inf")
    limits = zip(combined.flattened, combined.limits, strict=True)
    return next((limit for one, limit in limits if one is dataloader), float("inf"))


class Distributor:
    """How batches of one run of the trainer come to the processes that do not read.

    Args:
        batch_stream: to or from the other processes.
        needs: which tensors each process gets.
        sends: whether this process reads for others.
        early: whether batches travel when they are read, one ahead of the work; else after the user's transfer hooks.
        wanted: dataloader -> how many of its batches the loop takes.
    """

    def __init__(
        self, batch_stream: BatchStream, needs: Needs, sends: bool, early: bool, wanted: Callable[[Any], float]
    ) -> None:
        self.batch_stream = batch_stream
        self.needs = needs
        self.early = early
        self.wanted = wanted
        self._sends = sends
        self._stream = batch_stream.begin()
        self._sealed: list[list[tuple[Tensor, int]]] = []  # by pipeline

    def pass_on(self, batch: Any) -> Any:
        """The reader's batch, after its transfer hooks."""
        return self.batch_stream.accept(self.batch_stream.pass_on(self._stream, batch, self.needs))

    def seal(self, batch: Any, pipeline: int = 0) -> Any:
        """From now on this batch must not change: it may be under way to other processes."""
        if self._sends:
            del self._sealed[pipeline:]
            self._sealed.append([(t, version_of(t)) for t in tree.tensors(batch) if not t.is_inference()])
        return batch

    def check_seal(self, batch: Any, pipeline: int = 0) -> None:
        """Raise if the batch is not the one that was sent.

        Raises:
            ConfigurationError: names the tensors that changed.
        """
        if pipeline >= len(self._sealed) or not self._sealed[pipeline]:
            return
        sealed, self._sealed[pipeline] = self._sealed[pipeline], []
        now = [tensor for tensor in tree.tensors(batch) if not tensor.is_inference()]
        same = len(now) == len(sealed) and all(t is old for t, (old, _) in zip(now, sealed, strict=True))
        changed = [name for name, (t, v) in zip(leaf_names(batch), sealed, strict=False) if version_of(t) != v]
        if not same or changed:
            raise ConfigurationError(
                f"a hook changed {', '.join(changed) or 'tensors'} of the batch after it was sent to the other stages, "
                "which would go on with the old numbers; change batches in on_after_batch_transfer, which runs once, "
                "before they are sent"
            )


def expected_batches(dataloader: Any) -> Expected:
    """What a dataloader says of the sizes of its batches, here or on the process that reads."""
    told = getattr(dataloader, "expected_batches", None)
    if isinstance(told, Expected):
        return told
    sampler = getattr(dataloader, "batch_sampler", None)
    sampler = vars(sampler).get("_batch_sampler", sampler) if hasattr(sampler, "__dict__") else sampler  # Lightning's
    if not isinstance(dataloader, DataLoader) or type(sampler) is not BatchSampler:
        return Expected()  # one of the user's own may make batches of any size
    return Expected(sampler.batch_size, dataloader.collate_fn is default_collate)


def expected_now(trainer: pl.Trainer, dataloader_idx: int, changed: bool) -> Expected:
    """What is expected of the batch that the loop that runs now works on.

    Args:
        dataloader_idx: of the dataloader that it came from, where they come one after the other.
        changed: whether hooks may have changed batches since the dataloader made them.
    """
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    loaders = [] if combined is None else combined.flattened
    if combined is not None and combined._mode == "sequential":
        loaders = loaders[dataloader_idx : dataloader_idx + 1]
    told = {expected_batches(loader) for loader in loaders}
    expected = told.pop() if len(told) == 1 else Expected()
    return replace(expected, changed=changed)


def mirror(dataloader: Any, cluster: Cluster, distributor: Callable[[], Distributor]) -> Any:
    """What a process iterates over in place of its dataloader.

    Random order, collation and augmentation happen once, so inputs and labels agree on all stages, and an iterable
    dataset may end where it wants.
    """
    if cluster.group.world_size == 1:
        return dataloader
    try:
        length: int | None = len(dataloader)
    except (TypeError, NotImplementedError):  # an iterable dataset without a length
        length = None
    facts = length, isinstance(dataloader, _Stateful), expected_batches(dataloader)
    length, resumable, expected = cluster.group.broadcast(facts, cluster.stage_map.reader)
    if resumable and cluster.stage_map.reader != 0:
        raise ConfigurationError(
            f"reader='first' with a {type(dataloader).__name__} that saves its state: checkpoints are saved by rank 0, "
            "which would not know it; use reader='last'"
        )
    if cluster.reads:
        mirrored = _SizedReader(dataloader, distributor) if length is not None else _Reader(dataloader, distributor)
        vars(mirrored).update(expected_batches=expected)
        if resumable:
            # as attributes of its own: Python 3.12 does not ask __getattr__ whether an object follows a protocol
            vars(mirrored).update(state_dict=dataloader.state_dict, load_state_dict=dataloader.load_state_dict)
        return mirrored
    follower = _SizedFollower(distributor, length) if length is not None else _Follower(distributor)
    vars(follower).update(expected_batches=expected)
    if resumable:  # Lightning compares the number of such loaders with that in the checkpoint, on every rank
        vars(follower).update(state_dict=dict, load_state_dict=_ignore)
    return follower


def _ignore(state: Any) -> None:
    """What rank 0's loader resumes from means nothing to those who follow it."""


class _Reader:
    """The reader's dataloader; passes each batch on, and the end. Everything else is the dataloader's."""

    def __init__(self, dataloader: Any, distributor: Callable[[], Distributor]) -> None:
        vars(self).update(_dataloader=dataloader, _distributor=distributor, _stream=None)

    def __iter__(self) -> Iterator[Any]:
        # made at once, as on one device: that alone starts workers and draws random numbers
        return self._passed_on(iter(self._dataloader))

    def _passed_on(self, batches: Iterator[Any]) -> Iterator[Any]:
        distributor: Distributor = vars(self)["_distributor"]()
        stream = vars(self)["_stream"] = distributor.batch_stream.begin(vars(self)["_stream"])

        def pass_on(batch: Any) -> tuple[Any, Passed]:
            if batch is _End or not distributor.early:
                return batch, distributor.batch_stream.pass_on(stream, _End if batch is _End else _Later)
            return batch, distributor.batch_stream.pass_on(stream, batch, distributor.needs)

        # a dataloader that can be saved must not be ahead of the training when that happens
        ahead = distributor.early and not hasattr(self._dataloader, "state_dict")
        # nor read what nobody wants: that would draw random numbers which one device does not draw
        limit = distributor.wanted(self) if ahead else 0
        batch, passed = pass_on(next(batches, _End))
        for number in itertools.count(1):
            if batch is _End:
                break
            following = pass_on(next(batches, _End)) if number < limit else None
            distributor.batch_stream.accept(passed)
            yield batch
            batch, passed = following or pass_on(next(batches, _End))
        distributor.batch_stream.accept(passed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_dataloader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataloader, name, value)


class _SizedReader(_Reader):
    def __len__(self) -> int:
        return len(self._dataloader)


def beneath(mirrored: Any) -> Any:
    """The dataloader that :func:`mirror` has put something in the place of, on the process that reads."""
    return vars(mirrored)["_dataloader"] if isinstance(mirrored, _Reader) else mirrored


class _Follower:
    """What other processes iterate over: the reader's batches as far as they need them, or None for each of them."""

    def __init__(self, distributor: Callable[[], Distributor]) -> None:
        self._distributor = distributor
        self._stream: int | None = None

    def __iter__(self) -> Iterator[Any]:
        distributor = self._distributor()
        stream = self._stream = distributor.batch_stream.begin(self._stream)
        while True:
            item = distributor.batch_stream.accept(distributor.batch_stream.pass_on(stream))
            if item is _End:
                return
            yield None if item is _Later else item


class _SizedFollower(_Follower):
    def __init__(self, distributor: Callable[[], Distributor], length: int) -> None:
        super().__init__(distributor)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def resize(self, length: int) -> None:
        """The reader has so many batches now."""
        self._length = length
