"""Logging: values of micro-batches are merged into the values of the whole batch, and every rank gets the metrics."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.engine.execution import stays_on_stream
from lightning_avgpipe.engine.recompute import is_repeating
from lightning_avgpipe.errors import AbsentValueError, AvgPipeError
from lightning_avgpipe.state.untouched import unchanged
from lightning_avgpipe.strategy.metric_objects import BatchValues
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.lightning import _LoggerConnector, pl
from lightning_avgpipe.utils.patching import noop, replaced
from lightning_avgpipe.utils.tensors import as_tensor, reduced, reduction_name


def _name(args: Any, kwargs: Any) -> Any:
    """Return the name that a call of ``log`` is given."""
    return args[0] if args else kwargs.get("name")


def observed_call(function: Callable[..., Any], rehearsed: bool = True) -> Callable[..., Any]:
    """Wrap a function that only reads values: in a step it runs on the process that has them, once per micro-batch.

    Args:
        function: the function, such as ``print``.
        rehearsed: whether it also runs while a step is captured or timed before training.
    """

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> None:
        tracer = StepTracer.current()
        if tracer is None:
            function(*args, **kwargs)
        else:
            tracer.observe(noop if tracer.is_dry_run and not rehearsed else function, args, kwargs)

    return observed


class StepLog:
    """Replaces ``LightningModule.log``: within a step it collects values, and then logs each call once per batch.

    A mean is weighted by the sizes of the micro-batches, so the logged value is the one that the whole batch would have
    logged; with parallel pipelines it is the mean over all their batches, in all groups. On processes without the last
    stage ``self.log`` does nothing.

    Args:
        module: module whose ``log`` is replaced.
        device: device of this process. ``module.device`` may be that of a weight which another process holds.
        leaders: the processes that have the groups' last stages; None if this process is not one of them.
        replicas: returns the replicas that now share the micro-batches of the last stage in training, None if this
            process is not one of them. The first replica logs what all of them collect.

    Attributes:
        batch_values: values of metric objects for the whole batch.
        listener: called with each name and value that a step logs for its batch; None: nothing listens.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        device: torch.device,
        leaders: Collectives | None,
        replicas: Callable[[], Collectives | None],
    ) -> None:
        self.batch_values = BatchValues()
        self._leaders = leaders
        self._module, self._device = module, device
        self._log = module.log
        self._is_overridden = getattr(module.log, "__func__", None) is not pl.LightningModule.log
        self._replicas = replicas
        self._now: _MicroBatch | None = None
        self._collected: list[_Entry] = []
        self._coming: Callable[[], list[_Entry]] | None = None  # waits for the entries of all groups
        self.listener: Callable[[str, Any], None] | None = None
        self._given: dict[tuple[str, str], _Given] = {}  # by function and name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        tracer = StepTracer.current()
        recomputed = torch._C._current_graph_task_id() != -1  # whether a backward runs a checkpointed forward again
        if recomputed or (tracer is None and is_repeating()):  # this forward has logged already
            return
        if self._now is None:  # in a hook
            if self._leaders is not None and self._log is not noop:
                if any(tensor.is_meta for tensor in tree.tensors((args, kwargs))):
                    raise AbsentValueError(
                        f"self.log({_name(args, kwargs)!r}) in a hook is given a value without a number, which was "
                        "computed with weights of other stages; leave out values with is_meta, or log it in the step"
                    )
                self._log_in_hook(self._leaders, *args, **kwargs)
            return
        if tracer is not None:
            shared = self._is_overridden or any(isinstance(value, Metric) for value in (*args, *kwargs.values()))
            tracer.observe(self._collect if shared else self._collect_value, args, kwargs)
        elif self._leaders is not None or self._replicas() is not None:
            self._collect(*args, **kwargs)
        else:
            raise AvgPipeError(
                f"self.log({_name(args, kwargs)!r}) is called inside a submodule that runs on "
                "another stage than the loss; return the value and log it in the step"
            )

    def _log_in_hook(self, leaders: Collectives, *args: Any, **kwargs: Any) -> None:
        """Log with Lightning's method or the user's override; with ``sync_dist=True`` reduce over all groups at once.

        Lightning would reduce when the value is read, which not all groups do at the same time.
        """
        trainer = self._module.trainer
        results, strategy = trainer._results, trainer.strategy
        if results is None or leaders.world_size == 1:
            self._log(*args, **kwargs)
            return
        store = results.log

        def reduce(fx: str, name: str, value: Any, *, sync_dist: bool = False, **options: Any) -> None:
            if sync_dist and not options.get("rank_zero_only"):
                value = strategy.reduce(value, options.get("sync_dist_group"), options.get("reduce_fx", "mean"))
            store(fx, name, value, **options)

        with replaced(results, "log", reduce), replaced(strategy, "is_distributed", True):
            self._log(*args, **kwargs)

    def in_step(self) -> bool:
        """Return whether a step now runs on a micro-batch (and not a hook)."""
        return self._now is not None

    def lacks_results(self) -> bool:
        """Return whether a step now runs in a process that does not have its results."""
        return self._now is not None and self._leaders is None and self._replicas() is None

    @contextlib.contextmanager
    def micro_batch(
        self,
        size: int,
        position: tuple[int, int],
        weight: float | None,
        into: list[Any] | None,
    ) -> Iterator[None]:
        """Within this context logged values belong to a micro-batch.

        Args:
            size: number of samples.
            position: numbers of the pipeline and the micro-batch, by which values are sorted.
            weight: weight in a mean; None: the number of samples, or the ``batch_size`` that the step gives.
            into: list that collects the values, for :meth:`flush_collected`; None: that of the batch begun last.
        """
        self._now = _MicroBatch(size, position, weight, self._collected if into is None else into)
        try:
            yield
        finally:
            self._now = None

    def muted(self) -> AbstractContextManager[None]:
        """Return a context within which hooks log nothing, since they have logged for pipeline 0 already."""
        return replaced(self, "_log", noop)

    @contextlib.contextmanager
    def discarding_logs(self) -> Iterator[None]:
        """Within this context nothing is logged; at its end the collected values are restored."""
        with unchanged(self.batch_values), unchanged(self), self.muted():
            yield

    def begin(self, num_microbatches: int) -> None:
        """Begin a batch, or one batch for each pipeline: discard the values collected before."""
        self._collected, self._coming = [], None
        self.batch_values.begin(num_microbatches)

    def flush_collected(self, entries: list[Any]) -> None:
        """Log the values that :meth:`micro_batch` has collected in a list; see :meth:`flush`."""
        self._collected = entries
        self.begin_exchange()
        self.flush()

    def begin_exchange(self) -> None:
        """Begin to exchange the collected values with other groups; :meth:`flush` waits for the end of the exchange."""
        if (replicas := self._replicas()) is not None:
            self._collected = self._of_replicas(replicas)
        if self._leaders is not None and self._leaders.world_size > 1:
            self._coming = self._of_all_groups(self._leaders)

    def flush(self) -> None:
        """Log the collected values: once for each call of ``log`` in the step, merged over all micro-batches."""
        if self._coming is not None:
            self._collected, self._coming = self._coming(), None
        calls, self._collected = _by_call(self._collected), []
        for logged in calls:
            name = logged[0].name
            given = self._given.setdefault((logged[0].fx, name), _Given())
            given.see(logged)
            last, results = logged[-1], self._module.trainer._results
            assert results is not None
            for entry in logged:
                if isinstance(entry.value, Tensor) and not entry.value.is_cpu:
                    port_of(entry.value.device).record_use(entry.value)  # it may have been made on a pipeline's stream
                if entry.options != last.options:  # then Lightning raises an error at the second one
                    results.log(entry.fx, name, entry.value, **entry.options, batch_size=1)
            value, batch_size = self._merged(logged, given)
            if self.listener is not None:
                self.listener(name, value)
            results.log(last.fx, name, value, **last.options, batch_size=batch_size)

    def _of_replicas(self, replicas: Collectives) -> list[_Entry]:
        """Return, on the first replica of the last stage, the entries of all replicas; nothing on the others."""
        updated = [path for path, m in self._module.named_modules() if isinstance(m, Metric) and m.update_called]
        metrics = updated if replicas.rank else []  # on the first replica evaluation may have updated them
        if metrics or any(entry.metric is not None or isinstance(entry.value, Metric) for entry in self._collected):
            raise AvgPipeError(
                f"{type(self._module).__name__} has metric objects that training updates"
                + (f" ({', '.join(metrics)})" if metrics else "")
                + f", but the last stage has {replicas.world_size} replicas, and each sees a part of the data: log "
                "numbers instead, or let the last stage have one replica"
            )
        options = {entry.name: entry.options for entry in self._collected}
        found = replicas.gather_objects([_portable(entry) for entry in self._collected])
        entries = [] if replicas.rank else [entry for those in found for entry in those]
        return [replace(e, options=options.get(e.name, e.options), value=self._placed(e.value)) for e in entries]

    def _placed(self, value: Any) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value

    def _of_all_groups(self, leaders: Collectives) -> Callable[[], list[_Entry]]:
        """Begin to exchange entries with the other groups; return a function that waits for the entries of all groups.

        Entries whose values are metric objects are not exchanged.
        """
        options = {entry.name: entry.options for entry in self._collected}
        found = [entry for entry in self._collected if isinstance(entry.value, Metric)]
        numbers = [entry for entry in self._collected if not isinstance(entry.value, Metric)]
        of_metrics = {entry.name for entry in numbers if entry.metric is not None}
        calls = _by_call([entry for entry in numbers if entry.metric is not None])
        numbers = [entry for entry in numbers if entry.name not in of_metrics]
        for logged in calls:  # values of metric objects are merged in this group first; then the mean over groups
            value, size = self._merged(logged, _Given())
            numbers.append(replace(logged[-1], value=value, size=size, given=size, metric=None, weight=None))
        reduce = self._module.trainer.strategy.reduce
        arriving = leaders.begin_exchange([_portable(entry) for entry in numbers])

        def arrived() -> list[_Entry]:
            others = [entry for group in arriving() for entry in group]
            return found + [
                replace(e, options=options.get(e.name, {**e.options, "sync_dist_fn": reduce})) for e in others
            ]

        return arrived

    def _merged(self, logged: list[_Entry], given: _Given) -> tuple[Any, int]:
        """Return the value of one call of ``log`` for the whole batch, and its ``batch_size`` for Lightning."""
        last = logged[-1]
        sizes = [entry.size if given.is_constant or entry.given is None else entry.given for entry in logged]
        batch_size = given.total if given.is_constant else sum(sizes)
        given.total = batch_size
        if isinstance(last.value, Metric):
            of_batch = self.batch_values.batch_value(last.value)
            if of_batch is not None:
                last.value._forward_cache = of_batch
        elif last.metric is not None and len(logged) > 1:
            return self.batch_values.batch_value(last.metric), batch_size
        weights = [size if e.weight is None else e.weight for e, size in zip(logged, sizes, strict=True)]
        counting = [(entry.value, weight) for entry, weight in zip(logged, weights, strict=True) if weight]
        values, weights = map(list, zip(*counting, strict=True)) if counting else ([last.value], [1.0])
        if len({value.device for value in values if isinstance(value, Tensor)}) > 1:  # some were logged as numbers
            values = list(map(self._placed, values))
        return self._placed(_reduce(values, weights, last.options.get("reduce_fx", "mean"))), batch_size

    def _collect(self, *args: Any, **kwargs: Any) -> None:
        """Run ``log``, Lightning's or the user's, but collect its values instead of storing them."""
        module, results = self._module, self._module.trainer._results
        converts: Any = module._LightningModule__to_tensor
        converted: list[tuple[Tensor, Metric | None]] = []

        def to_tensor(value: Any, name: str) -> Tensor:
            number = value
            if not isinstance(value, Tensor):  # a copy to the device would make the host wait
                number = torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu")
            made: Tensor = converts(number, name)
            converted.append((made, self.batch_values.metric_of(value)))
            return made

        def take(fx: str, name: str, value: Any, **options: Any) -> None:
            # an override of log may log something other than the metric's value
            self._take(next((metric for made, metric in converted if made is value), None), fx, name, value, **options)

        with contextlib.ExitStack() as undo:
            if results is not None:
                undo.enter_context(replaced(results, "log", take))
            undo.enter_context(replaced(module, "_LightningModule__to_tensor", to_tensor))
            self._log(*args, **kwargs)

    @stays_on_stream
    def _collect_value(self, *args: Any, **kwargs: Any) -> None:
        """Collect a number; this changes nothing that pipelines share."""
        self._collect(*args, **kwargs)

    def _take(self, metric: Metric | None, fx: str, name: str, value: Any, **options: Any) -> None:
        """Store a logged value as an entry of the current micro-batch; see :class:`_Entry`."""
        if isinstance(value, Tensor) and not options.get("enable_graph", False):
            value = value.detach()
        given = options.pop("batch_size", None)
        now = self._now
        assert now is not None
        now.into.append(_Entry(fx, name, now.position, value, now.size, given, options, metric, now.weight))


