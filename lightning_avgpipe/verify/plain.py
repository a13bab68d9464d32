"""The plain run: micro-batches one after the other on a copy of the module, with ordinary autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from lightning_avgpipe.capture.snapshot import random_state
from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.weighting import LossWeight, counts_for
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.verify.plain_draws import Captured, drawing_as_promised
from lightning_avgpipe.verify.state import attributes, clone


@dataclass(frozen=True)
class Outcome:
    """What the micro-batches of one batch leave behind.

    Attributes:
        losses: "micro-batch 0" -> what the step returned as its loss.
        gradients: parameter -> its gradient or None, accumulated since gradients were cleared.
        parameters: before any optimizer step; a step may change them.
        buffers: by name.
        attributes: what else modules hold, by name.
        logged: name -> what the whole batch logs; None for what is no number.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainRun:
    """How a batch is run.

    Attributes:
        trainer: is asked what user code asks it, and told nothing.
        precision: scales losses.
        context: in which steps run.
        key: seed, iteration and pipeline, for random numbers.
        captured: who is known to draw them.
        accumulate: batches per optimizer step.
        mean: whether a loss is a mean over its micro-batch; else it is a sum.
        loss_weight: what the mean is over; None: the samples.
        device: of the computation.
    """

    trainer: pl.Trainer
    precision: Precision
    context: Callable[[], AbstractContextManager[Any]]
    key: tuple[int, int, int]
    captured: Captured
    accumulate: int
    mean: bool
    loss_weight: LossWeight | None
    device: torch.device

    def run(
        self,
        module: pl.LightningModule,
        parts: Sequence[MicroBatch],
        rest: Sequence[Any],
        gradients: Mapping[str, Tensor | None],
        after_first: Callable[[pl.LightningModule], None] | None,
    ) -> Outcome:
        """Run the micro-batches in order.

        Args:
            module: a duplicate, which is used up.
            parts: of the batch.
            rest: further arguments of the step.
            gradients: of earlier batches.
            after_first: called after the first forward, where gradients are cleared.
        """
        logged = _Logged()
        stand_in = _StandIn(self.trainer, module, logged)
        module.trainer = stand_in  # type: ignore[assignment]
        logged.listen(module)
        losses: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        sizes, shares = [part.size for part in parts], self._shares(parts)
        with random_state():
            for i, (part, weight) in enumerate(zip(parts, shares, strict=True)):
                logged.size = part.size if self.loss_weight is None else weight * (sum(sizes) or 1)
                result = self._forward(module, i, (part.data, *rest))
                if i == 0 and after_first is not None:
                    after_first(module)
                if result is None:  # skipped
                    continue
                loss = loss_in(result)
                losses[f"micro-batch {i}"] = loss.detach().clone()
                if weight or not self.mean:  # else it is a mean over nothing
                    self._backward(module, loss, weight if len(parts) > 1 else 1.0)
                del result, loss
        return Outcome(
            losses,
            {name: p.grad for name, p in module.named_parameters()},
            {name: p.detach() for name, p in module.named_parameters()},
            dict(module.named_buffers()),
            {name: clone(value) for name, value in attributes(module).items()},
            logged.of_batch(),
        )

    def _forward(self, module: pl.LightningModule, number: int, args: tuple[Any, ...]) -> Any:
        data = _copied(args)
        module._current_fx_name = "training_step"
        with drawing_as_promised(module, self.captured, (*self.key, number), self.device), self.context():
            result = module.training_step(*data)
        module._current_fx_name = None
        return result

    def _backward(self, module: pl.LightningModule, loss: Tensor, share: float) -> None:
        if self.accumulate > 1:
            loss = loss / self.accumulate
        loss = self.precision.pre_backward(loss, module)
        vars(module)["on_before_backward"] = nothing  # a batch has this hook once
        if self.mean and share != 1.0:
            loss = loss * share
        if loss.requires_grad:
            loss.backward()

    def _shares(self, parts: Sequence[MicroBatch]) -> list[float]:
        """What each loss counts in the mean, by a rule of its own: the pipeline's weights are to be verified."""
        sizes: list[float] = [part.size for part in parts]
        if not sum(sizes):
            sizes = [1] * len(parts)
        counts = sizes if self.loss_weight is None else [counts_for(part.data, self.loss_weight) for part in parts]
        if not sum(counts):
            counts = sizes
        return [count / sum(counts) for count in counts]


