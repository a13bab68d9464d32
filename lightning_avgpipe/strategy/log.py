"""The log: what micro-batches log becomes what the batch would log, and all ranks know it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_avgpipe.capture.snapshot import unchanged
from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.engine.recompute import is_repeating
from lightning_avgpipe.errors import AbsentValueError, AvgPipeError
from lightning_avgpipe.strategy.metric_objects import BatchValues
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import nothing, replaced


def _name(args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs.get("name")


def looking_on(function: Callable[..., Any], rehearsed: bool = True) -> Callable[..., Any]:
    """A function that looks at values: within a step it runs where they are, once for a micro-batch.

    Args:
        rehearsed: whether it runs also when a step is followed or timed, before it runs for good.
    """

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> None:
        tracer = StepTracer.current()
        if tracer is None:
            function(*args, **kwargs)
        else:
            tracer.observe(nothing if tracer.rehearses and not rehearsed else function, args, kwargs)

    return observed


class StepLog:
    """Takes the place of ``LightningModule.log``: within a step it collects, and issues each name once per batch.

    A mean is weighted by the sizes of the micro-batches, so the number is the one that the whole batch would have
    logged; with parallel pipelines, that of all their batches together, also of other groups. On processes without the
    last stage nothing is logged; their ``self.log`` does nothing.

    Args:
        module: whose ``log`` it is.
        leaders: where the last stages of the groups are; None where this process has none.
        replicas: that share the micro-batches of the last stage in training, as of when it is called, and None where
            this process is none of them; the first of them logs what all of them collect.

    Attributes:
        listener: is told each name and value that a step logs for its batch.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        leaders: Collectives | None,
        replicas: Callable[[], Collectives | None] = lambda: None,
    ) -> None:
        self.batch_values = BatchValues()
        self._leaders = leaders
        self._module = module
        self._log = module.log  # which the user's class may have overridden
        self._replicas = replicas
        self._now: _MicroBatch | None = None
        self._collected: list[_Entry] = []
        self._coming: Callable[[], list[_Entry]] | None = None  # with those of other groups
        self.listener: Callable[[str, Any], None] | None = None
        self._alike: set[str] = set()  # names logged with batch_size=1, the wish that all batches count alike

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        tracer = StepTracer.current()
        recomputed = torch._C._current_graph_task_id() != -1  # a checkpointed forward, in the midst of a backward
        if recomputed or (tracer is None and is_repeating()):  # has logged before
            return
        if self._now is None:  # in a hook
            if self._leaders is not None and self._log is not nothing:
                if any(tensor.is_meta for tensor in tree.tensors((args, kwargs))):
                    raise AbsentValueError(
                        f"self.log({_name(args, kwargs)!r}) in a hook is given a value without a number, which was "
                        "computed with weights of other stages; leave out those with is_meta, or log it in the step"
                    )
                self._log(*args, **kwargs)
            return
        if tracer is not None:
            tracer.observe(self._collect, args, kwargs)
        elif self._leaders is not None or self._replicas() is not None:
            self._collect(*args, **kwargs)
        else:
            raise AvgPipeError(
                f"self.log({_name(args, kwargs)!r}) is called inside a submodule that runs on "
                "another stage than the loss; return the value and log it in the step"
            )

    @property
    def in_step(self) -> bool:
        """Whether a step runs now, of a micro-batch, and no hook."""
        return self._now is not None

    @contextlib.contextmanager
    def micro_batch(
        self,
        size: int,
        position: tuple[int, int] = (0, 0),
        weight: float | None = None,
        into: list[Any] | None = None,
    ) -> Iterator[None]:
        """Within this context logged values belong to a micro-batch.

        Args:
            size: samples.
            position: pipeline and micro-batch. Values are put in this order, whenever they come.
            weight: what it counts in a mean; None: as many samples, or the ``batch_size`` that the step gives.
            into: what collects, for :meth:`issue_collected`; None: the batch that has begun.
        """
        self._now = _MicroBatch(size, position, weight, self._collected if into is None else into)
        try:
            yield
        finally:
            self._now = None

    def muted(self) -> AbstractContextManager[None]:
        """Within this context hooks log nothing: they have logged the same before."""
        return replaced(self, "_log", nothing)

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Within this context nothing is logged; after it nothing is known of what was collected."""
        with unchanged(self.batch_values), unchanged(self), self.muted():
            yield

    def begin(self, num_microbatches: int) -> None:
        """A batch begins, or one for each pipeline: forget what was collected."""
        self._collected, self._coming = [], None
        self.batch_values.begin(num_microbatches)

    def issue_collected(self, entries: list[Any]) -> None:
        """Log what micro-batches of a batch have collected elsewhere, once per name."""
        self._collected = entries
        self.tell_groups()
        self.issue()

    def tell_groups(self) -> None:
        """Groups tell each other what they have collected, meanwhile; :meth:`issue` waits for it."""
        if (replicas := self._replicas()) is not None:
            self._collected = self._of_replicas(replicas)
        if self._leaders is not None and self._leaders.world_size > 1:
            self._coming = self._of_all_groups(self._leaders)

    def issue(self) -> None:
        """Log what was collected, once per name."""
        if self._coming is not None:
            self._collected, self._coming = self._coming(), None
        entries: dict[str, list[_Entry]] = {}
        for entry in sorted(self._collected, key=lambda entry: entry.position):
            entries.setdefault(entry.name, []).append(entry)
        self._collected = []
        for name, logged in entries.items():
            if any(entry.given == 1 < entry.size for entry in logged):
                self._alike.add(name)
            last, results = logged[-1], self._module.trainer._results
            assert results is not None
            for entry in logged:
                if entry.options != last.options:  # Lightning refuses the second one, with an explanation
                    results.log(entry.fx, name, entry.value, **entry.options, batch_size=1)
            value, batch_size = self._merged(logged, name in self._alike)
            if self.listener is not None:
                self.listener(name, value)
            results.log(last.fx, name, value, **last.options, batch_size=batch_size)

    def _of_replicas(self, replicas: Collectives) -> list[_Entry]:
        """On the first replica of the last stage what all of them have collected; nothing on the others."""
        updated = [path for path, m in self._module.named_modules() if isinstance(m, Metric) and m.update_called]
        metrics = updated if replicas.rank else []  # which have no part in evaluation
        if metrics or any(entry.metric is not None or isinstance(entry.value, Metric) for entry in self._collected):
            raise AvgPipeError(
                f"{type(self._module).__name__} has metric objects that training updates"
                + (f" ({', '.join(metrics)})" if metrics else "")
                + f", but the last stage has {replicas.world_size} replicas, and each sees a part of the data: log "
                "numbers instead, or let the last stage have one replica"
            )
        options = {entry.name: entry.options for entry in self._collected}
        found = replicas.gather_objects([_portable(entry) for entry in self._collected])
        if replicas.rank:
            return []
        known = [replace(e, options=options.get(e.name, e.options)) for entries in found for e in entries]
        return [replace(e, value=self._placed(e.value)) for e in known]

    def _placed(self, value: Any) -> Any:
        return value.to(self._module.device) if isinstance(value, Tensor) else value

    def _of_all_groups(self, leaders: Collectives) -> Callable[[], list[_Entry]]:
        """Gives own entries and those of other groups, as far as they travel: metric objects stay where they are."""
        options = {entry.name: entry.options for entry in self._collected}
        found = [entry for entry in self._collected if isinstance(entry.value, Metric)]
        numbers = [entry for entry in self._collected if not isinstance(entry.value, Metric)]
        of_metrics: dict[str, list[_Entry]] = {}
        for entry in numbers:
            if entry.metric is not None:
                of_metrics.setdefault(entry.name, []).append(entry)
        numbers = [entry for entry in numbers if entry.name not in of_metrics]
        for logged in of_metrics.values():  # of this group's batches together; then the mean over groups
            value, size = self._merged(logged, False)
            numbers.append(replace(logged[-1], value=value, size=size, given=size, metric=None, weight=None))
        reduce = self._module.trainer.strategy.reduce
        arriving = leaders.begin_exchange([_portable(entry) for entry in numbers])

        def arrived() -> list[_Entry]:
            others = (entry for group in arriving() for entry in group)
            known = ((e, options.get(e.name, {**e.options, "sync_dist_fn": reduce})) for e in others)
            return [*found, *(replace(entry, options=chosen) for entry, chosen in known)]

        return arrived

    def _merged(self, logged: list[_Entry], alike: bool) -> tuple[Any, int]:
        last = logged[-1]
        sizes = [entry.size if alike or entry.given is None else entry.given for entry in logged]
        batch_size = 1 if alike else sum(sizes)
        if isinstance(last.value, Metric):
            of_batch = self.batch_values.of(last.value)
            if of_batch is not None:
                last.value._forward_cache = of_batch
        elif last.metric is not None and len(logged) > 1:
            return self.batch_values.of(last.metric), batch_size
        weights = [size if e.weight is None else e.weight for e, size in zip(logged, sizes, strict=True)]
        counting = [(entry.value, weight) for entry, weight in zip(logged, weights, strict=True) if weight]
        values, weights = map(list, zip(*counting, strict=True)) if counting else ([last.value], [1.0])
        return _reduce(values, weights, last.options.get("reduce_fx", "mean")), batch_size

    def _collect(self, *args: Any, **kwargs: Any) -> None:
        """Run ``log``, Lightning's or the user's, as far as to where its values would be stored."""
        results = self._module.trainer._results
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        metric = next(((v, m) for v in given if (m := self.batch_values.metric_of(v)) is not None), None)
        with (
            contextlib.nullcontext()
            if results is None
            else replaced(results, "log", functools.partial(self._take, metric))
        ):
            self._log(*args, **kwargs)

    def _take(self, returned: tuple[Tensor, Metric] | None, fx: str, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, Tensor) and not options.get("enable_graph", False):
            value = value.detach()
        given = options.pop("batch_size", None)
        # an override may log something else than the metric's value
        metric = returned[1] if returned is not None and _same_number(returned[0], value) else None
        now = self._now
        assert now is not None
        now.into.append(_Entry(fx, name, now.position, value, now.size, given, options, metric, now.weight))


@dataclass(frozen=True)
class _MicroBatch:
    """What logs now; see :meth:`StepLog.micro_batch`."""

    size: int
    position: tuple[int, int]
    weight: float | None
    into: list[Any]


@dataclass(frozen=True)
class _Entry:
    """What one micro-batch logs under one name.

    Attributes:
        fx: the step function.
        name: what it is logged as.
        position: pipeline and micro-batch.
        value: a number, a tensor or a metric object.
        size: samples of the micro-batch.
        given: the ``batch_size`` that the step gave, if it did.
        options: the other arguments of Lightning's store of values.
        metric: the metric object whose ``forward`` returned the value.
        weight: of the micro-batch in a mean; None: ``given`` or ``size``.
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


