"""The plain run: in a forked child, the micro-batches one after the other with ordinary autograd, and the steps."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_avgpipe.averaging.optimizers import unwrapped
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.engine.loss import LossWeight, counts, loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch, mean
from lightning_avgpipe.state.untouched import random_state
from lightning_avgpipe.utils.forked import in_child
from lightning_avgpipe.utils.lightning import (
    Callback,
    DummyLogger,
    PassThroughProfiler,
    ProgressBar,
    SingleDeviceStrategy,
    pl,
)
from lightning_avgpipe.utils.patching import all_replaced, noop
from lightning_avgpipe.utils.tensors import reduced, reduction_name
from lightning_avgpipe.utils.torch_compat import compiled_graphs, forget_compiled
from lightning_avgpipe.verify.fingerprint import Fingerprint, distance, fingerprint
from lightning_avgpipe.verify.plain_draws import drawing_as_promised
from lightning_avgpipe.verify.state import attributes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """A batch on which a child process trains.

    Attributes:
        parts: micro-batches of the pipeline.
        rest: further arguments of the step.
        key: seed, iteration and number of the pipeline, on which random numbers depend.
        graph: call graph of the step, which tells what draws random numbers.
        steps: whether the optimizer steps at the end; otherwise gradients accumulate.
        progress: state of the loop's count of batches.
        whole: the batch in one piece, if its loss is wanted.
        with_gradients: whether the gradients of ``whole`` are wanted as well.
        evaluation: how often the optimizer has called its closure before, within the same step.
        shares: number of pipelines that divide the batch among them.
        total: sum of what the micro-batches of all these pipelines count in the mean; None: of this pipeline only.
    """

    parts: Sequence[MicroBatch]
    rest: Sequence[Any]
    key: tuple[int, int, int]
    graph: CallGraph
    steps: bool
    progress: dict[str, Any]
    whole: Any = None
    with_gradients: bool = False
    evaluation: int = 0
    shares: int = 1
    total: float | None = None


@dataclass(frozen=True)
class OnePiece:
    """The loss of a batch in one piece, compared with its micro-batches.

    Attributes:
        loss: loss of the batch in one piece.
        mean: mean over the losses of its micro-batches.
        number: number of its micro-batches.
        distance: distance of the gradients from those of the micro-batches, relative to their norm; 0 if not known.
    """

    loss: float
    mean: float
    number: int
    distance: float


@dataclass(frozen=True)
class Traces:
    """The results of an iteration, of a pipeline or of a plain run.

    If an optimizer calls its closure several times, there are the losses of all calls, and the gradients, buffers,
    attributes and logged values of the last one.

    Attributes:
        losses: "micro-batch 0" -> the loss that the step returned; see :func:`place`.
        gradients: parameter -> its gradient or None, before hooks and clipping; empty if gradients accumulate.
        buffers: name of a buffer -> its contents after all backwards.
        attributes: name of an attribute of a module -> its value after all backwards.
        weights: parameter -> its contents after the optimizer's step; empty if there is none.
        logged: name -> the number that is logged for the batch; None if that is not a number.
        whole: loss of the batch in one piece; None: it is not wanted, or could not be computed.
        compiled: whether a plain run has compiled anything, which may round differently.
    """

    losses: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Fingerprint | None] = field(default_factory=dict)
    buffers: dict[str, Fingerprint] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Fingerprint] = field(default_factory=dict)
    logged: dict[str, float | None] = field(default_factory=dict)
    whole: OnePiece | None = None
    compiled: bool = False


class PlainTraining:
    """Trains a module in this process alone, with Lightning's own loop. Only for forked children: nothing is restored.

    Args:
        trainer: a trainer on which the changes for a pipeline have been undone.
        mean: whether a loss is a mean over its micro-batch; otherwise it is a sum.
        loss_weight: what the mean counts; None: samples.
        device: device of the computation.
    """

    def __init__(self, trainer: pl.Trainer, mean: bool, loss_weight: LossWeight | None, device: torch.device) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._mean, self._loss_weight, self._device = mean, loss_weight, device
        self._logged = _Logged(trainer.fit_loop.epoch_loop._results)
        self._first = True
        forget_compiled()  # so that the number of graphs tells whether a step runs compiled
        self._compiled_before = compiled_graphs()
        self._take_over()

    def _take_over(self) -> None:
        """Give the trainer a strategy for one device, and loggers and a profiler that do nothing."""
        trainer, module, before = self._trainer, self._module, self._trainer.strategy
        accelerator, precision = trainer.accelerator, before.precision_plugin
        strategy = SingleDeviceStrategy(self._device, accelerator, precision_plugin=precision)
        strategy.connect(module)
        strategy.optimizers = before.optimizers
        strategy.lr_scheduler_configs = before.lr_scheduler_configs
        trainer._accelerator_connector.strategy = strategy
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop._results = self._logged  # type: ignore[assignment]
        trainer._logger_connector.should_reset_tensors = lambda fx: False  # type: ignore[method-assign]
        self._logged.listen(module)

    def iterate(self, receive: Callable[[], Batch]) -> Traces:
        """Run the micro-batches of a batch in order, let the optimizer step, and return the results.

        Args:
            receive: returns the next batch that the pipeline has trained on: one for each call of the closure.
        Raises:
            ValueError: the step skips all micro-batches, or the optimizer calls its closure more or less often than in
                the pipeline.
        """
        batch = _expected(receive(), 0)
        loop, module = self._trainer.fit_loop.epoch_loop, self._module
        if not self._first:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        self._first = False
        loop.batch_progress.load_state_dict(batch.progress)
        traces, batch_idx, calls = Traces(), loop.batch_idx, itertools.count()
        optimizer, whole = self._trainer.optimizers[0], self._in_one_piece(batch)
        zero_grad = loop.automatic_optimization._make_zero_grad_fn(batch_idx, optimizer)

        @torch.enable_grad()
        def closure() -> Tensor:
            evaluation = next(calls)
            now = _expected(receive(), evaluation) if evaluation else batch
            loss = self._micro_batches(now, zero_grad, traces)
            if batch.steps:
                traces.gradients.update(
                    (name, None if p.grad is None else fingerprint(p.grad)) for name, p in module.named_parameters()
                )
            traces.buffers.update((name, fingerprint(buffer)) for name, buffer in module.named_buffers())
            traces.attributes.update(portable(attributes(module)))
            self._trainer.precision_plugin.post_backward(loss, module)
            return loss

        with alone(), intercepting(), random_state():
            if batch.steps:
                forget = after_step(optimizer, module, traces.weights)
                loop.automatic_optimization._optimizer_step(batch_idx, closure)
                forget()
            else:
                closure()
        traces.logged.update(self._logged.of_batch())
        compared = None
        if whole is not None:
            loss, gradients = whole
            weights = self._weights(batch)  # the losses of the first call of the closure come first
            mean = sum(weight * loss for weight, loss in zip(weights, traces.losses.values(), strict=False))
            compared = OnePiece(loss, mean, len(weights), distance(gradients, traces.gradients))
        return replace(traces, whole=compared, compiled=compiled_graphs() > self._compiled_before)

    def _in_one_piece(self, batch: Batch) -> tuple[float, dict[str, Fingerprint]] | None:
        """Return the loss of the whole batch and its gradients, if they are wanted and the step takes the whole batch.

        They are computed in another child, so that side effects are lost.
        """
        if batch.whole is None:
            return None

        def compute() -> tuple[float, dict[str, Fingerprint]]:
            module = self._module
            module._current_fx_name = "training_step"
            recording, precision = torch.set_grad_enabled(batch.with_gradients), self._trainer.precision_plugin
            with alone():
                with recording, precision.train_step_context():
                    loss = loss_in(module.training_step(batch.whole, *batch.rest))
                if batch.with_gradients:
                    module.zero_grad()
                    with quiet(self._trainer, "on_before_backward"):
                        self._backward(loss, 1.0)  # scaled as those of the micro-batches
            found = ((name, p.grad) for name, p in module.named_parameters())
            return float(loss), {name: fingerprint(grad) for name, grad in found if grad is not None}

        try:
            return in_child(compute, "computes the loss of a batch in one piece")
        except Exception as error:  # a step need not take a whole batch
            _log.info("the loss of a batch in one piece is not known: %s: %s", type(error).__name__, error)
            return None

    def _micro_batches(self, batch: Batch, zero_grad: Callable[[], None] | None, traces: Traces) -> Tensor:
        """Run the forwards and backwards of all micro-batches; return the loss of the batch."""
        parts, shares, losses = batch.parts, self._weights(batch), dict[int, Tensor]()
        self._logged.clear()
        for i, (part, share) in enumerate(zip(parts, shares, strict=True)):
            samples = sum(p.size for p in parts) or 1
            self._logged.begin(part.size if self._loss_weight is None else share * samples)
            result = self._forward(batch, i)
            if i == 0 and zero_grad is not None:
                zero_grad()
            if result is None:  # skipped
                continue
            loss = loss_in(result)
            losses[i] = loss.detach()
            traces.losses[place(i, batch.evaluation)] = float(losses[i])
            if share or not self._mean:  # otherwise the loss is a mean over nothing
                with contextlib.nullcontext() if len(losses) == 1 else quiet(self._trainer, "on_before_backward"):
                    self._backward(loss, share)
        if not losses:
            raise ValueError("the step skips all micro-batches")
        found = list(losses.values())
        # if samples count, weight by their numbers, as the pipeline does, so that the mean is rounded alike
        weights = [parts[i].size if self._loss_weight is None else shares[i] for i in losses]
        whole = mean(found, weights) if self._mean else torch.stack(found).sum(0)
        return whole / self._trainer.accumulate_grad_batches

    def _forward(self, batch: Batch, number: int) -> Any:
        module, key = self._module, (*batch.key, number)
        module._current_fx_name = "training_step"
        draws = drawing_as_promised(module, batch.graph, key, self._device)
        with draws, self._trainer.precision_plugin.train_step_context():
            result = module.training_step(batch.parts[number].data, *batch.rest)
        module._current_fx_name = None
        return result

    def _backward(self, loss: Tensor, share: float) -> None:
        if self._trainer.accumulate_grad_batches > 1:
            loss = loss / self._trainer.accumulate_grad_batches
        loss = self._trainer.precision_plugin.pre_backward(loss, self._module)
        if self._mean and share != 1.0:
            loss = loss * share
        if loss.requires_grad:
            loss.backward()

    def _weights(self, batch: Batch) -> list[float]:
        """Return the weight of each micro-batch in the mean.

        The pipeline's own weights are not used, since they are to be verified.
        """
        counted = counted_in(batch.parts, self._loss_weight)
        total = sum(counted) if batch.total is None else batch.total
        return [batch.shares * (count / total) for count in counted]


def counted_in(parts: Sequence[MicroBatch], loss_weight: LossWeight | None) -> list[float]:
    """Return what each micro-batch counts in the mean over a batch: its samples, or what ``loss_weight`` says."""
    sizes: list[float] = [part.size for part in parts]
    if not sum(sizes):
        sizes = [1] * len(parts)
    counted = sizes if loss_weight is None else counts([part.data for part in parts], loss_weight)
    return counted if sum(counted) else sizes


def place(number: int, evaluation: int) -> str:
    """Return the name of a micro-batch among the losses of a step.

    Args:
        number: number of the micro-batch.
        evaluation: how often the optimizer has called its closure before.
    """
    return f"micro-batch {number}" + (f" in call {evaluation + 1} of the closure" if evaluation else "")


def _expected(batch: Batch, evaluation: int) -> Batch:
    if batch.evaluation != evaluation:
        raise ValueError(
            f"the optimizer calls its closure {evaluation} times or less in the pipeline, and more often in a plain run"
            if batch.evaluation < evaluation
            else "the optimizer calls its closure more often in the pipeline than in a plain run"
        )
    return batch


def after_step(optimizer: Optimizer, module: pl.LightningModule, found: dict[str, Fingerprint]) -> Callable[[], None]:
    """Take fingerprints of the weights that this process holds after each step of an optimizer.

    An optimizer that does not call ``Optimizer.__init__``, such as some wrappers of others, has no step hooks; then no
    fingerprints are taken.

    Args:
        optimizer: optimizer that steps.
        module: module that has the weights.
        found: dictionary to which fingerprints are added by name.
    Returns:
        A function that ends this.
    """

    def note(*_: Any) -> None:  # if step() calls super().step(), the outer call comes here last
        found.update((name, fingerprint(p)) for name, p in module.named_parameters() if not p.is_meta)

    try:
        return unwrapped(optimizer).register_step_post_hook(note).remove
    except AttributeError:
        return noop


def portable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes in a form that another process can compare, without those that cannot be pickled."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = ... if value.is_meta else fingerprint(value)
            continue
        if isinstance(value, np.ndarray):
            contents = hashlib.blake2b(value.tobytes()).hexdigest()
            found[name] = "an array", value.shape, str(value.dtype), contents
            continue
        with contextlib.suppress(Exception):  # of any type that a user's class raises
            pickle.dumps(value)
            found[name] = value
    return found


def quiet(trainer: pl.Trainer, *hooks: str) -> AbstractContextManager[None]:
    """Return a context within which some hooks are not called, neither the module's nor those of callbacks.

    Progress bars without such hooks stay: rich draws in a thread of its own, which asks the trainer for its bar.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    bars = [c for c in callbacks if isinstance(c, ProgressBar) and not any(map(partial(_has, c), hooks))]
    return all_replaced([(trainer, "callbacks", bars), *((trainer.lightning_module, hook, noop) for hook in hooks)])


