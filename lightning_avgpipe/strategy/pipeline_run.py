"""A run of the trainer as a pipeline: its parts, put together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_avgpipe.advise.request import Request
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.errors import MicroBatchError, PartitionError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.halving import Halving
from lightning_avgpipe.planning.memory_limit import MemoryLimit
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.advisor import Advisor
from lightning_avgpipe.strategy.aftermath import hooks_with_results
from lightning_avgpipe.strategy.ahead import AheadIterations
from lightning_avgpipe.strategy.asynchronous import AsynchronousIterations
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.bundles import recount
from lightning_avgpipe.strategy.checkpoint_state import DividedState, WholeState
from lightning_avgpipe.strategy.comeback import Comeback, trained_in
from lightning_avgpipe.strategy.configuration import Configuration
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.data import Distributor
from lightning_avgpipe.strategy.deploying import announce, deploy, give_back, memory_per_stage, planned
from lightning_avgpipe.strategy.gradient_check import GradientCheck
from lightning_avgpipe.strategy.iteration import Iterations
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.loop import PipelineOptimization
from lightning_avgpipe.strategy.parallel_models import ParallelModels
from lightning_avgpipe.strategy.rolling import RollingIterations
from lightning_avgpipe.strategy.run import Own
from lightning_avgpipe.strategy.run_holdings import RunHoldings
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.strategy.survivors import Survivors
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.verify import Subject, Verifier, request

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
        trainer: of the run.
        connection: of the processes.
        configuration: of the strategy.
        before: the state before the run.
        distributor: of batches.

    Attributes:
        cluster: of the processes.
        observers: see the iterations.
        configuration: of the strategy.
        batches: on their way to the device.
        splitter: of batches.
        deployment: of the module on processes, from set-up on, as all that follows.
        step_log: collects what steps log.
        models: that are trained.
        iterations: runs the steps.
        state: what checkpoints save and load.
        plan: the stages; None before the first batch.
    """

    plan: Plan | None = None
    deployment: Deployment
    step_log: StepLog
    models: ParallelModels
    iterations: Iterations
    state: DividedState

    def __init__(
        self,
        trainer: pl.Trainer,
        connection: Connection,
        configuration: Configuration,
        before: WholeState,
        distributor: Distributor,
    ) -> None:
        assert connection.cluster is not None
        self.cluster = connection.cluster
        self.observers = Observers()
        self.batches = Batches(trainer, self.cluster, distributor)
        self.splitter = BatchSplitter(trainer, self.cluster, configuration, self.batches)
        self._trainer = trainer
        self._connection = connection
        self.configuration = configuration
        self._before = before
        self._verifier: Verifier | None = None
        self._advisor: Advisor | None = None
        self._survivors = Survivors(trainer, self.cluster) if self.cluster.survives else None
        self._undo = contextlib.ExitStack()

    @property
    def check(self) -> GradientCheck:
        """Of gradients before a step."""
        return self.models.check

    # -- set-up and teardown -----------------------------------------------------------------------------------------

    def setup(self, own: Own) -> None:
        """Put the parts together; the plan is made when the first batch is there."""
        trainer, module, cluster = self._trainer, self._trainer.lightning_module, self.cluster
        fitting, options = trainer.state.fn == TrainerFn.FITTING, self.configuration.options
        own(trainer)
        rolls = fitting and self.configuration.rolls
        self.deployment, seed = deploy(trainer, self._connection, options, self._before, rolls)
        self.step_log = StepLog(module, cluster.leaders if cluster.hosts_last else None, self._sharing_last)
        self.models = ParallelModels(
            trainer, cluster, self.configuration, self.deployment, self.step_log, self.observers
        )
        schedule_control = ScheduleControl(
            options.order, cluster, self.memory_per_stage, module, self.observers,
            RunHoldings(trainer, cluster, self.configuration, self.deployment.models),
        )  # fmt: skip
        self.state = DividedState(self._before, self.configuration, self.deployment, schedule_control, seed)
        self.models.check.apart = fitting and not options.policy.drains
        self.iterations = self._kind_of_iterations(fitting)(
            trainer=trainer, cluster=cluster, configuration=self.configuration, deployment=self.deployment,
            batches=self.batches, splitter=self.splitter, models=self.models, step_log=self.step_log,
            schedule_control=schedule_control, observers=self.observers, state=self.state, announce=self._announce,
        )  # fmt: skip
        if isinstance(self.iterations, RollingIterations):
            self.models.in_turn = self.iterations.step_in_turn
        if isinstance(self.iterations, AheadIterations):
            self.state.settle = self.iterations.drain
            self._undo.enter_context(changes.rolling(trainer, self.iterations, self.batches))
        if fitting and (asked := Request.found()) is not None:
            self._advisor = Advisor(asked, cluster)
            trainer.callbacks.append(self._advisor)  # type: ignore[attr-defined]
        if fitting and options.replicas != 1:
            request.refuse(options.verify, "with replicas each has but a share of the batch that counts")
        elif fitting:
            self._verifier = self.iterations.verifier = request.verifier(self._subject(), options.verify)
        self._adapt(fitting)
        if fitting and self._survivors is not None:
            self._survivors.begin()
            self._let_back(self._survivors)
        self._undo.callback(give_back, self.deployment, self._connection, self.state)
        self._undo.callback(lambda: self.iterations.leave(together=not self._connection.failed))

    def _let_back(self, survivors: Survivors) -> None:
        """Groups that have left may come back when an epoch begins, until teardown."""
        trainer, parts = self._trainer, (self.deployment, self.state, self.splitter)
        trained = trained_in(trainer.lightning_module)
        comeback = Comeback(trainer, self.cluster, self.configuration, *parts, survivors, self._announce, trained)
        self._undo.enter_context(changes.letting_back(trainer, comeback))
        self._undo.callback(lambda: None if self._connection.failed else comeback.end())

    def _kind_of_iterations(self, fitting: bool) -> Any:
        options = self.configuration.options
        if fitting and not options.policy.drains:
            return partial(AsynchronousIterations, broken=self._break)
        rolls = fitting and self.configuration.can_roll
        return partial(RollingIterations, broken=self._break) if rolls else Iterations

    def _sharing_last(self) -> Collectives | None:
        """The replicas of the last stage, on each of them; None if there is one."""
        cluster = self.cluster
        return cluster.replicas.members if cluster.shares_last and cluster.replicas is not None else None

    def _break(self) -> None:
        """Some models or stages have stepped and others have not: nothing is whole."""
        self._connection.failed = True

    def _subject(self) -> Subject:
        return Subject(
            trainer=self._trainer,
            cluster=self.cluster,
            deployment=self.deployment,
            step_log=self.step_log,
            seed=lambda: self.state.seed,
            num_pipelines=lambda: self.configuration.num_pipelines,
            clears_gradients=lambda: self.iterations.zero_grad is not None,
            loss_is_mean=self.configuration.options.loss_reduction == "mean",
            loss_weight=lambda: self.splitter.loss_weight,
            showing=self.models.showing,
        )

    def _adapt(self, fitting: bool) -> None:
        """From now on Lightning does what a pipeline needs, until teardown."""
        trainer, cluster, deployment, enter = self._trainer, self.cluster, self.deployment, self._undo.enter_context
        several = cluster.has_others
        enter(changes.observing(trainer, self.step_log, cluster.leaders))
        if fitting:
            optimization = PipelineOptimization(
                trainer.fit_loop.epoch_loop.automatic_optimization, cluster, self.iterations, self._iterated
            )
            enter(changes.optimizing(trainer, optimization))
            enter(changes.showing_reference(trainer, self.models, deployment))
        if fitting or several:
            enter(changes.scaling(trainer, cluster, self.models.together_with))
        if not several:
            return
        enter(changes.several_processes(trainer, cluster, deployment, self.batches.distributor.early))
        if cluster.group.world_size > 1:
            enter(hooks_with_results(trainer, cluster, deployment))
            enter(changes.clipping(trainer, cluster))
        enter(changes.known_at_epoch_end(trainer))

    def _announce(self) -> None:
        """A plan has been made that stays."""
        plan = self.plan = self.deployment.plan
        assert plan is not None
        announce(plan, self.cluster, self.configuration.options.shard_optimizer_states)
        if plan.graph.carried and self.splitter.count > 1 and not self.splitter.chooses:
            self.splitter.warn_once(
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

    def teardown(self) -> None:
        """Give every process the whole module back."""
        self._undo.close()

    def end_script(self) -> None:
        """After teardown: a script that runs to be verified, or for advice, ends here."""
        request.end_of_run(self._verifier)
        if self._advisor is not None and self._advisor.done:
            raise SystemExit(0)

    def model_to_device(self, own: Own) -> None:
        """Nothing moves before it is known which stage needs what."""

    # -- batches and steps -------------------------------------------------------------------------------------------

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """The reader's batch, after its transfer hooks, on every rank's device; the other pipelines' with it."""
        if self._trainer.training:
            self.end_iteration()  # of a batch that a hook has skipped
            self.configuration.in_iteration = True
        return self.batches.to_device(batch, device, dataloader_idx)

    def needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """The tensors of a batch for a process; None is all of them."""
        stage = self._trainer.state.stage
        if self.configuration.options.send_batch == "all" or self.splitter.own is not None or stage is None:
            return None
        stage_map = self.cluster.stage_map
        if self.splitter.loss_weight is not None and rank in stage_map.ranks(stage_map.num_stages - 1):
            return None  # which weighs micro-batches
        return self.deployment.pipeline.leaves(_STEPS[stage], rank, batch)

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """An iteration of the pipeline; on the whole batch, if M was left to us and the step takes no part of it."""
        batch, *rest = args
        if name == "training_step":
            run = partial(self.iterations.train, self.batches.take(batch), *rest)
        else:
            run = partial(self.iterations.evaluate, name, batch, *rest)
        try:
            return run()
        except MicroBatchError as found:
            reason = str(found)
        self.splitter.keep_whole()
        try:
            result = run()
        except Exception as error:
            error.add_note(f"num_microbatches='auto' was tried as 1, because {reason}")
            raise
        self.splitter.warn_once(
            f"batches are not split into micro-batches for {name}, so its stages take turns: {reason}. An explicit "
            "num_microbatches divides them where that is possible, and is an error elsewhere"
        )
        return result

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Run the closure and step, all parallel models."""
        with contextlib.nullcontext() if self._verifier is None else self._verifier.stepping():
            result = self.models.optimizer_step(own, optimizer, closure, model, **kwargs)
            self.iterations.stepped()
        if self.configuration.options.verify_copies:
            self.deployment.models.verify_copies()
        return result

    def _iterated(self) -> None:
        if self._survivors is not None:
            ensemble = self.deployment.models.ensemble
            averaged = ensemble is None or not ensemble.averager.steps
            self._survivors.end_iteration(self.configuration.num_pipelines, averaged)
        self.end_iteration()

    def end_iteration(self) -> None:
        """What was asked for within the iteration comes now."""
        if self.configuration.asked:
            self.iterations.leave()
        changed = self.configuration.take_over(self.cluster)
        if "advance" in changed:
            self.iterations.schedule_control.choice.fix(changed["advance"])
        if changed.keys() & {"num_stages", "split_points"}:
            self.deployment.replan(**planned(self._connection, self.configuration.options))
        wanted = self.iterations.schedule_control.choice.take_wanted()
        if wanted is not None:
            self.iterations.leave()
            self.deployment.replan(wanted)
        if "num_pipelines" in changed and self._trainer.state.fn == TrainerFn.FITTING:
            recount(self._trainer)

    def _check_sharing(self, plan: Plan, counts: Sequence[int]) -> None:
        if counts[-1] > 1 and self.step_log.batch_values.trained:
            raise PartitionError(
                "training updates metric objects, of which replicas of the last stage would each see a part of the data"
            )

    # -- what callbacks ask for --------------------------------------------------------------------------------------

    def share_freed(self) -> None:
        """From the next plan on fewer stages may do, which processes share. Every process calls it."""
        self.deployment.halve(Halving(self.memory_per_stage(), self._check_sharing))

    def advise_groups(self) -> None:
        """From the next plan on, each says whether more groups of fewer stages were faster. Every process calls it."""
        self.deployment.halve(Halving(self.memory_per_stage(), as_groups=True))

    @property
    def peaks(self) -> dict[int, int]:
        """Stage -> bytes at its peak, as far as measured."""
        return dict(self.iterations.schedule_control.peaks)

    def memory_per_stage(self, limit: MemoryLimit = None) -> float:
        """Bytes that each stage may use: by this limit, or else ``memory_limit``, or else 90 % of the device."""
        options = self.configuration.options
        return memory_per_stage(self._connection, options, options.memory_limit if limit is None else limit)

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Within this context the module is the model of one pipeline; None: the reference."""
        return self.models.showing(number)

    @contextlib.contextmanager
    def trying(self, batch: Any) -> Iterator[Any]:
        """Within this context steps are on trial; after it the strategy knows nothing of them but their stages.

        Every process calls it. What steps change in module, trainer and plugins is left to the caller.

        Args:
            batch: of training, as read from the dataloader; it is not touched.
        Returns:
            A copy on the device, after its transfer hooks.
        """
        options, schedule_control = self.configuration.options, self.iterations.schedule_control
        try:
            with self.step_log.unheard(), self.models.trying(), self.batches.trying(batch) as here:
                yield here
        finally:
            self.configuration.options, self.iterations.schedule_control = options, schedule_control

    def try_next(self, batches: Sequence[Any], num_microbatches: int, schedule_control: ScheduleControl) -> Any:
        """While steps are on trial: what the next one runs with.

        Args:
            batches: on the device, one for each pipeline; a step may change them.
            num_microbatches: M.
            schedule_control: gives the iteration its schedule.
        Returns:
            The batch of pipeline 0, which the step takes as its argument.
        """
        self.configuration.options = replace(
            self.configuration.options, num_pipelines=len(batches), num_microbatches=num_microbatches
        )
        self.iterations.schedule_control = schedule_control
        return self.batches.hand_out(batches)
