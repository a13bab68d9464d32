"""A run of the trainer as a pipeline: constructs the parts of the run and connects them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_avgpipe.advise.request import Request
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.errors import MicroBatchError, StageError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.advisor import Advisor
from lightning_avgpipe.strategy.aftermath import hooks_with_results
from lightning_avgpipe.strategy.ahead import AheadIterations
from lightning_avgpipe.strategy.asynchronous import AsynchronousIterations
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.bundles import recount
from lightning_avgpipe.strategy.checkpoint_state import DividedState
from lightning_avgpipe.strategy.deploying import announce, deploy, give_back, planned
from lightning_avgpipe.strategy.gradient_check import GradientCheck
from lightning_avgpipe.strategy.iteration import Iterations
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.loop import PipelineOptimization
from lightning_avgpipe.strategy.metric_objects import tell_device
from lightning_avgpipe.strategy.parallel_models import InTurn, ParallelModels
from lightning_avgpipe.strategy.preparation import Preparation
from lightning_avgpipe.strategy.rolling import RollingIterations
from lightning_avgpipe.strategy.run import Own
from lightning_avgpipe.strategy.run_holdings import RunHoldings
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.replicas import sharing_last
from lightning_avgpipe.utils.lightning import RunningStage, rank_zero_warn
from lightning_avgpipe.verify import Subject, request
from lightning_avgpipe.verify.verdicts import Verdicts

_STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


class PipelineRun:
    """A run of the trainer whose steps are iterations of a pipeline.

    Args:
        around: trainer, connection and options of the run.

    Attributes:
        around: trainer, connection and options of the run.
        cluster: the connected processes.
        configuration: the strategy's options as they are now.
        batches: brings batches to the device.
        deployment: deployment of the module on processes. This and the attributes below exist from :meth:`setup` on.
        models: the models that are trained.
        iterations: runs the steps.
        state: the state that checkpoints save and load.
        plan: the plan of the stages; None before the first batch.
    """

    plan: Plan | None = None
    deployment: Deployment
    models: ParallelModels
    iterations: Iterations
    state: DividedState

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.cluster, self.configuration = around.cluster, around.configuration
        self.batches = Batches(around.trainer, around.cluster, around.distributor)
        self._undo = contextlib.ExitStack()
        self._changes = contextlib.ExitStack()  # changes in Lightning and the module that this process can undo alone

    @property
    def check(self) -> GradientCheck:
        """The check of gradients before a step."""
        return self.models.check

    # -- set-up and teardown -----------------------------------------------------------------------------------------

    def setup(self, own: Own) -> None:
        """Construct the parts of the run; the plan is made when the first batch is there."""
        around, trainer, cluster, configuration = self.around, self.around.trainer, self.cluster, self.configuration
        module, options, fitting = trainer.lightning_module, configuration.options, around.fitting
        splitter, observers = BatchSplitter(trainer, cluster, configuration, self.batches), Observers()
        own(trainer)
        deployment = self.deployment = deploy(around)
        step_log = StepLog(module, cluster.leaders if cluster.rank == 0 else None, partial(sharing_last, cluster))
        self.models = ParallelModels(trainer, cluster, configuration, deployment, step_log, observers)
        schedule_control = ScheduleControl(
            options.order, cluster, around.memory_per_stage, module, observers, RunHoldings(around, deployment.models)
        )
        self.state = DividedState(around.before, configuration, deployment, schedule_control)
        self.models.check.apart = fitting and not options.policy.drains
        preparation = Preparation(
            trainer=trainer, cluster=cluster, deployment=deployment, splitter=splitter, replanned=self._replanned
        )
        self.iterations = self._kind_of_iterations(fitting)(
            trainer=trainer, cluster=cluster, configuration=configuration, deployment=deployment, splitter=splitter,
            preparation=preparation, models=self.models, schedule_control=schedule_control,
        )  # fmt: skip
        if isinstance(self.iterations, AheadIterations):
            self.state.settle = self.iterations.drain
            self._undo.enter_context(changes.rolling(trainer, self.iterations, self.batches))
        if fitting and (asked := Request.found()) is not None:
            trainer.callbacks.append(Advisor(asked, cluster))  # type: ignore[attr-defined]
        if fitting and options.replicated(cluster.stage_map.replicas):
            request.refuse(options.verify, "with replicas each has but a share of the batch that counts")
        elif fitting and (options.verifies or not self._why_no_witness()):
            verifier = self.iterations.verifier = request.verifier(self._subject(), options.verify)
            if verifier is not None:
                self._undo.callback(verifier.close)
        self._adapt(fitting)
        self._undo.callback(give_back, deployment, around.connection, self.state)
        self._undo.callback(lambda: self.iterations.leave(together=not around.connection.failed))

    def _kind_of_iterations(self, fitting: bool) -> Any:
        options = self.configuration.options
        if fitting and not options.policy.drains:
            return partial(AsynchronousIterations, batches=self.batches, broken=self._break)
        rolls = fitting and self.configuration.can_roll
        return partial(RollingIterations, batches=self.batches, broken=self._break) if rolls else Iterations

    def _why_no_witness(self) -> str:
        """Return why the first steps are not verified unless the user asks for it; empty if they are."""
        options = self.configuration.options
        if isinstance(self.iterations, AheadIterations):
            return "iterations overlap"
        return "its units are compiled" if options.compile else ""

    def _break(self) -> None:
        """Mark the run as failed: some models or stages have stepped and others have not."""
        self.around.connection.failed = True

    def _subject(self) -> Subject:
        return Subject(
            trainer=self.around.trainer,
            cluster=self.cluster,
            deployment=self.deployment,
            step_log=self.models.step_log,
            seed=lambda: self.configuration.seed,
            num_pipelines=lambda: self.configuration.num_pipelines,
            clears_gradients=lambda: self.iterations.zero_grad is not None,
            loss_is_mean=self.configuration.options.loss_reduction == "mean",
            loss_weight=lambda: self.iterations.splitter.loss_weight,
            showing=self.models.showing,
            observed=changes.looks_between_steps(self.around.trainer),
            acting=changes.acts_in_steps(self.around.trainer),
            undo_changes=self._changes.close,
            options=self.configuration.options.shared,
            verdicts=Verdicts(self.configuration.options.cache_directory),
        )

    def _adapt(self, fitting: bool) -> None:
        """Change Lightning for a pipeline, until teardown."""
        trainer, cluster = self.around.trainer, self.cluster
        enter = self._undo.enter_context(self._changes).enter_context
        deployment, several = self.deployment, cluster.world.world_size > 1
        enter(changes.observing(trainer, self.models.step_log, cluster.leaders))
        if fitting:
            optimization = PipelineOptimization(
                trainer.fit_loop.epoch_loop.automatic_optimization, cluster, self.iterations,
                changes.looks_between_steps(trainer), self.end_iteration,
            )  # fmt: skip
            enter(changes.optimizing(trainer, optimization))
            enter(changes.showing_reference(trainer, deployment))
        if fitting or several:
            enter(changes.scaling(trainer, cluster, self.models.together_with))
        if not several:
            return
        enter(changes.several_processes(trainer, cluster, deployment, self.batches.distributor.early))
        if cluster.group.world_size > 1:
            enter(hooks_with_results(trainer, cluster, deployment))
            enter(changes.clipping(trainer, cluster))
        enter(changes.known_at_epoch_end(trainer))

    def _replanned(self, stays: bool) -> None:
        self.iterations.schedule_control.begin_again()
        if stays:
            self._announce()

    def _announce(self) -> None:
        """Print the final plan, and warn of state that micro-batches or replicas share."""
        plan = self.plan = self.deployment.plan
        assert plan is not None
        announce(plan, self.cluster, self.configuration.options.shard is not None)
        splitter = self.iterations.splitter
        if plan.graph.carried and splitter.count > 1 and not splitter.chooses:
            splitter.warn_once(
                f"'{plan.graph.carried[0]}', which {plan.graph.step} keeps for the next time, goes from micro-batch to "
                "micro-batch, that is to other samples of the same batch, and must fit each of them; with "
                "num_microbatches=1 it goes from batch to batch, as on one device"
            )

        counts = self.cluster.stage_map.stage_replicas
        shared = [n for k, stage in enumerate(plan.stages) if counts and counts[k] > 1 for n in stage.states]
        if shared:
            rank_zero_warn(
                f"{plan.graph.step} changes '{shared[0]}'"
                + (f" and {len(shared) - 1} other buffers" if len(shared) > 1 else "")
                + f" on stages with replicas={list(counts)}: each replica does so for its own micro-batches, and what "
                "the first one has is kept"
            )

    def end_training(self) -> None:
        """Compare what is still to be verified, after the last batch."""
        if self.iterations.verifier is not None:
            self.iterations.verifier.leave()

    def teardown(self) -> None:
        """Give every process the whole module back."""
        self._undo.close()

    def end_script(self) -> None:
        """End a script that runs to be verified, or for advice; called after teardown."""
        if self.plan is None:  # nothing has run
            return
        request.end_of_run(self.iterations.verifier)
        if any(isinstance(c, Advisor) and c.done for c in self.around.trainer.callbacks):  # type: ignore[attr-defined]
            raise SystemExit(0)

    def model_to_device(self, own: Own) -> None:
        """Set the device of modules and metric objects; weights stay until it is known which stage needs which."""
        tell_device(self.around.trainer.lightning_module, self.cluster.device)

    # -- batches and steps -------------------------------------------------------------------------------------------

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Return pipeline 0's batch on the device, after its transfer hooks, and keep those of the other pipelines."""
        if self.around.trainer.training:
            self.end_iteration()  # the iteration has not ended if a hook has skipped its batch
            self.configuration.in_iteration = True
        return self.batches.to_device(batch, device, dataloader_idx)

    def needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """Return the names of a batch's tensors that a process needs; None is all of them."""
        stage, splitter, stage_map = self.around.trainer.state.stage, self.iterations.splitter, self.cluster.stage_map
        if self.configuration.options.links.send_batch == "all" or splitter.own is not None or stage is None:
            return None
        if splitter.loss_weight is not None and rank in stage_map.ranks(stage_map.num_stages - 1):
            return None  # which weighs micro-batches
        return self.deployment.pipeline.leaves(_STEPS[stage], rank, batch)

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run an iteration of the pipeline; on the whole batch, if M was left to the strategy and the step needs it.

        Raises:
            StageError: the step has raised StopIteration.
        """
        try:
            return self._step(name, *args)
        except StopIteration as error:
            raise StageError(
                f"{type(self.around.trainer.lightning_module).__name__}.{name} raises StopIteration ({error}), which "
                "Lightning's loop takes for the end of the data: the epoch would end without a word. Catch it where "
                "next() is called, or give next() a default"
            ) from error

    def _step(self, name: str, *args: Any) -> Any:
        batch, *rest = args
        if name == "training_step":
            run = partial(self.iterations.train, self.batches.take(batch), *rest)
        else:
            run = partial(self.iterations.evaluate, name, batch, *rest)
        try:
            return run()
        except MicroBatchError as found:
            reason = str(found)
        self.iterations.splitter.keep_whole()
        try:
            result = run()
        except Exception as error:
            error.add_note(f"num_microbatches='auto' was tried as 1, because {reason}")
            raise
        self.iterations.splitter.warn_once(
            f"batches are not split into micro-batches for {name}, so its stages take turns: {reason}. An explicit "
            "num_microbatches divides them where that is possible, and is an error elsewhere"
        )
        return result

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Run the closure, and step the optimizers of all parallel models."""
        verifier = self.iterations.verifier
        with contextlib.nullcontext() if verifier is None else verifier.stepping():
            result = self.models.optimizer_step(own, self._turns, optimizer, closure, model, **kwargs)
            self.iterations.stepped()
        return result

    def _turns(self) -> InTurn | None:
        if isinstance(self.iterations, RollingIterations) and self.configuration.rolls:
            return self.iterations.step_in_turn
        return None

    def end_iteration(self) -> None:
        """Apply the changes that were asked for within the iteration."""
        if self.configuration.asked:
            self.iterations.leave()
        changed = self.configuration.take_over(self.cluster)
        if "advance" in changed:
            self.iterations.schedule_control.choice.fix(changed["advance"])
        if changed.keys() & {"num_stages", "split_points"}:
            self.deployment.replan(**planned(self.around))
        wanted = self.iterations.schedule_control.choice.take_wanted()
        if wanted is not None:
            self.iterations.leave()
            self.deployment.replan(wanted)
        if "num_pipelines" in changed and self.around.fitting:
            recount(self.around.trainer)

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Return a context within which the module is the model of one pipeline; None: the reference."""
        return self.models.showing(number)