@dataclass(frozen=True)
class _MicroBatch:
    """The micro-batch that logs now; see :meth:`StepLog.micro_batch`."""

    size: int
    position: tuple[int, int]
    weight: float | None
    into: list[Any]


class _Given:
    """Decides what the ``batch_size`` that a step gives for one name means: a count of something, or a constant.

    A constant is the same for micro-batches of different sizes, such as 1 or the dataloader's batch size, or equals the
    number of samples of the whole batch. Then micro-batches are weighted by their sizes, and Lightning is given the
    same number for every batch. Otherwise the number counts something in the micro-batch, and is summed up. As long as
    all micro-batches have had the same size, any other number than these is taken for a count.

    Attributes:
        is_constant: whether the number is a constant, so that all batches have equal weights.
        total: the ``batch_size`` that Lightning was given for the last batch, or is given for every batch if constant.
    """

    def __init__(self) -> None:
        self.is_constant = False
        self.total = 0
        self._numbers: set[int | None] = set()
        self._sizes: set[int] = set()
        self._is_whole = False

    def see(self, logged: list[_Entry]) -> None:
        """Take account of the entries of one call of ``log``, in the micro-batches of all pipelines."""
        if len(self._numbers) > 1:  # different numbers are counts
            return
        self._numbers.update(entry.given for entry in logged)
        self._sizes.update(entry.size for entry in logged)
        wholes: Counter[int] = Counter()
        for entry in logged:
            wholes[entry.position[0]] += entry.size
        self._is_whole |= self._numbers <= {*wholes.values(), wholes.total()} - self._sizes
        several = len(self._sizes) > 1 or (self._numbers == {1} and max(self._sizes) > 1)
        self.is_constant, number = False, logged[0].given
        if number is not None and len(self._numbers) == 1 and (several or self._is_whole):
            self.is_constant, self.total = True, self.total or number


