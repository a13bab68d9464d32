"""A run of the trainer as a pipeline, which constructs the parts of the run and connects them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.errors import MicroBatchError, StageError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.strategy import commands, hooks, rolling
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.absent_weights import AbsentWeights
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.context import Own, RunContext
from lightning_avgpipe.strategy.deploying import deploy, give_back
from lightning_avgpipe.strategy.gradient_check import GradientCheck
from lightning_avgpipe.strategy.iteration import STEP
from lightning_avgpipe.strategy.log import StepLog, SyncedLoggerConnector
from lightning_avgpipe.strategy.loop import PipelineLoop
from lightning_avgpipe.strategy.metric_objects import set_device
from lightning_avgpipe.strategy.parallel_models import ParallelModels
from lightning_avgpipe.strategy.rank_zero_hooks import hooks_with_results
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.strategy.state_of_stages import StateOfSteps
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.replicas import sharing_last
from lightning_avgpipe.training.stepping import scaling_together
from lightning_avgpipe.utils.lightning import (
    Closure,
    ClosureResult,
    RunningStage,
    _AutomaticOptimization,
    call,
)
from lightning_avgpipe.utils.patching import all_replaced, replaced
from lightning_avgpipe.verify import Subject

_STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


class PipelineRun:
    """A run of the trainer whose steps are iterations of a pipeline.

    Attributes:
        context: trainer, connection and options of the run.
        cluster: the connected processes.
        configuration: current options of the strategy.
        batches: moves batches to the device.
        deployment: deployment of the module on processes. This and the attributes below exist from :meth:`setup` on.
        models: the models that are trained.
        loop: runs the steps.
    """

    deployment: Deployment
    models: ParallelModels
    loop: PipelineLoop

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.cluster, self.configuration = context.cluster, context.configuration
        self.batches = Batches(context)
        self._undo = contextlib.ExitStack()
        self._changes = contextlib.ExitStack()  # changes to Lightning and the module that this process can undo alone

    @property
    def check(self) -> GradientCheck:
        """The check of gradients before each optimizer step."""
        return self.models.check

    @property
    def is_set_up(self) -> bool:
        """Whether :meth:`setup` has run. ``configure_optimizers`` runs before it, and may already read batches."""
        return hasattr(self, "loop")

    @property
    def plan(self) -> Plan | None:
        """The plan of the stages that training uses; None before the first batch."""
        return self.deployment.plan if self.is_set_up and self.deployment.is_final else None

    # -- set-up and teardown -----------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Construct the parts of the run; the plan is made with the first batch."""
        context, trainer, cluster, configuration = self.context, self.context.trainer, self.cluster, self.configuration
        module, options, fitting, observers = context.module, configuration.options, context.fitting, Observers()
        deployment = self.deployment = deploy(context)
        leaders = cluster.leaders if cluster.rank == 0 else None
        step_log = StepLog(module, cluster.device, leaders, partial(sharing_last, cluster))
        if fitting and options.system is not None:
            self._undo.enter_context(options.system.training(context, deployment))
        self.models = ParallelModels(context, deployment, step_log, observers)
        schedule_control = ScheduleControl(options.schedule_request, context, deployment.parallel, observers)
        context.state.begin(deployment, schedule_control)
        self.absent_weights = AbsentWeights(trainer, StateOfSteps(trainer, cluster, deployment))
        loop = self.loop = PipelineLoop(context, self.batches, deployment, self.models, schedule_control)
        context.state.drain, context.distributor.needs = loop.drain, self.needs
        order = (options.policy.order(loop) or rolling.order(loop)) if fitting else None
        if order is not None:
            loop.order = order
            self._undo.enter_context(all_replaced(changes.ending_with_epoch(trainer, order)))
        if fitting:
            commands.advise(trainer, cluster)
        if fitting and options.has_replicas(cluster.stage_map.replicas):
            commands.refuse_to_verify(options.verify, "with replicas each process has only a share of the batch")
        # otherwise differences are expected (older weights, compiled units, replicas of a stage that share
        # micro-batches, several worlds that average), so only verify if the user asks for it
        comparable = options.policy.drains and not (options.compile or options.shares_stages or options.system)
        if fitting and (options.verifies or comparable):
            verifier = loop.verifier = commands.verifier(self._subject(), options.verify)
            if verifier is not None:
                self._undo.callback(verifier.close)
        self._adapt(fitting)
        self._undo.callback(give_back, context, deployment)
        self._undo.callback(lambda: None if context.connection.failed else loop.send_all_changes())
        self._undo.callback(loop.order.put_back)

    def _subject(self) -> Subject:
        return Subject(
            trainer=self.context.trainer,
            cluster=self.cluster,
            deployment=self.deployment,
            step_log=self.models.step_log,
            seed=lambda: self.configuration.seed,
            num_pipelines=lambda: self.configuration.num_pipelines,
            clears_gradients=lambda: self.loop.zero_grad is not None,
            loss_is_mean=self.configuration.options.loss_reduction == "mean",
            loss_weight=lambda: self.loop.splitter.loss_weight,
            showing=self.models.showing,
            has_hooks_between_steps=self.loop.observed_between_steps,
            has_hooks_in_step=hooks.has_any(self.context.trainer, hooks.WITHIN_STEPS),
            undo_changes=self._changes.close,
            options=self.configuration.options.shared,
            verdicts=self.configuration.options.cache_directory,
        )

    def _adapt(self, fitting: bool) -> None:
        """Apply the changes to Lightning that a pipeline needs, until teardown."""
        trainer, cluster = self.context.trainer, self.cluster
        enter = self._undo.enter_context(self._changes).enter_context
        deployment, several = self.deployment, cluster.world.world_size > 1
        if cluster.group.world_size > 1:  # first, since later replacements would be taken for the user's own hooks
            enter(all_replaced(self.absent_weights.replacements()))
        enter(changes.observing(trainer, self.models.step_log, cluster.leaders))
        enter(all_replaced(changes.without_inference_mode(trainer)))
        enter(all_replaced(changes.examples_beside_weights(self.context.module, lambda: deployment.plan is not None)))
        if fitting:
            optimization = PipelineOptimization(self.loop, self.absent_weights)
            enter(replaced(trainer.fit_loop.epoch_loop, "automatic_optimization", optimization))
            enter(replaced(self.context.module, "_on_before_batch_transfer", self.batches.before_transfer))
            enter(all_replaced(changes.showing_reference(trainer, self.loop)))
        if fitting or several:
            enter(scaling_together(trainer.precision_plugin, cluster, self.models.optimizers_stepping_with))
        if not several:
            return
        enter(changes.adapting_to_processes(self.context, deployment))
        if cluster.group.world_size > 1:
            enter(all_replaced(hooks_with_results(self.context, deployment)))
            enter(all_replaced(changes.clipping(trainer, self.models.norms)))
            if fitting:
                enter(all_replaced(changes.gathering_weights_at_end(self.context, deployment)))
        enter(all_replaced(changes.syncing_metrics(trainer, self._sync_metrics)))

    def _sync_metrics(self) -> None:
        """Send rank 0's metrics to all processes. A process that waits for them runs actions that are ready."""
        connector = self.context.trainer._logger_connector
        assert isinstance(connector, SyncedLoggerConnector)
        self.loop.order.run_until(self.cluster.control.has_news)
        connector.sync()

    def end_training(self) -> None:
        """Finish the verification after the last batch."""
        if self.loop.verifier is not None:
            self.loop.verifier.finish_run()

    def teardown(self) -> None:
        """Undo the changes to Lightning, and give every process the whole module back."""
        self._undo.close()

    def end_script(self) -> None:
        """End the script if the command ``verify`` or ``advise`` runs it and is done. Called after teardown."""
        if self.is_set_up:
            commands.end_script(self.context.trainer, self.loop.verifier)

    def model_to_device(self, own: Own) -> None:
        """Set the device of modules and metric objects. Weights are moved once there is a plan."""
        set_device(self.context.module, self.cluster.device)

    # -- batches and steps -------------------------------------------------------------------------------------------

    def batch_to_device(self, own: Own, batch: Any, dataloader_idx: int) -> Any:
        """Return pipeline 0's batch on the device, after its transfer hooks, and keep those of the other pipelines."""
        if self.context.trainer.training:
            self.loop.end_iteration()  # the iteration has not ended if a hook has skipped its batch
            self.configuration.in_iteration = True
        return self.batches.to_device(batch, dataloader_idx)

    def needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """Return the names of the tensors of a batch that the process with this rank needs; None if it needs all."""
        stage, splitter, stage_map = self.context.trainer.state.stage, self.loop.splitter, self.cluster.stage_map
        if self.configuration.options.links.send_batch == "all" or splitter.custom_split is not None or stage is None:
            return None
        if splitter.loss_weight is not None and rank in stage_map.ranks(stage_map.num_stages - 1):
            return None  # the last stage weighs micro-batches, by a function that may read the whole batch
        step = _STEPS[stage]
        if step != STEP and "batch" in self.loop.arguments_used_at_batch_end[step]:
            return None
        return self.deployment.pipeline.leaves(step, rank, batch)

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration of the pipeline, and return the result of the step for the batch.

        With ``num_microbatches="auto"``, a step that cannot be captured on a micro-batch runs on the whole batch.

        Raises:
            StageError: the step has raised StopIteration.
        """
        batch, *rest = args
        if name == "training_step":
            run = partial(self.loop.order.train, self.batches.take(batch), tuple(rest))
        else:
            run = partial(self.loop.evaluate, name, batch, *rest)
        try:
            try:
                return run()
            except MicroBatchError as found:
                reason = str(found)
            return self._on_whole_batch(name, run, reason)
        except StopIteration as error:
            raise StageError(
                f"{type(self.context.module).__name__}.{name} raises StopIteration ({error}), which Lightning's loop "
                "takes for the end of the data: the epoch would end without a word. Catch it where next() is called, "
                "or give next() a default"
            ) from error

    def _on_whole_batch(self, name: str, run: Callable[[], Any], reason: str) -> Any:
        self.loop.splitter.keep_whole()
        try:
            result = run()
        except Exception as error:
            error.add_note(f"num_microbatches='auto' was tried as 1, because {reason}")
            raise
        self.loop.splitter.warn_once(
            f"batches are not split into micro-batches for {name}, so its stages take turns: {reason}. An explicit "
            "num_microbatches divides them where that is possible, and is an error elsewhere"
        )
        return result

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Run the closure, and step the optimizers of all parallel models."""
        verifier = self.loop.verifier
        with self.absent_weights.suspended(), contextlib.nullcontext() if verifier is None else verifier.stepping():
            result = self.models.optimizer_step(own, self.loop.order, optimizer, closure, model, **kwargs)
            self.loop.order.stepped()
        return result

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Return a context within which the module shows the model of one pipeline; None: the reference."""
        return self.models.showing(number)


class PipelineOptimization(_AutomaticOptimization):
    """Replaces Lightning's automatic optimization: one optimizer step per iteration of the pipeline.

    Accumulation, clipping, precision and the hooks of optimizers are still Lightning's.

    Args:
        loop: runs the steps.
        absent_weights: wraps the user's hooks.
    """

    def __init__(self, loop: PipelineLoop, absent_weights: AbsentWeights) -> None:
        super().__init__(loop.trainer)
        # shared with Lightning's own optimization, since Lightning updates it in place, also from a checkpoint
        self.optim_progress = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._loop = loop
        self._absent_weights = absent_weights

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Run one iteration. Afterwards every rank knows the loss and the metrics.

        If a callback may read ``outputs``, every rank also knows what else the step has returned.
        """
        cluster = self._loop.cluster
        self._loop.stops = self.trainer.should_stop
        cluster.control.expect()
        verifier = self._loop.verifier
        self._loop.share_after_sanity_check()
        if verifier is not None and not self._loop.is_averaging_pass:  # before optimizers and their hooks count a step
            with self._loop.clearing_gradients(self._make_zero_grad_fn(batch_idx, optimizer)):
                verifier.fork()
        result = super().run(optimizer, batch_idx, kwargs)
        schedule_control, connector = self._loop.schedule_control, self.trainer._logger_connector
        decided = schedule_control.finish()
        if isinstance(connector, SyncedLoggerConnector):  # several processes
            news: Any = None
            if cluster.world.rank == 0:
                stops = self.trainer.should_stop  # the step may have set it
                news = {"loss": result.get("loss"), "metrics": connector.snapshot(), "stops": stops}
            others = dict(result) if "outputs" in self._loop.arguments_used_at_batch_end[STEP] else {}
            self._loop.order.run_until(cluster.control.has_news)
            # the news is common to all groups; results and the decision on the advance are those of each group
            news, (decided, others) = cluster.control.relay(news, (decided, others))
            result = {**result, **others}
            connector.accept(news["metrics"])
            self.trainer.should_stop = news["stops"]
            if news["loss"] is not None:
                result = {**result, "loss": news["loss"]}
        # not before the other stages, which wait for rank 0's news, have them
        if self._loop.observed_between_steps:
            self._loop.models.finish_averaging()
        self._loop.send_changes(self._loop.observed_between_steps)
        schedule_control.accept(decided)
        schedule_control.log(self.trainer)
        self._loop.end_iteration()
        return result

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        """Run the step as Lightning does, but allow a batch without a loss, which all processes skip together."""
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        return ClosureResult.from_training_step_output(output, self.trainer.accumulate_grad_batches)

    def _iterate(
        self, step: Callable[[], ClosureResult], zero_grad: Callable[[], None] | None, shares_loss: bool
    ) -> ClosureResult:
        """Run an iteration: forwards and backwards in the order of the schedule.

        Args:
            step: calls the training step.
            zero_grad: clears the gradients; None if they accumulate.
            shares_loss: whether the last stage sends the loss to all processes, for optimizers that use it (such as
                those with Polyak's step size).
        """
        with self._absent_weights.suspended() as by_hook, self._loop.clearing_gradients(zero_grad):
            result = step()
        if by_hook:  # the hook may read gradients
            self._absent_weights.show_gradients()
        if shares_loss:
            result.loss = self._loop.cluster.control.broadcast(result.loss)
        return result

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        several = self._loop.cluster.group.world_size > 1
        shares_loss = several and not type(optimizer).__module__.startswith("torch.")
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        return Closure(partial(self._iterate, self._make_step_fn(kwargs), zero_grad, shares_loss))
