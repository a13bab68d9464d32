"""The pipeline's replacement of Lightning's optimization of a batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.iteration import Iterations
from lightning_avgpipe.strategy.log import SyncedLoggerConnector
from lightning_avgpipe.utils.lightning import Closure, ClosureResult, _AutomaticOptimization, call


class _PipelineClosure(Closure):
    """A closure that runs an iteration: forwards and backwards in the order of the schedule."""

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        result = self._step_fn()
        if result.closure_loss is None:
            self.warning_cache.warn(
                "`training_step` returned `None` for all micro-batches of a batch, which is skipped. If this was on "
                "purpose, ignore this warning"
            )
        return result


class PipelineOptimization(_AutomaticOptimization):
    """Replaces Lightning's automatic optimization: one optimizer step per iteration of the pipeline.

    Accumulation, clipping, precision and the optimizer's hooks stay Lightning's.

    Args:
        original: Lightning's own optimization.
        cluster: the connected processes.
        iterations: runs the steps.
        observed: whether user code may look at the weights between steps.
        end_iteration: called at the end of an iteration.
    """

    def __init__(
        self,
        original: _AutomaticOptimization,
        cluster: Cluster,
        iterations: Iterations,
        observed: bool,
        end_iteration: Callable[[], None],
    ) -> None:
        super().__init__(original.trainer)
        self.optim_progress = original.optim_progress
        self._replaced = (original,)  # in a tuple: a loop saves the progress of loops among its attributes
        self._cluster = cluster
        self._iterations = iterations
        self._observed = observed
        self._end_iteration = end_iteration

    def detach(self) -> _AutomaticOptimization:
        """Return the optimization that this one replaced, with the progress of this one."""
        self._replaced[0].optim_progress = self.optim_progress
        return self._replaced[0]

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Run one iteration; the loss and the metrics are known on every rank afterwards."""
        self._cluster.channels.control.expect()
        result = super().run(optimizer, batch_idx, kwargs)
        schedule_control, connector = self._iterations.schedule_control, self.trainer._logger_connector
        decided = schedule_control.finish()
        if isinstance(connector, SyncedLoggerConnector):  # several processes
            news: Any = None
            if self._cluster.world.rank == 0:
                news = {"loss": result.get("loss"), "metrics": connector.snapshot()}
            # advances are decided in each group
            news, decided = self._cluster.channels.control.relay(news, decided)
            connector.accept(news["metrics"])
            if news["loss"] is not None:
                result = {**result, "loss": news["loss"]}
        # only now, since the other stages wait for rank 0's news
        if self._observed:
            self._iterations.models.finish_averaging()
        schedule_control.accept(decided)
        schedule_control.log(self.trainer)
        self._end_iteration()
        return result

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        """Run the step as Lightning does, except that all processes may skip a batch together."""
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        return ClosureResult.from_training_step_output(output, self.trainer.accumulate_grad_batches)

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        step: Callable[[], ClosureResult] = self._make_step_fn(kwargs)
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)

        def run() -> ClosureResult:
            with self._iterations.clearing_gradients(zero_grad):
                return step()

        return _PipelineClosure(step_fn=run)