@dataclass(frozen=True)
class _Entry:
    """A value that one micro-batch logs.

    Attributes:
        fx: name of the step function.
        name: name under which the value is logged.
        position: numbers of the pipeline and the micro-batch.
        value: a number, a tensor or a metric object.
        size: number of samples of the micro-batch.
        given: the ``batch_size`` that the step gave; None if it gave none.
        options: the other arguments with which Lightning would store the value.
        metric: the metric object whose ``forward`` returned the value; None if none did.
        weight: weight of the micro-batch in a mean; None: ``given`` or ``size``.
    """

    fx: str
    name: str
    position: tuple[int, int]
    value: Any
    size: int
    given: int | None
    options: dict[str, Any]
    metric: Metric | None
    weight: float | None


def _by_call(entries: list[_Entry]) -> list[list[_Entry]]:
    """Return the entries grouped by call of ``log``: the i-th of a name in each micro-batch belong together."""
    found: dict[tuple[str, int], list[_Entry]] = {}
    counts: Counter[tuple[str, tuple[int, int]]] = Counter()
    for entry in sorted(entries, key=lambda entry: entry.position):
        found.setdefault((entry.name, counts[entry.name, entry.position]), []).append(entry)
        counts[entry.name, entry.position] += 1
    return list(found.values())


