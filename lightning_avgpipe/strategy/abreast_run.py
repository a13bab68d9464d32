"""A run of the trainer, in one process, whose manual optimization accumulates over micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchmetrics import Metric

from lightning_avgpipe.capture.tracer import uncompiled
from lightning_avgpipe.engine.abreast import Abreast
from lightning_avgpipe.engine.common_gradients import CommonGradients
from lightning_avgpipe.engine.common_tensors import CommonTensors
from lightning_avgpipe.engine.common_writes import CommonWrites
from lightning_avgpipe.engine.microbatch import MicroBatch, merge
from lightning_avgpipe.engine.own_variables import OwnVariables
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.run import Own, PassthroughRun
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import RandomKey, Streams


class AbreastRun(PassthroughRun):
    """A run in which a step that steps optimizers itself gets micro-batches, abreast; the rest is Lightning's."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        trainer, cluster = around.trainer, around.cluster
        self._trainer, self._cluster = trainer, cluster
        self._batches = Batches(trainer, cluster, around.distributor)
        self._splitter = BatchSplitter(trainer, cluster, around.configuration, self._batches)
        self._common: CommonGradients | None = None  # while a step runs
        self._undo = contextlib.ExitStack()

    def setup(self, own: Own) -> None:
        """Lightning's own set-up; then what micro-batches do together is known."""
        super().setup(own)
        trainer, enter = self._trainer, self._undo.enter_context
        self._seed = torch.initial_seed()
        self._log = StepLog(trainer.lightning_module, self._cluster.leaders)
        enter(changes.observing(trainer, self._log, self._cluster.leaders))
        for number, optimizer in enumerate(trainer.optimizers):
            for each in (optimizer, *trainer.strategy._lightning_optimizers[number : number + 1]):
                enter(replaced(each, "step", self._stepping(each, f"step() of optimizer {number}")))
                enter(replaced(each, "zero_grad", self._clearing(each, f"zero_grad() of optimizer {number}")))
        for number, config in enumerate(trainer.lr_scheduler_configs):
            what = f"step() of scheduler {number}"
            enter(replaced(config.scheduler, "step", self._meeting(config.scheduler.step, what)))
        module = trainer.lightning_module
        enter(replaced(module, "zero_grad", self._clearing(module, "zero_grad()")))
        for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients"):
            enter(replaced(trainer.lightning_module, name, self._of_optimizer(name)))

    def teardown(self) -> None:
        """Steps are as they were."""
        self._undo.close()

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """The batch, after its transfer hooks."""
        return self._batches.to_device(batch, device, dataloader_idx)

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """A step of training gets micro-batches; others get whole batches."""
        if name != "training_step":
            return own(*args, **kwargs)
        batch, *rest = args
        parts, module = self._splitter.split(batch), self._trainer.lightning_module
        averages = self._around.configuration.options.loss_reduction == "mean"
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        variables = OwnVariables(module, len(parts), metrics)
        number = 1 + int(self._trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        streams = Streams(RandomKey(self._seed, number), len(parts), self._cluster.device)
        abreast = Abreast(len(parts), lambda i: self._turn(parts, variables, streams, i), variables.common)
        common = CommonGradients(abreast, [part.weight if averages else 1.0 for part in parts])
        tensors, port = CommonTensors(module, metrics), port_of(self._cluster.device)
        stream = port.current_stream()
        grad, context = torch.is_grad_enabled(), self._trainer.precision_plugin.train_step_context

        def work(i: int) -> Any:
            port.enter_thread()
            writes = CommonWrites(common, tensors, module)
            with port.on_stream(stream), torch.set_grad_enabled(grad), writes.watched():
                result = own(parts[i].data, *rest, **kwargs)
            return tree.map_tensors(Tensor.detach, result)

        self._log.begin(len(parts))
        self._common = common
        try:
            with context(), uncompiled(), common.weighted(), self._only_known_optimizers():
                results = abreast.run(work)
        finally:
            self._common = None
        self._log.issue()
        return merge(results, *self._splitter.counts(parts))

    @contextlib.contextmanager
    def _turn(self, parts: list[MicroBatch], variables: OwnVariables, streams: Streams, i: int) -> Iterator[None]:
        part, weight = parts[i], self._splitter.log_weight(parts[i], parts)
        with variables.placed(i), streams.drawing(i), self._log.micro_batch(part.size, (0, i), weight):
            before = self._hyperparameters() if i else {}
            yield
            changed = [name for name, value in before.items() if self._hyperparameters().get(name) != value]
            if changed:
                raise self._refusal(f"changes {changed[0]} anew in each micro-batch; use a scheduler")

    def _hyperparameters(self) -> dict[str, Any]:
        return {
            f"'{name}' of optimizer {n}" + (f", group {g}" if g else ""): value
            for n, optimizer in enumerate(self._trainer.optimizers)
            for g, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str, tuple))
        }

    def _refusal(self, what: str) -> ConfigurationError:
        name = type(self._trainer.lightning_module).__name__
        return ConfigurationError(f"training_step of {name} {what}, or use num_microbatches=1")

    # -- what micro-batches do together ------------------------------------------------------------------------------

    def _meet(self, what: str, action: Callable[[], Any], given: Any = ()) -> Any:
        return action() if self._common is None else self._common.meet(what, action, given)

    def _meeting(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._meet(what, lambda: method(*args, **kwargs), (args, kwargs))

        return run

    def _stepping(self, optimizer: Any, what: str) -> Callable[..., Any]:
        step = optimizer.step

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            closure = args[0] if args else kwargs.get("closure")
            if closure is not None and self._common is not None and self._common.abreast.index is not None:
                raise self._refusal(f"gives {what} a closure of each micro-batch; run forward and backward before it")
            return self._meet(what, lambda: step(*args, **kwargs))

        return run

    @contextlib.contextmanager
    def _only_known_optimizers(self) -> Iterator[None]:
        """Within this context others that step are noticed."""

        def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._common is not None and not self._common.abreast.is_for_all:  # a hook may run in another thread
                what = f"steps a {type(optimizer).__name__} that configure_optimizers has not returned"
                raise self._refusal(f"{what}, which each micro-batch would do; return it")

        handle = register_optimizer_step_pre_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def _clearing(self, optimizer: Any, what: str) -> Callable[..., Any]:
        clear = optimizer.zero_grad

        @functools.wraps(clear)
        def run(*args: Any, **kwargs: Any) -> None:
            if self._common is None:
                clear(*args, **kwargs)
            else:
                self._common.clear(what, lambda: clear(*args, **kwargs))

        return run

    def _of_optimizer(self, name: str) -> Callable[..., Any]:
        method = getattr(self._trainer.lightning_module, name)

        @functools.wraps(method)
        def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            own = getattr(optimizer, "_optimizer", optimizer)
            number = next((n for n, o in enumerate(self._trainer.optimizers) if o is own), None)
            what = f"{name}() of optimizer {number}"
            return self._meet(what, lambda: method(optimizer, *args, **kwargs), (args, kwargs))

        return run