def _has(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


class _Logged:
    """A wrapper of Lightning's store of logged values that also collects what ``self.log`` stores within the step.

    Everything else is the wrapped store's, such as the values of ``trainer.callback_metrics``.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.dataloader_idx = None
        self._size: float = 1
        self._of_metric = False
        self._calls: Counter[str] = Counter()  # number of calls of self.log in this micro-batch, by name
        self._entries: dict[tuple[str, int], list[tuple[Any, float, Any]]] = defaultdict(list)

    def clear(self) -> None:
        """Forget what was logged, since another batch begins."""
        self._entries.clear()

    def begin(self, size: float) -> None:
        """Begin a micro-batch of a size, by which its values are weighted."""
        self._size = size
        self._calls.clear()

    def listen(self, module: pl.LightningModule) -> None:
        """Watch the values that metric objects return: their mean over micro-batches is not the value of the batch."""
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        self._store.log(fx, name, value, *args, **options)
        if fx != "training_step":  # a hook
            return
        if self._of_metric or options.get("batch_size") is not None:  # a weight of the user's own
            value = None
        self._calls[name] += 1
        if not self._size:  # a mean over nothing
            return
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self._entries[name, self._calls[name]].append((value, self._size, options.get("reduce_fx", "mean")))

    def of_batch(self) -> dict[str, Any]:
        """Return the reduced value of each name; None if it is not a number, or its reduction is not known.

        If a micro-batch has logged a name several times, the value is that of the last call.
        """
        return {name: _reduced(entries) for (name, _), entries in self._entries.items()}


def _reduced(entries: list[tuple[Any, float, Any]]) -> float | None:
    values = [value for value, *_ in entries]
    if any(value is None or isinstance(value, Metric) for value in values):
        return None
    sizes = [size for _, size, _ in entries]
    how = reduction_name(entries[-1][2])
    numbers = torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")
    if how == "mean":
        weights = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        return float((numbers * weights).sum() / weights.sum())
    found = reduced(numbers, how)
    return None if found is None else float(found)
