"""Metric objects (torchmetrics): the process that updates them, and their value for a batch that was split."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.engine.recompute import is_repeating
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import Replacement
from lightning_avgpipe.utils.source import source_line


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return the metric objects among the submodules of a module."""
    return [m for m in module.modules() if isinstance(m, Metric)]


class BatchValues:
    """The values that ``forward`` of the metric objects would have returned for the whole batch.

    A step calls a metric object with micro-batches, so it returns their values. A copy of the object is reset before
    each batch and updated with all of its micro-batches, so it computes the value of the batch. Objects with
    submodules, such as wrappers of other metrics, are not copied.

    Attributes:
        trained: whether a metric object has been updated in training.
        in_step: a metric object that the training step updates; None if none is known.
        why_refused: returns the reason why training steps may not update metric objects now; empty if they may.
    """

    def __init__(self) -> None:
        self.trained = False
        self.in_step: Metric | None = None
        self.why_refused: Callable[[], str] = lambda: ""
        self._copies: dict[int, Metric] = {}
        self._begun: set[int] = set()
        self._returned: list[tuple[Any, Metric]] = []
        self._split = False

    def begin(self, num_microbatches: int) -> None:
        """Begin a batch: forget what metric objects have returned."""
        self._split = num_microbatches > 1
        self._begun.clear()
        self._returned.clear()

    def add(self, metric: Metric, value: Any, args: Any, kwargs: Any) -> None:
        """Record that ``metric(*args, **kwargs)`` returned ``value`` for a micro-batch, and update its copy."""
        if not self._split or next(metric.children(), None) is not None:
            return
        if id(metric) not in self._copies:
            self._copies[id(metric)] = _empty_copy(metric)
        same = self._copies[id(metric)]
        if id(metric) not in self._begun:
            self._begun.add(id(metric))
            same.reset()
        same.update(*args, **kwargs)
        self._returned.append((value, metric))

    def seen_in_step(self, metric: Metric) -> None:
        """Record that the training step updates a metric object.

        Raises:
            ConfigurationError: training steps may not update metric objects now.
        """
        self.in_step = metric
        if why := self.why_refused():
            raise ConfigurationError(why)

    def metric_of(self, value: Any) -> Metric | None:
        """Return the metric object that returned this value, compared by identity, in this batch; None if none did."""
        return next((metric for returned, metric in self._returned if returned is value), None)

    def batch_value(self, metric: Metric) -> Any:
        """Return the value of the whole batch if ``metric`` was called in this batch; otherwise None."""
        return self._copies[id(metric)].compute() if id(metric) in self._begun else None


def _empty_copy(metric: Metric) -> Metric:
    attributes = vars(metric)
    held = {name: attributes[name] for name in (*metric._defaults, "_forward_cache", "_computed")}
    # deepcopy refuses tensors that are part of an autograd graph, as states may be
    attributes.update({name: [] if isinstance(value, list) else _detached(value) for name, value in held.items()})
    try:
        return copy.deepcopy(metric)
    finally:
        attributes.update(held)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else None


def local_metrics(
    metrics: list[Metric],
    values: BatchValues,
    leaders: Collectives,
    training: Callable[[], bool],
    in_step: Callable[[], bool] = lambda: False,
    elsewhere: Callable[[], bool] = lambda: False,
) -> Iterator[Replacement]:
    """Yield replacements with which metric objects are updated on the process of the last stage only.

    A call within a step only observes values: it runs once per micro-batch, on the process that has them. In training,
    ``compute`` synchronises the processes of all groups' last stages; in evaluation it does not communicate, since
    every group sees the same data. Both also hold for metric objects that are not submodules, such as those of
    callbacks, unless they were given another way to communicate.

    Args:
        metrics: metric objects of the module.
        values: records the values that the metric objects return.
        leaders: the processes of the groups' last stages.
        training: returns whether the trainer is training now.
        in_step: returns whether a step, and not a hook, is running now.
        elsewhere: returns whether a step is running now in a process whose metric objects no hook reads.
    """

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [other.to(tensor.device) for other in leaders.exchange_objects(tensor.detach().cpu())]

    def observed_call(metric: Metric, method: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            values.trained |= training()
            if training() and in_step():
                values.seen_in_step(metric)
            if (tracer := StepTracer.current()) is not None:
                return tracer.observe(method, args, kwargs)
            _check_place(elsewhere() and not StepTracer.in_dry_run())
            return method(*args, **kwargs)

        return observed

    def are_several() -> bool:
        return leaders.world_size > 1 and training()

    for metric in metrics:
        yield metric, "update", observed_call(metric, metric.update)
        yield metric, "forward", observed_call(metric, _noted(metric, metric.forward, values))
    yield Metric, "sync", _syncing(metrics, are_several, gather)


def _syncing(
    metrics: Sequence[Metric], are_several: Callable[[], bool], gather: Callable[..., list[Tensor]]
) -> Callable[..., None]:
    """Return a replacement for ``Metric.sync``; metric objects with a way to communicate of their own keep it.

    With torchmetrics' own ``sync``, a metric object in a plain list of the module would wait, in a hook of rank 0, for
    processes that do not call it. One of a callback, which runs on every process, would count each stage's data.
    """
    sync = Metric.sync
    replaced_ways = [jit_distributed_available, *(metric.distributed_available_fn for metric in metrics)]
    replaced_gathers = [None, *(metric.dist_sync_fn for metric in metrics)]

    @functools.wraps(sync)
    def synced(
        self: Metric, dist_sync_fn: Any = None, process_group: Any = None, should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:  # fmt: skip
        if distributed_available is None and self.distributed_available_fn in replaced_ways:
            distributed_available = are_several
            dist_sync_fn = gather if dist_sync_fn in replaced_gathers else dist_sync_fn
        sync(self, dist_sync_fn, process_group, should_sync, distributed_available)

    return synced


def set_device(module: nn.Module, device: torch.device) -> None:
    """Set the device that modules report as ``self.device``, and move the states of metric objects to it.

    Parameters and buffers stay where they are.

    Raises:
        ConfigurationError: the states of a metric object are on the meta device.
    """
    for name, one in module.named_modules():
        if isinstance(one, Metric):
            if any(isinstance(state, Tensor) and state.is_meta for state in one._defaults.values()):
                raise ConfigurationError(
                    f"the metric object '{name}' was built without contents (init_module(empty_init=True), or "
                    "torch.device('meta')), so its initial values are unknown; make it in setup() of the module, or "
                    "build the module with contents"
                )
            kept = {id(tensor) for p in one.parameters() for tensor in (p, p.grad)} | set(map(id, one.buffers()))
            one._apply(lambda state, kept=kept: state if id(state) in kept else state.to(device))
        elif isinstance(one, pl.LightningModule):
            one._device = device


def _check_place(is_elsewhere: bool) -> None:
    """Check that a metric is called in a process whose hooks read it, and not for a second time by recompute."""
    if is_elsewhere:
        raise AvgPipeError(
            f"a metric is called at {source_line()} inside a submodule that runs on another stage than the loss, "
            "where no hook would see what it has counted; return the value and call the metric in the step"
        )
    if is_repeating():
        raise AvgPipeError(
            "a metric is called inside a submodule that is executed once more before its backward (recompute), "
            "which would count twice; call it in the step, or do without recompute"
        )


def _noted(metric: Metric, forward: Callable[..., Any], values: BatchValues) -> Callable[..., Any]:
    def note(*args: Any, **kwargs: Any) -> Any:
        value = forward(*args, **kwargs)
        values.add(metric, value, args, kwargs)
        return value

    note.__name__ = type(metric).__name__  # for error messages
    return note