def _portable(entry: _Entry) -> _Entry:
    """Return an entry that can be sent to other processes: with its value on the host, and only simple options."""
    value = entry.value.detach().cpu() if isinstance(entry.value, Tensor) else entry.value
    options = {name: given for name, given in entry.options.items() if isinstance(given, (bool, int, str))}
    return replace(entry, value=value, options=options, metric=None)


def _reduce(values: list[Any], sizes: list[float], reduce_fx: Any) -> Any:
    """Reduce the values of the micro-batches to one; of metric objects, which keep their own state, return the last."""
    if len(values) == 1 or not all(isinstance(value, (Tensor, int, float)) for value in values):
        return values[-1]
    stacked, name = torch.stack([as_tensor(value) for value in values]), reduction_name(reduce_fx)
    if stacked.is_floating_point() and stacked.element_size() < 4:  # Lightning's sums have at least single precision
        stacked = stacked.float()
    if name == "mean":
        weights = torch.tensor(sizes, dtype=torch.float64, device="cpu") / sum(sizes)
        shape = (-1, *([1] * (stacked.ndim - 1)))
        floating = stacked if stacked.is_floating_point() else stacked.float()
        there = weights.to(floating.device, floating.dtype, non_blocking=True)
        return (floating * there.view(shape)).sum(0)
    result = reduced(stacked, name)
    return values[-1] if result is None else result  # Lightning raises an error for an unknown reduction


