"""Metric objects of a module: where they work, and their value for a batch that they see in micro-batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from lightning_avgpipe.utils.patching import Replacement, all_replaced
from lightning_avgpipe.utils.source import source_line


def metrics_of(module: nn.Module) -> list[Metric]:
    """Return the metric objects among the submodules of a module."""
    return [m for m in module.modules() if isinstance(m, Metric)]


class BatchValues:
    """The values that metric objects' ``forward`` would have returned for the whole batch.

    A metric object sees micro-batches, and returns values for those. A copy of the object, reset before each batch,
    sees all of the batch. (An object with submodules, such as a wrapper of another metric, has no copy.)

    Attributes:
        trained: whether metric objects have been updated in training.
        in_step: a metric object that the training step updates; None: none is known.
        refuses: returns why no training step may update metric objects now; empty: it may.
    """

    def __init__(self) -> None:
        self.trained = False
        self.in_step: Metric | None = None
        self.refuses: Callable[[], str] = lambda: ""
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
        """Note that ``metric(*args, **kwargs)`` has returned ``value`` for a micro-batch, and update the copy."""
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
        """Note that the training step updates a metric object.

        Raises:
            ConfigurationError: that is refused.
        """
        self.in_step = metric
        if why := self.refuses():
            raise ConfigurationError(why)

    def metric_of(self, value: Any) -> Metric | None:
        """Return the metric object that returned this very value in this batch; None if none did."""
        return next((metric for returned, metric in self._returned if returned is value), None)

    def of(self, metric: Metric) -> Any:
        """Return the batch's value if ``metric`` was called in this batch; None if not."""
        return self._copies[id(metric)].compute() if id(metric) in self._begun else None


def _empty_copy(metric: Metric) -> Metric:
    attributes = vars(metric)
    held = {name: attributes[name] for name in (*metric._defaults, "_forward_cache", "_computed")}
    # states may be part of an autograd graph, which cannot be copied
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
) -> AbstractContextManager[None]:
    """Return a context within which metric objects work on the process of the last stage.

    They communicate only with the processes of other groups' last stages, to compute what all groups have seen in
    training; in evaluation every group sees the same data. So do those of callbacks, and others that are no submodules,
    unless they have a way of their own. Within a step those of the module only look at values, wherever they are
    called.

    Args:
        metrics: metric objects of the module.
        values: told of the values that they return.
        leaders: the processes of the groups' last stages.
        training: returns whether the trainer trains now.
        in_step: returns whether a step runs now, and no hook.
        elsewhere: returns whether a step runs now, in a process where no hook sees the metric objects.
    """

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [other.to(tensor.device) for other in leaders.exchange_objects(tensor.detach().cpu())]

    def looking_on(metric: Metric, method: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            values.trained |= training()
            if training() and in_step():
                values.seen_in_step(metric)
            if (tracer := StepTracer.current()) is not None:
                return tracer.observe(method, args, kwargs)
            _check_place(elsewhere() and not StepTracer.is_rehearsing())
            return method(*args, **kwargs)

        return observed

    def are_several() -> bool:
        return leaders.world_size > 1 and training()

    replacements: list[Replacement] = []
    for metric in metrics:
        replacements.append((metric, "update", looking_on(metric, metric.update)))
        replacements.append((metric, "forward", looking_on(metric, _noted(metric, metric.forward, values))))
    replacements.append((Metric, "sync", _syncing(metrics, are_several, gather)))
    return all_replaced(replacements)


def _syncing(
    metrics: Sequence[Metric], are_several: Callable[[], bool], gather: Callable[..., list[Tensor]]
) -> Callable[..., None]:
    """Return a method in the place of ``Metric.sync``, for metric objects of the module and others without own ways.

    Without it, one in a list of the module would wait in a hook of rank 0 for processes that do not come. One of a
    callback, which runs on every process, would count what each stage has seen.
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


def tell_device(module: nn.Module, device: torch.device) -> None:
    """Set the device that modules report as ``self.device``, and move the states of metric objects there.

    Parameters and buffers stay where they are.

    Raises:
        ConfigurationError: a metric object has states without contents.
    """
    for name, one in module.named_modules():
        states = one._defaults.values() if isinstance(one, Metric) else ()
        if any(isinstance(state, Tensor) and state.is_meta for state in states):
            raise ConfigurationError(
                f"the metric object '{name}' was built without contents (init_module(empty_init=True), or "
                "torch.device('meta')), so its initial values are unknown; make it in setup() of the module, or build "
                "the module with contents"
            )
    for one in module.modules():
        if isinstance(one, Metric):
            kept = {id(tensor) for p in one.parameters() for tensor in (p, p.grad)} | set(map(id, one.buffers()))
            one._apply(lambda state, kept=kept: state if id(state) in kept else state.to(device))
        elif isinstance(one, pl.LightningModule):
            one._device = device


def _check_place(is_elsewhere: bool) -> None:
    """Check that a metric is called where hooks see what it counts, and once."""
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

    note.__name__ = type(metric).__name__  # as messages call it
    return note
