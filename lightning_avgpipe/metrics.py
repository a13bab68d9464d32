"""Metrics: what micro-batches log becomes what the batch would log, and all ranks know it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from torchmetrics import Metric

from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.runtime.mesh import Mesh

__all__ = ["StepLog", "SyncedLoggerConnector", "local_metrics"]


class StepLog:
    """Takes the place of ``LightningModule.log``: within a step it collects, and issues each name once per batch.

    A mean is weighted by the sizes of the micro-batches, so the number is the one that the whole batch would have
    logged. On processes without the last stage nothing is logged; their ``self.log`` does nothing.
    """

    def __init__(self, module: pl.LightningModule, hosts_last: bool) -> None:
        self._log = module.log
        self._signature = inspect.signature(module.log)
        self._hosts_last = hosts_last
        self._size: int | None = None
        self._entries: dict[str, list[tuple[Any, int, dict[str, Any]]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._size is None:  # in a hook
            if self._hosts_last:
                self._log(*args, **kwargs)
            return
        tracer = StepTracer.current()
        if tracer is not None:
            tracer.observe(self._collect, args, kwargs)
        elif self._hosts_last:
            self._collect(*args, **kwargs)
        else:
            raise AvgPipeError(
                f"self.log({args[0] if args else kwargs.get('name')!r}) is called inside a submodule that runs on "
                "another stage than the loss; return the value and log it in the step"
            )

    @contextmanager
    def micro_batch(self, size: int) -> Iterator[None]:
        """Within this context logged values belong to a micro-batch of this many samples."""
        self._size = size
        try:
            yield
        finally:
            self._size = None

    def issue(self) -> None:
        """Log what was collected, once per name."""
        entries, self._entries = self._entries, {}
        for name, logged in entries.items():
            values = [value for value, _, _ in logged]
            sizes = [size for _, size, _ in logged]
            options = {**logged[-1][2], "batch_size": sum(sizes)}
            self._log(name, _reduce(values, sizes, options.get("reduce_fx", "mean")), **options)

    def discard(self) -> None:
        """Forget what was collected."""
        self._entries = {}

    def _collect(self, *args: Any, **kwargs: Any) -> None:
        options = dict(self._signature.bind(*args, **kwargs).arguments)
        name, value = options.pop("name"), options.pop("value")
        size = options.pop("batch_size", None) or self._size or 1
        if isinstance(value, Tensor) and not options.get("enable_graph", False):
            value = value.detach()
        self._entries.setdefault(name, []).append((value, size, options))


def _reduce(values: list[Any], sizes: list[int], reduce_fx: Any) -> Any:
    """One value for the values of the micro-batches; what is no number (a metric object) keeps its own state."""
    if len(values) == 1 or not all(isinstance(value, (Tensor, int, float)) for value in values):
        return values[-1]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if reduce_fx in ("mean", "avg") or reduce_fx is torch.mean:
        weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        shape = (-1, *([1] * (stacked.ndim - 1)))
        floating = stacked if stacked.is_floating_point() else stacked.float()
        return (floating * weights.to(floating).view(shape)).sum(0)
    if isinstance(reduce_fx, str):
        reduce_fx = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[reduce_fx.lower()]
        return reduce_fx(stacked, dim=0)
    return reduce_fx(stacked)


def _not_distributed() -> bool:
    return False


@contextmanager
def local_metrics(metrics: list[Metric]) -> Iterator[None]:
    """Within this context metric objects live where the last stage is.

    They do not talk to other processes (which hold no state), and within a step they only look at values, wherever
    they are called.
    """
    saved = [(metric, dict(vars(metric))) for metric in metrics]
    for metric in metrics:
        metric.distributed_available_fn = _not_distributed
        for name in ("forward", "update"):
            object.__setattr__(metric, name, _observed(getattr(metric, name)))
    try:
        yield
    finally:
        for metric, attributes in saved:
            for name in ("forward", "update", "distributed_available_fn"):
                if name in attributes:
                    object.__setattr__(metric, name, attributes[name])
                else:
                    vars(metric).pop(name, None)


def _observed(method: Callable[..., Any]) -> Callable[..., Any]:
    def observe(*args: Any, **kwargs: Any) -> Any:
        tracer = StepTracer.current()
        return method(*args, **kwargs) if tracer is None else tracer.observe(method, args, kwargs)

    return observe


class SyncedLoggerConnector(_LoggerConnector):
    """A logger connector that on every rank knows the metrics of rank 0, where the loss is.

    Callbacks decide by metrics (early stopping, the best checkpoint, its file name), and all ranks must decide alike.
    """

    def __init__(self, original: _LoggerConnector, mesh: Mesh) -> None:
        super().__init__(original.trainer)
        vars(self).update(vars(original))
        self._original = original
        self._mesh = mesh
        self._synced: dict[str, Any] = {"callback": {}, "log": {}, "pbar": {}}

    def detach(self) -> _LoggerConnector:
        """The connector that this one replaced, with the state of this one."""
        state = {name: value for name, value in vars(self).items() if name in vars(self._original)}
        vars(self._original).update(state)
        return self._original

    def snapshot(self) -> Any:
        """On rank 0 the metrics as of now."""
        return super().metrics if self._mesh.hosts_last else None

    def accept(self, metrics: Any) -> None:
        """On the other ranks use rank 0's metrics from now on."""
        self._synced = metrics

    def sync(self) -> None:
        """Tell all ranks the metrics as of now. Every rank calls it."""
        self.accept(self._mesh.publish(self.snapshot()))

    @property
    def metrics(self) -> Any:
        """Rank 0's metrics."""
        return super().metrics if self._mesh.hosts_last else self._synced

    def update_eval_epoch_metrics(self) -> Any:
        """Called by all ranks at the end of a validation dataloader, and of a validation."""
        if not self.trainer.sanity_checking:
            self.sync()
        return super().update_eval_epoch_metrics()

    def on_epoch_end(self) -> None:
        """Called by all ranks at the end of every epoch."""
        self.sync()
        super().on_epoch_end()

    def reset_results(self) -> None:
        """Called by all ranks when a loop starts anew."""
        super().reset_results()
        self._synced = {"callback": {}, "log": {}, "pbar": {}}