class _StandIn:
    """A trainer for a duplicate: what is asked is answered by the real one, what is told is forgotten."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, logged: _Logged) -> None:
        self._trainer = trainer
        self._results = logged
        self._logger_connector = _Connector()
        self.lightning_module = self.model = module
        self.callbacks: list[Any] = []
        self.loggers = [DummyLogger()] if trainer.loggers else []
        self.logger = self.loggers[0] if self.loggers else None
        self.profiler = PassThroughProfiler()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _Connector:
    """Of a stand-in: there is nothing to reset."""

    _current_fx: str | None = None

    def should_reset_tensors(self, fx: str) -> bool:
        return False


class _Logged:
    """Takes what ``self.log`` gives, behind all that a user may have put before it."""

    def __init__(self) -> None:
        self.size: float = 1
        self.dataloader_idx = None
        self._of_metric = False
        self._entries: dict[str, list[tuple[Any, float, Any, bool]]] = {}

    def listen(self, module: pl.LightningModule) -> None:
        """Learn which numbers a metric object has returned: their mean over micro-batches is not the batch's."""
        for name in ("log", "log_dict"):
            vars(module).pop(name, None)
        log = module.log
        returned: list[Any] = []

        def note(metric: Any, args: Any, value: Any) -> None:
            returned.append(value)

        def listen(*args: Any, **kwargs: Any) -> None:
            value = args[1] if len(args) > 1 else kwargs.get("value")
            self._of_metric = any(value is known for known in returned)
            log(*args, **kwargs)

        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.register_forward_hook(note)
        module.log = listen  # type: ignore[method-assign]

    def log(self, fx: str, name: str, value: Any, *_: Any, **options: Any) -> None:
        if fx != "training_step":  # a hook
            return
        if self._of_metric:
            value = None
        if not self.size:  # a mean over nothing
            return
        given = options.get("batch_size")
        if isinstance(value, Tensor):
            value = value.detach().clone()
        size = self.size if given is None else given
        alike = given == 1 < self.size  # the wish that all micro-batches count alike
        self._entries.setdefault(name, []).append((value, size, options.get("reduce_fx", "mean"), alike))

    def of_batch(self) -> dict[str, Any]:
        """Means over all samples, sums, and so on; None for what is no number, or reduced in a way of its own."""
        return {name: _reduced(entries) for name, entries in self._entries.items()}


def _reduced(entries: list[tuple[Any, float, Any, bool]]) -> Any:
    values = [value for value, *_ in entries]
    if any(value is None or isinstance(value, Metric) for value in values):
        return None
    sizes = [1 if any(alike for *_, alike in entries) else size for _, size, *_ in entries]
    how = entries[-1][2]
    stacked = torch.stack([torch.as_tensor(value) for value in values]).double()
    weights = torch.tensor(sizes, dtype=torch.float64, device=stacked.device).view(-1, *[1] * (stacked.ndim - 1))
    if how in ("mean", "avg") or how is torch.mean:
        return (stacked * weights).sum(0) / weights.sum()
    if how == "sum" or how is torch.sum:
        return stacked.sum(0)
    if how == "max" or how is torch.max:
        return stacked.amax(0)
    if how == "min" or how is torch.min:
        return stacked.amin(0)
    return None


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Steps may change their batch. Strides stay: kernels may round otherwise with others."""
    try:
        return copy.deepcopy(args)
    except Exception:  # of user types that cannot be copied, the tensors
        return tuple(tree.map_tensors(torch.clone, args))


def notify_zero_grad(module: pl.LightningModule, optimizer: Any) -> None:
    """The user's hook before gradients are cleared, which may change weights."""
    if is_overridden("on_before_zero_grad", module):
        call._call_lightning_module_hook(module.trainer, "on_before_zero_grad", optimizer)
