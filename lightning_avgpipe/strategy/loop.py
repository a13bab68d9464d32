"""The loop that runs steps: takes a batch, runs all forwards and backwards, and then lets Lightning step the optimizer.

::

    Lightning's optimization   PipelineOptimization.run .. closure          optimizer's step, averaging
    order that flushes         take, run all pipelines to their end    all step
    order that overlaps        take, run until pipeline 0 has ended    0 steps; then each later one ends, steps, begins
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.alone import alone, in_hook
from lightning_avgpipe.engine.loss import loss_in, trainable_loss
from lightning_avgpipe.engine.microbatch import MicroBatch, mean, merge
from lightning_avgpipe.engine.pipeline import Outcome, run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.schedule import Schedule, build
from lightning_avgpipe.strategy import hooks
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.batches import Batches, recount
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.deploying import Preparation, announce, planned
from lightning_avgpipe.strategy.iteration import STEP, ClearingGradients, Iteration, IterationOrder
from lightning_avgpipe.strategy.optimizer_view import read_only
from lightning_avgpipe.strategy.parallel_models import ParallelModels
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.strategy.state_of_stages import StateOfUnits
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.replicas import sharing_last
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.random_streams import RandomKey, host_lent, host_stream, stream
from lightning_avgpipe.verify import Verifier
from lightning_avgpipe.verify.plain import quiet
from lightning_avgpipe.weights.initialisation import on_meta

_CONTEXTS = {
    STEP: "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


_MOST_AHEAD = 1  # number of evaluation batches by which a process may be ahead of another one
_MANY = 2**32  # more than the number of batches in a validation


class PipelineLoop:
    """Runs the steps of one run of the trainer.

    Args:
        context: trainer, connection and options of the run.
        batches: batches of the run.
        deployment: deployment of the module on processes.
        models: the models that are trained.
        schedule_control: chooses the schedule of a training iteration.

    Attributes:
        module: module that is trained.
        order: order in which iterations follow each other.
        splitter: splits batches.
        verifier: compares the first iterations with plain ones; None if there is no verification.
        zero_grad: clears the gradients of the training step that runs now; None if they accumulate.
        stops: whether training was to stop when this step began, which is the same on all processes; a step itself may
            ask for it on one of them.
        observed: whether hooks of the user may read what steps have changed.
        observed_between_steps: whether hooks of the user run between two steps of training.
    """

    verifier: Verifier | None = None
    zero_grad: Callable[[], None] | None = None
    stops: bool = False

    def __init__(
        self,
        context: RunContext,
        batches: Batches,
        deployment: Deployment,
        models: ParallelModels,
        schedule_control: ScheduleControl,
    ) -> None:
        self.context, self.module = context, context.module
        self.trainer, self.cluster, self.configuration = context.trainer, context.cluster, context.configuration
        self.batches = batches
        self.deployment = deployment
        self.models = models
        self.schedule_control = schedule_control
        self.splitter = BatchSplitter(context, batches)
        self.order = IterationOrder(self)
        self._preparation = Preparation(context, deployment, self.splitter)
        self._of_units = StateOfUnits(context.module, context.cluster, deployment)
        # found before hooks are replaced, since the replacements would count as the user's
        self.observed = hooks.has_any(self.trainer, (*hooks.SEEING_WEIGHTS, *hooks.TRANSFER))
        self.observed_between_steps = hooks.has_any(self.trainer, hooks.BETWEEN_STEPS)
        self._searched: list[Any] = []  # callbacks in which the following was found
        self._arguments_used: dict[str, frozenset[str]] = dict.fromkeys(_CONTEXTS, frozenset())
        modules = context.module.modules()
        self._saves_extra_state = any(type(m).get_extra_state is not nn.Module.get_extra_state for m in modules)
        self._to_bring: set[str] = set()  # steps whose changes have not been brought to the other processes
        self._begun: deque[Callable[[], object]] = deque()  # each waits until all have begun a batch of an evaluation

    @property
    def arguments_used_at_batch_end(self) -> Mapping[str, frozenset[str]]:
        """For each step, which of ``outputs`` and ``batch`` callbacks of the user use at the end of its batch."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        # hooks may append callbacks, and a search for a learning rate takes them away for a while
        if list(map(id, callbacks)) != list(map(id, self._searched)):
            self._searched = [*callbacks]
            self._arguments_used = {step: hooks.arguments_used_at_batch_end(self.trainer, step) for step in _CONTEXTS}
        return self._arguments_used

    @property
    def accumulates(self) -> bool:
        """Whether the optimizers do not step after this iteration."""
        return bool(self.trainer.fit_loop._should_accumulate())

    @property
    def is_averaging_pass(self) -> bool:
        """Whether Lightning passes over the data without training, as its weight averaging does at the end."""
        return bool(self.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)

    @contextlib.contextmanager
    def clearing_gradients(self, zero_grad: Callable[[], None] | None) -> Iterator[None]:
        """Within this context a training step clears the gradients where Lightning does: before its first backward."""
        # cached, so that gradients are cleared once even if the step fails and runs again on the whole batch
        self.zero_grad = None if zero_grad is None else functools.cache(zero_grad)
        try:
            yield
        finally:
            self.zero_grad = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def evaluate(self, step: str, batch: Any, *rest: Any) -> Any:
        """Run a step without backward; return the merged result on the last stage's rank, None elsewhere.

        All processes return the result if the trainer returns it as predictions, or if a callback uses it.

        Raises:
            MicroBatchError: the step cannot be captured on a micro-batch; see :meth:`IterationOrder.train`.
        """
        self.order.drain()
        self._keep_pace()
        observed = hooks.has_any(self.trainer, hooks.OF_EVALUATION)
        self.send_changes(observed)  # what training has changed, before this step changes the reference
        iteration = self.new_iteration(step, [batch], rest)
        iteration.trains = False
        if self.run(iteration):
            self._to_bring.add(step)
            self.send_changes(observed)
        if step in self.deployment.undivided:
            results = self._run_whole(iteration)
        else:
            (outcome,) = iteration.outcomes
            results = outcome.results
        result = None if results is None else merge(results, *self.splitter.counts(iteration.micro_batches[0]))
        returned = step == "predict_step" and self.trainer.predict_loop.return_predictions
        shares = self.cluster.group.world_size > 1 and (returned or "outputs" in self.arguments_used_at_batch_end[step])
        return self.cluster.control.broadcast(result) if shares else result

    def _keep_pace(self) -> None:
        """In an evaluation, make a reader without the last stage wait for processes that fall behind.

        In training it has to wait for backwards; here its messages would pile up in the process of a slower stage.
        """
        if self.cluster.stage_map.reader:  # rank 0 has the last stage
            self._begun.append(self.cluster.group.begin_exchange(None, "the evaluation of the batch before"))
            if len(self._begun) > _MOST_AHEAD:
                self._begun.popleft()()

    def _run_whole(self, iteration: Iteration) -> list[Any] | None:
        """Run an evaluation step that cannot be divided on rank 0; return the results of its micro-batches there."""
        self.splitter.warn_once(
            f"{self.deployment.undivided[iteration.step]}. So rank 0 runs it for all stages, and needs memory for all "
            "weights meanwhile, which the other processes send to it for each batch"
        )
        self.send_changes(True)
        parts, step, device = iteration.micro_batches[0], iteration.step, self.cluster.device
        self.models.step_log.begin(len(parts))

        def run() -> list[Any]:
            results = []
            for i, part in enumerate(parts):
                seed = RandomKey(self.configuration.seed, iteration.number, 0, i).derive(step)
                with stream(seed, device), host_stream(seed):
                    results.append(self._call(iteration, 0, i, part.data, *iteration.other_args))
            return results

        with alone():
            results: list[Any] | None = self.deployment.run_whole(run, f"runs {step} for all stages")
        with iteration.precision():
            self.models.step_log.flush()
        return results

    def end_iteration(self) -> None:
        """Apply the changes of options and stages that were requested during the iteration."""
        if self.configuration.has_requests:
            self.order.put_back()
        changed = self.configuration.apply_requests(self.cluster)
        choice = self.schedule_control.choice
        if "advance" in changed:
            choice.fix_advance(changed["advance"])
        if changed.keys() & {"num_stages", "split_points"}:
            self.deployment.replan(**planned(self.context))
        wanted = choice.take_requested_placement()
        if wanted is not None:
            self.order.put_back()
            self.deployment.replan(wanted)
        if "num_pipelines" in changed and self.context.fitting:
            recount(self.trainer)

    def send_changes(self, wanted: bool) -> None:
        """If ``wanted``, send what submodules have changed to all processes. Every process calls it."""
        if wanted:
            for step in sorted(self._to_bring):
                if owners := self._of_units.owners(step):
                    self.order.run_until_all_arrive("what submodules have changed")
                    self._of_units.send_changes(step, owners)
            self._to_bring.clear()

    def drain(self) -> None:
        """Drain the pipelines before weights are read, and bring submodules' extra state. Every process calls it."""
        self.order.drain()
        self.send_changes(self._saves_extra_state)

    def send_all_changes(self) -> None:
        """Send changed and new attributes of submodules to all processes, which may run them next. All call it."""
        for step in sorted(self.deployment.pipeline.steps):
            if owners := self._of_units.owners(step, step in self._to_bring, made=True):
                self._of_units.send_changes(step, owners, lenient=True)
        self._to_bring.clear()

    def share_after_sanity_check(self) -> None:
        """After a sanity check, give all processes its changes, before training forks a plain run and makes stages.

        Every process calls it before each iteration.
        """
        if self.deployment.plan is not None and not self.deployment.is_final:
            self.deployment.share()
            self.send_all_changes()

    # -- parts of an iteration, which orders combine -------------------------------------------------------------------

    def arrange(self, batches: Sequence[Any]) -> None:
        """Arrange the processes for a new plan, if one was requested, and if the step clears gradients."""
        if self.zero_grad is not None and self.deployment.arrange(batches):
            self.schedule_control.begin_again()

    def new_iteration(self, step: str, batches: Sequence[Any], rest: tuple[Any, ...], ahead: int = 0) -> Iteration:
        """Return an iteration of batches that are on the device.

        Args:
            step: name of the step function.
            batches: batch of each pipeline; one batch if all pipelines divide it.
            rest: arguments of the current step other than the batch: ``batch_idx``, if the step takes it.
            ahead: number of iterations by which it is ahead of the current one; 0: it is the current one.
        """
        training, configuration, stage_map = step == STEP, self.configuration, self.cluster.stage_map
        weighs = training or (step != "predict_step" and self.splitter.loss_weight is not None)
        shares = configuration.num_pipelines // configuration.batches_per_step if training else 1
        works = self.splitter.split(batches, shares, weighs)
        others, replica = self.deployment.parallel.averaging_group, self.cluster.group_number % stage_map.replicas
        team = 0 if others is None else others.group_number
        first = team * configuration.num_pipelines, replica * configuration.options.microbatches(stage_map.given_stages)
        return Iteration(
            step=step,
            precision=getattr(self.trainer.precision_plugin, _CONTEXTS[step]),
            batches=batches,
            micro_batches=works,
            weighed=self.splitter.weighing(works) if training else lambda: works,
            other_args=tuple(index + ahead for index in rest) if ahead else rest,
            number=self._number(step) + ahead,
            first=first if training else (0, 0),
        )

    def clear_or_defer(self, iteration: Iteration, drains: bool = True) -> None:
        """Let an iteration clear the gradients after its first forward, or clear them now if that cannot wait.

        Args:
            iteration: iteration that begins.
            drains: whether all processes begin and end the iteration together.
        """
        if self.zero_grad is None:
            return
        if self.models.num_models == 1 and (drains or self.cluster.rank == 0) and not self.deployment.replans:
            iteration.clears = ClearingGradients(self.module, self.cluster.stages, self.zero_grad)
        else:  # with several models the module may have another model's weights after the first forward
            self.models.clear_gradients(self.zero_grad)

    def finish(self, iteration: Iteration, n: int, i: int, result: Any) -> Tensor | None:
        """Return the tensor from which a micro-batch's backward starts, on the last stage; None: there is no backward.

        Args:
            iteration: the iteration.
            n: number of the pipeline.
            i: number of the micro-batch.
            result: what the step has returned for it.
        """
        averages = self.configuration.options.loss_reduction == "mean"
        if i == 0 and iteration.clears is not None:
            iteration.clears.end()  # after the first forward and before all backwards, as on one device
        weight = iteration.weighed()[n][i].weight
        if result is None or (averages and not weight):  # without weight the loss is a mean over nothing: NaN
            self.models.replicas.check_trains(i)
            return None
        loss = trainable_loss(result)
        if self.trainer.accumulate_grad_batches > 1:
            loss = loss / self.trainer.accumulate_grad_batches
        # the hooks are called once per batch, with the first micro-batch's loss, the only one that is known then; for a
        # batch that Lightning's loop has not reached, they are called when it has
        calls_hooks = n == 0 and iteration.first_loss is None and iteration.progress is None
        if n == 0 and iteration.first_loss is None:
            iteration.first_loss = loss.detach()
        with self._hook_called() if calls_hooks else quiet(self.trainer, "on_before_backward"):
            loss = self.trainer.precision_plugin.pre_backward(loss, self.module)
        return loss * weight if averages and weight != 1.0 else loss

    @contextlib.contextmanager
    def _hook_called(self) -> Iterator[None]:
        """Within this context a hook is called while pipeline 0 runs; what it changes is changed for all pipelines."""
        stream = self.deployment.parallel.pipelines[0].stream
        with host_lent(), in_hook(), contextlib.nullcontext() if stream is None else stream.on_callers_stream():
            yield

    def prepare(self, iteration: Iteration) -> bool:
        """Make the stages of a step, if it has none; return whether it has stages now. Every process calls it.

        No stages are made if the step returns None for the whole first batch. Then it runs here, only for what it
        changes and logs.
        """
        schedule = self.schedule(iteration.micro_batches[0], iteration.trains)
        trained = self.configuration.num_pipelines if iteration.step == STEP else 1
        stages = self.cluster.stage_map.num_stages
        made = self._preparation.prepare(iteration, partial(self._call, iteration, 0, 0), schedule, trained)
        if made or self.cluster.stage_map.num_stages != stages:
            self.schedule_control.begin_again()
        if made:  # the plan stays
            assert self.deployment.plan is not None
            shards, brief = self.configuration.options.shard is not None, not self.context.fitting
            announce(self.deployment.plan, self.cluster, shards, self.splitter, brief)
        if self._preparation.check(iteration):
            return True
        if iteration.step not in self.deployment.undivided:
            self._run_skipped(iteration)
            self.models.skipped = frozenset(range(len(iteration.micro_batches)))
        return False

    def run(self, iteration: Iteration) -> bool:
        """Run the micro-batches of all pipelines; return False if the step has no stages."""
        step, works = iteration.step, iteration.micro_batches
        training, trains = step == STEP, iteration.trains
        num_pipelines, control = self.configuration.num_pipelines, self.schedule_control
        verifier = self.verifier if trains and self.verifier is not None and self.verifier.active else None
        if verifier is not None:
            verifier.begin_iteration()
        if not self.prepare(iteration):
            return False
        if training:
            self.freeze(trains)
        plan = self.deployment.plan
        assert plan is not None
        schedules = [self.schedule(parts, trains, runs=True) for parts in works]
        known = self._known(works, schedules[0], num_pipelines) if training and trains else frozenset()
        pipelines = self.models.pipelines_for(step, len(works))
        self.models.step_log.begin(sum(map(len, works)))
        tasks = [self.task(iteration, n, known) for n in range(len(works))]
        if verifier is not None:
            number, batch, divided = iteration.number, iteration.first_batch, iteration.shares > 1
            unverified = partial(self.finish, iteration)
            finish = verifier.begin(works, iteration.other_args, number, unverified, batch, divided)
            tasks = [replace(task, finish=partial(finish, n)) for n, task in enumerate(tasks)]
        ensemble = self.deployment.parallel.ensemble
        own = self.models.replicas.observers(schedules[0], num_pipelines, not self.accumulates) if trains else []
        if iteration.clears is not None:
            own = [iteration.clears, *own]
        with control.iteration(tasks[0], works, plan, schedules[0]):
            try:
                iteration.outcomes = run_together(pipelines, step, schedules, tasks, [*own, *control.observers])
                if iteration.clears is not None:
                    iteration.clears.end()
            finally:
                if ensemble is not None:
                    ensemble.place(0)
        with iteration.precision():  # it may determine the type of logged numbers
            self.models.step_log.begin_exchange() if training else self.models.step_log.flush()
        if training:
            iteration.outcomes = self.of_replicas(iteration.outcomes)
        return True

    def task(self, iteration: Iteration, n: int, starts_from_kept: frozenset[int] = frozenset()) -> Task:
        """Return the work of one pipeline in an iteration.

        Args:
            iteration: the iteration.
            n: number of the pipeline.
            starts_from_kept: micro-batches that begin with kept outputs of frozen layers.
        """
        pipeline, before = iteration.first
        return Task(
            partial(self._call, iteration, n),
            [(part.data, *iteration.other_args) for part in iteration.micro_batches[n]],
            partial(self.finish, iteration, n) if iteration.trains else None,
            RandomKey(self.configuration.seed, iteration.number, pipeline + n, before),
            starts_from_kept,
            partial(self._around, iteration, n),
        )

    def _call(self, iteration: Iteration, n: int, i: int, *args: Any) -> Any:
        """Call the step function with micro-batch i of pipeline n."""
        with self._around(iteration, n, i):
            return getattr(self.module, iteration.step)(*args)

    @contextlib.contextmanager
    def _around(self, iteration: Iteration, n: int, i: int) -> Iterator[None]:
        """Within this context the step function is called with a micro-batch."""
        part, (pipeline, before) = iteration.micro_batches[n][i], iteration.first
        weight = self.splitter.log_weight(part, iteration.micro_batches[n])
        logs = self.models.step_log.micro_batch(part.size, (pipeline + n, before + i), weight, iteration.entries)
        divided, apart = self.cluster.stage_map.num_stages > 1, self.cluster.group.world_size > 1
        optimizers = read_only(self.trainer.optimizers if divided else (), apart)
        with self.order.calling(iteration), iteration.precision(), logs, optimizers:
            yield

    def freeze(self, trains: bool) -> None:
        """Agree on which stages have nothing to train; if ``trains``, they run forwards only. All processes call it."""
        trained = self._preparation.agree_on_trained()
        if trains:
            self.schedule_control.freeze(trained.frozen_stages)

    def skipped(self, iteration: Iteration, skipped: list[bool]) -> frozenset[int]:
        """Return the numbers of the pipelines whose batch has no loss, given what this process knows of each."""
        frozen = self.schedule_control.choice.frozen  # frozen first stages get no gradient, from which they would know
        # with stages that are shared, each process knows of its own micro-batches only
        shared = self.configuration.rolls and self.cluster.stage_map.stage_replicas
        if iteration.trains and (frozen or shared) and self.cluster.group.world_size > 1:
            self.order.run_until(self.cluster.control.has_news)
            skipped = self.cluster.control.broadcast(skipped)
        return frozenset(n for n, is_skipped in enumerate(skipped) if is_skipped)

    def result(self, iteration: Iteration) -> Any:
        """Return the merged result of the first batch, None if all its micro-batches were skipped.

        If pipelines divide a batch, this is the result of the pipelines that have ended. The method also sets
        ``iteration.loss``, and marks the step's changes to be brought to the other processes.
        """
        self._to_bring.add(iteration.step)
        nothing, ended = torch.zeros((), device=self.cluster.device), iteration.outcomes[: iteration.shares]
        results = [result for outcome in ended for result in outcome.results or ()]
        parts = [part for share in iteration.micro_batches[: len(ended)] for part in share]
        result = self._merged(results, parts) if results else {"loss": nothing}
        if result is None and self.cluster.stage_map.replicas > 1:  # other replicas may have a loss
            result = {"loss": nothing}
        iteration.loss = nothing if result is None else loss_in(result)
        return result

    def schedule(self, parts: Sequence[MicroBatch], trains: bool, runs: bool = False) -> Schedule:
        """Return the schedule of a pipeline for the given micro-batches; only forwards if it does not train.

        For ``runs`` see :meth:`ScheduleChoice.schedule`.
        """
        if not trains:
            return build("forward", self.cluster.stage_map.num_stages, len(parts))
        return self.schedule_control.schedule(parts, runs)

    def of_replicas(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes merged over the replicas of the last stage, if it has any. All of them call it."""
        replicas = sharing_last(self.cluster)
        if replicas is None:
            return outcomes
        there = [replace(o, results=tree.map_tensors(lambda t: t.detach().cpu(), o.results)) for o in outcomes]
        together = []
        for found in zip(*replicas.exchange_objects(there), strict=True):
            by_number = zip(*(outcome.results for outcome in found if outcome.results is not None), strict=True)
            results = [next((result for result in parts if result is not None), None) for parts in by_number]
            here = tree.map_tensors(lambda t: t.to(self.cluster.device), results)
            skipped = frozenset().union(*(outcome.skipped for outcome in found))
            together.append(Outcome(here, skipped, sum(outcome.count for outcome in found)))
        return together

    def _known(self, works: Sequence[Sequence[MicroBatch]], schedule: Schedule, num_pipelines: int) -> frozenset[int]:
        """Return the numbers of the micro-batches that begin with kept outputs. Every process calls it."""
        shortcut = self.deployment.pipeline.steps[STEP].shortcut
        if shortcut is None:
            return frozenset()
        found = shortcut.known([(part.data, part.size) for part in works[0]], schedule, num_pipelines)
        # memory is measured in an iteration without such shortcuts
        return frozenset() if self.schedule_control.measures(works) else found

    def _run_skipped(self, iteration: Iteration) -> None:
        """Run a batch that trains nothing, before the step is captured, for what the step changes and logs.

        The step runs on every process, so that attributes that it changes, such as counters, stay the same everywhere.
        """
        if on_meta(self.module):  # no process has the whole module
            return
        self.models.step_log.begin(sum(map(len, iteration.micro_batches)))
        with alone():
            for n, parts in enumerate(iteration.micro_batches):
                for i, part in enumerate(parts):
                    if self.cluster.rank == 0:
                        self._call(iteration, n, i, part.data, *iteration.other_args)
                        continue
                    with iteration.precision():
                        getattr(self.module, iteration.step)(part.data, *iteration.other_args)
        with iteration.precision():
            if iteration.step == STEP:
                self.models.step_log.begin_exchange()
            self.models.step_log.flush()

    def _merged(self, outputs: list[Any], parts: Sequence[MicroBatch]) -> Any:
        """Return the merged result of the micro-batches that were not skipped; None if all were skipped."""
        kept = [(output, part) for output, part in zip(outputs, parts, strict=True) if output is not None]
        if not kept:
            return None
        detached = [tree.map_tensors(Tensor.detach, output) for output, _ in kept]
        losses, (sizes, weights) = [loss_in(output) for output in detached], self.splitter.counts([p for _, p in kept])
        adds = self.configuration.options.loss_reduction == "sum"
        loss = torch.stack(losses).sum(0) if adds else mean(losses, weights)
        if not all(isinstance(output, Mapping) for output in detached):
            return loss
        merged = {}
        for name in dict.fromkeys(name for output in detached for name in output):
            having = [(o[name], s, w) for o, s, w in zip(detached, sizes, weights, strict=True) if name in o]
            merged[name] = merge(*map(list, zip(*having, strict=True)))
        return {**merged, "loss": loss}

    def _number(self, step: str) -> int:
        """Return a number that is unique among the batches of this step function, and the same in a resumed run."""
        # only completed batches count, since an interrupted one runs again after a resume
        trained = int(self.trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        if step == STEP:
            return 1 + trained
        evaluated = int(self.trainer._active_loop.batch_progress.total.ready)  # type: ignore[union-attr]
        # while fitting, Lightning starts counting the batches of validation again in each epoch
        return evaluated + (_MANY * trained if self.context.fitting else 0)