# -- metrics on all ranks ----------------------------------------------------------------------------------------------


class SyncedLoggerConnector(_LoggerConnector):
    """A logger connector that gives every rank the metrics of rank 0, which has the loss.

    Callbacks depend on metrics (early stopping, the best checkpoint, its file name), and must do the same on all ranks.

    Args:
        original: connector that this one replaces.
        cluster: the connected processes.
        callbacks_read_metrics: whether user callbacks, which may read metrics, run at the end of an epoch before
            Lightning's.
    """

    def __init__(self, original: _LoggerConnector, cluster: Cluster, callbacks_read_metrics: bool) -> None:
        super().__init__(original.trainer)
        vars(self).update(vars(original))
        self._callbacks_read_metrics = callbacks_read_metrics
        self._original = original
        self._cluster = cluster
        self._synced: dict[str, Any] = {"callback": {}, "log": {}, "pbar": {}}

    def detach(self) -> _LoggerConnector:
        """Return the original connector, with the state of this one."""
        state = {name: value for name, value in vars(self).items() if name in vars(self._original)}
        vars(self._original).update(state)
        return self._original

    def snapshot(self) -> Any:
        """Return the current metrics on rank 0 of each group; None on other ranks."""
        return super().metrics if self._cluster.rank == 0 else None

    def accept(self, metrics: Any) -> None:
        """Use the given metrics of rank 0 as the metrics of this process."""
        self._synced = metrics
        # on other ranks Lightning logs nothing, so it does not update these
        self._callback_metrics.update(metrics["callback"])
        self._logged_metrics.update(metrics["log"])

    def sync(self) -> None:
        """Send rank 0's current metrics and callback metrics to all ranks. Every rank calls it."""
        snapshot = self.snapshot()  # metric objects may communicate with those of other groups here
        (metrics, before), _ = self._cluster.control.relay((snapshot, dict(self.callback_metrics)))
        self.accept(metrics)
        self._callback_metrics.update(before)

    @property
    def metrics(self) -> Any:
        """The metrics of rank 0, on other ranks as of the last sync."""
        return super().metrics if self._cluster.world.rank == 0 else self._synced

    def update_eval_epoch_metrics(self) -> Any:
        """Sync the metrics. All ranks call it at the end of each validation dataloader, and of the validation."""
        if not self.trainer.sanity_checking:
            self.sync()
        return super().update_eval_epoch_metrics()

    def epoch_end_reached(self) -> None:
        """Sync the metrics if user callbacks run next that may read them. All ranks call it after the last batch."""
        super().epoch_end_reached()
        if self._callbacks_read_metrics:
            self.sync()

    def on_epoch_end(self) -> None:
        """Sync the metrics. All ranks call it at the end of every epoch."""
        self.sync()
        super().on_epoch_end()

    def reset_results(self) -> None:
        """Reset the metrics. All ranks call it when a loop begins."""
        super().reset_results()
        self._synced = {"callback": {}, "log": {}, "pbar": {}}