def _portable(entry: _Entry) -> _Entry:
    """For other groups: values on the host, and only options that can travel."""
    value = entry.value.detach().cpu() if isinstance(entry.value, Tensor) else entry.value
    options = {name: given for name, given in entry.options.items() if isinstance(given, (bool, int, str))}
    return replace(entry, value=value, options=options, metric=None)


def _same_number(returned: Tensor, logged: Any) -> bool:
    if not isinstance(logged, Tensor) or returned.numel() != logged.numel():
        return False
    return torch.allclose(returned.detach().reshape(-1), logged.detach().to(returned).reshape(-1), equal_nan=True)


def _reduce(values: list[Any], sizes: list[float], reduce_fx: Any) -> Any:
    """One value for the values of the micro-batches; what is no number (a metric object) keeps its own state."""
    if len(values) == 1 or not all(isinstance(value, (Tensor, int, float)) for value in values):
        return values[-1]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if reduce_fx in ("mean", "avg") or reduce_fx is torch.mean:
        weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        shape = (-1, *([1] * (stacked.ndim - 1)))
        floating = stacked if stacked.is_floating_point() else stacked.float()
        there = weights.to(floating.device, floating.dtype, non_blocking=True)
        return (floating * there.view(shape)).sum(0)
    if isinstance(reduce_fx, str):
        reduce_fx = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[reduce_fx.lower()]
        return reduce_fx(stacked, dim=0)
    return reduce_fx(stacked)
