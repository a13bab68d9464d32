"""An iteration of the pipeline: all forwards and backwards for the micro-batches of a batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.loss import loss_in, trainable_loss
from lightning_avgpipe.engine.microbatch import MicroBatch, mean, merge
from lightning_avgpipe.engine.pipeline import Outcome, Pipeline, run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.schedule import Schedule, build
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.configuration import Configuration
from lightning_avgpipe.strategy.parallel_models import ParallelModels
from lightning_avgpipe.strategy.preparation import Preparation, Works
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.replicas import sharing_last
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.random_streams import RandomKey, host_lent
from lightning_avgpipe.verify import Verifier
from lightning_avgpipe.verify.plain import quiet
from lightning_avgpipe.weights.initialisation import on_meta

Finish = Callable[[int, int, Any], Tensor | None]  # (pipeline, micro-batch, result) -> what the backward begins with


@dataclass(kw_only=True)
class Iterations:
    """Runs the steps of one run of the trainer.

    Attributes:
        trainer: trainer of the run.
        cluster: the connected processes.
        configuration: the strategy's options as they are now.
        deployment: deployment of the module on processes.
        preparation: captures steps and makes their stages.
        splitter: splits batches.
        models: the models that are trained.
        schedule_control: gives an iteration of training its schedule.
        verifier: compares the first iterations with plain ones; None if there is no verification.
        zero_grad: clears the gradients of the training step that runs now; None if they accumulate.
    """

    trainer: pl.Trainer
    cluster: Cluster
    configuration: Configuration
    deployment: Deployment
    preparation: Preparation
    splitter: BatchSplitter
    models: ParallelModels
    schedule_control: ScheduleControl
    verifier: Verifier | None = None
    zero_grad: Callable[[], None] | None = None

    @property
    def _module(self) -> pl.LightningModule:
        return self.trainer.lightning_module

    @contextlib.contextmanager
    def clearing_gradients(self, zero_grad: Callable[[], None] | None) -> Iterator[None]:
        """Within this context a training step clears the gradients where Lightning does: before its first backward."""
        # gradients are cleared once, also if the step fails on micro-batches and runs again on the whole batch
        self.zero_grad = None if zero_grad is None else functools.cache(zero_grad)
        try:
            yield
        finally:
            self.zero_grad = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def train(self, batches: Sequence[Any], *rest: Any) -> Any:
        """Run all forwards and backwards of a batch for each pipeline.

        A micro-batch for which the step returns None has no backward. With none left the batch is skipped.

        Returns:
            What the step would have returned for the first batch, detached; None if it is skipped.
        Raises:
            MicroBatchError: the step cannot be captured on a micro-batch; whole batches can be tried. All processes
                raise it.
        """
        if self.zero_grad is not None and self.deployment.arrange(batches):
            self.schedule_control.begin_again()
        works = [self.splitter.split(part, n) for n, part in enumerate(batches)]
        weighed = self.splitter.weighing(works)
        # Lightning's weight averaging passes over the data once more without training
        trains = not self.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        finish = self._finish(weighed, self._clear_now())
        context = self.trainer.precision_plugin.train_step_context
        outcomes = self._run("training_step", context, works, rest, finish if trains else None, whole=batches[0])
        models, works = self.models, weighed()
        if not outcomes:  # the step skips the whole batch, and has not been captured yet
            models.skipped = frozenset(range(len(works)))
            return None
        skipped = [len(found.skipped) == found.count for found in outcomes]
        if trains and self.schedule_control.choice.frozen and self.cluster.group.world_size > 1:
            skipped = self.cluster.channels.control.publish(skipped)  # no gradient tells the first stages
        models.skipped = frozenset(n for n, is_skipped in enumerate(skipped) if is_skipped)
        nothing = torch.zeros((), device=self.cluster.device)
        result: Any = {"loss": nothing}
        if outcomes[0].results is not None:
            result = self._merged(outcomes[0].results, works[0])
            if result is None and self.cluster.stage_map.replicas > 1:  # other replicas may have a loss
                result = {"loss": nothing}
        if trains:
            if not self.trainer.fit_loop._should_accumulate():
                self.deployment.models.sum_copied_gradients()
            fed = models.synchronise(len(works), steps=not self.trainer.fit_loop._should_accumulate())
        with context():
            self.models.step_log.issue()
        if trains:
            if self.verifier is not None:
                self.verifier.compare()
            for n in range(fed):
                models.after_backward(n, nothing if result is None else loss_in(result))
        return None if 0 in models.skipped else result

    def evaluate(self, step: str, batch: Any, *rest: Any) -> Any:
        """Run a step without backward; return the merged result on the last stage's rank, None elsewhere.

        Raises:
            MicroBatchError: the step cannot be captured on a micro-batch; see :meth:`train`.
        """
        contexts = {"validation_step": "val_step_context", "test_step": "test_step_context"}
        context = getattr(self.trainer.precision_plugin, contexts.get(step, "predict_step_context"))
        parts = self.splitter.split(batch, weighs=step != "predict_step" and self.splitter.loss_weight is not None)
        (outcome,) = self._run(step, context, [parts], rest, None)
        return None if outcome.results is None else merge(outcome.results, *self.splitter.counts(parts))

    def _clear_now(self) -> Callable[[], None] | None:
        """Clear the gradients at once where that cannot wait; else return what clears them after the first forward."""
        zero_grad = self.zero_grad
        waits = self.models.num_models == 1 and self.cluster.rank == 0 and not self.deployment.replans
        if zero_grad is None or waits:
            return zero_grad
        # other ranks have no result to wait for, and with several models the module may show another one by then
        self.models.clear_gradients()
        zero_grad()
        return None

    def _finish(
        self,
        weighed: Callable[[], Works],
        zero_grad: Callable[[], None] | None,
        tells: Callable[[Tensor], bool] = lambda loss: True,
    ) -> Finish:
        """Return the function that the last stage calls with the result of a micro-batch.

        Args:
            weighed: returns the micro-batches by pipeline, with their weights.
            zero_grad: called after the first forward; None: nothing is to be cleared.
            tells: is shown the first loss, and returns whether the hooks of a backward are called then.
        """
        module, precision = self._module, self.trainer.precision_plugin
        averages = self.configuration.options.loss_reduction == "mean"
        accumulate = self.trainer.accumulate_grad_batches
        started: list[None] = []

        def finish(n: int, i: int, result: Any) -> Tensor | None:
            if i == 0 and zero_grad is not None:  # after a forward, as on one device, and before all backwards
                with host_lent():
                    zero_grad()
            weight = weighed()[n][i].weight
            if result is None or (averages and not weight):  # a mean over nothing is not a number
                self.models.replicas.check_trains(i)
                return None
            loss = trainable_loss(result)
            if accumulate > 1:
                loss = loss / accumulate
            # the hooks of a batch are called once, with the first micro-batch's loss, since no other is known by then
            first = n == 0 and not started and tells(loss)
            with host_lent() if first else quiet(self.trainer, "on_before_backward"):
                loss = precision.pre_backward(loss, module)
            if n == 0:
                started.append(None)
            return loss * weight if averages and weight != 1.0 else loss

        return finish

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def _verifying(self) -> Verifier | None:
        """Return the verifier of this iteration, and let it begin; None if the iteration is not verified."""
        if self.verifier is None or not self.verifier.active:
            return None
        self.verifier.watch()
        return self.verifier

    def _first_numbers(self, num_pipelines: int) -> tuple[int, int]:
        """Return the numbers of this group's first pipeline, and of its first micro-batch of a batch.

        Groups train on batches of their own, but evaluate the same; replicas have further micro-batches of a batch.
        """
        team, replica = divmod(self.cluster.group_number, self.cluster.stage_map.replicas)
        each = self.configuration.options.microbatches(self.cluster.stage_map.given_stages)
        return team * num_pipelines, replica * each

    def _run(
        self,
        step: str,
        context: Callable[[], Any],
        works: Works,
        rest: Sequence[Any],
        finish: Finish | None,
        whole: Any = None,
    ) -> list[Outcome]:
        """Run the micro-batches of one pipeline or several; return nothing if a first batch is skipped altogether.

        Args:
            step: name of the step function.
            context: context of the precision plugin for the step.
            works: micro-batches by pipeline.
            rest: other arguments of the step.
            finish: see :meth:`_finish`; None: there is no backward.
            whole: the batch of the first pipeline, in one piece.
        """
        training, trains = step == "training_step", finish is not None
        num_pipelines = self.configuration.num_pipelines
        first, before = self._first_numbers(num_pipelines) if training else (0, 0)
        verifier = self._verifying() if trains else None
        run = partial(self._micro_batch, step, context, works, first, before)
        asked = self._schedule(works[0], trains)
        if not self.preparation.prepare(step, run, works, rest, asked, num_pipelines if training else 1):
            self._run_skipped(step, context, works, run, rest)
            return []
        if training:
            self._freeze(trains)
        schedules = [self._schedule(parts, trains, self.deployment.plan) for parts in works]
        known = self._known(works, schedules[0], num_pipelines) if training and trains else frozenset()
        pipelines = self.models.pipelines_for(step, len(works))
        self.models.step_log.begin(sum(map(len, works)))
        iteration = self._number(step)
        if verifier is not None and finish is not None:
            finish = verifier.begin(works, rest, iteration, finish, whole)
        tasks = [
            Task(
                partial(run, n),
                [(part.data, *rest) for part in parts],
                None if finish is None else partial(finish, n),
                RandomKey(self.configuration.seed, iteration, first + n, before),
                known,
                partial(self._around, step, context, works, first, before, n),
            )
            for n, parts in enumerate(works)
        ]
        outcomes = self._execute(step, works, pipelines, schedules, tasks)
        with context():  # which may decide the type of a number
            self.models.step_log.tell_groups() if training else self.models.step_log.issue()
        return self._of_replicas(outcomes) if training else outcomes

    def _execute(
        self,
        step: str,
        works: Works,
        pipelines: Sequence[Pipeline],
        schedules: Sequence[Schedule],
        tasks: Sequence[Task],
    ) -> list[Outcome]:
        """Run the tasks of all pipelines."""
        plan, ensemble = self.deployment.plan, self.deployment.models.ensemble
        num_pipelines = self.configuration.num_pipelines
        assert plan is not None
        trains = tasks[0].trains
        steps = trains and not self.trainer.fit_loop._should_accumulate()
        own = self.models.replicas.observers(schedules[0], num_pipelines, steps) if trains else []
        with self.schedule_control.iteration(tasks[0], works, plan, schedules[0], num_pipelines):
            try:
                outcomes = run_together(pipelines, step, schedules, tasks, [*own, *self.schedule_control.observers])
            finally:
                if ensemble is not None:
                    ensemble.place(0)
        return outcomes

    def _of_replicas(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of all replicas of the last stage together, if there are any. All of them call it."""
        replicas = sharing_last(self.cluster)
        if replicas is None:
            return outcomes
        there = [replace(o, results=tree.map_tensors(lambda t: t.detach().cpu(), o.results)) for o in outcomes]
        together = []
        for found in zip(*replicas.exchange_objects(there), strict=True):
            by_number = zip(*(outcome.results for outcome in found if outcome.results is not None), strict=True)
            results = [next((result for result in of if result is not None), None) for of in by_number]
            here = tree.map_tensors(lambda t: t.to(self.cluster.device), results)
            skipped = frozenset().union(*(outcome.skipped for outcome in found))
            together.append(Outcome(here, skipped, sum(outcome.count for outcome in found)))
        return together

    def _freeze(self, trains: bool) -> None:
        """Agree on which stages have nothing to train, and let them run forwards only. Every process calls it."""
        freezing = self.preparation.agree_on_trained()
        if trains:
            self.schedule_control.freeze(freezing.stages)

    def _known(self, works: Works, schedule: Schedule, num_pipelines: int) -> frozenset[int]:
        """Return the micro-batches whose forwards begin with kept outputs. Every process calls it."""
        shortcut = self.deployment.pipeline.steps["training_step"].shortcut
        if shortcut is None:
            return frozenset()
        found = shortcut.known([(part.data, part.size) for part in works[0]], schedule, num_pipelines)
        # memory is measured in an iteration in which everything runs
        return frozenset() if self.schedule_control.measures(works, num_pipelines) else found

    def _micro_batch(
        self,
        step: str,
        context: Callable[[], Any],
        works: Works,
        first: int,
        before: int,
        n: int,
        i: int,
        *args: Any,
    ) -> Any:
        """Call the step function with a micro-batch; for the arguments see :meth:`_around`."""
        with self._around(step, context, works, first, before, n, i):
            return getattr(self._module, step)(*args)

    @contextlib.contextmanager
    def _around(
        self,
        step: str,
        context: Callable[[], Any],
        works: Works,
        first: int,
        before: int,
        n: int,
        i: int,
        into: list[Any] | None = None,
    ) -> Iterator[None]:
        """Within this context the step function is called with a micro-batch.

        Args:
            step: name of the step function.
            context: context of the precision plugin for the step.
            works: micro-batches by pipeline.
            first: number of pipeline 0 among the pipelines of all teams.
            before: number of the batch's micro-batches on replicas before this one.
            n: number of the pipeline.
            i: number of the micro-batch.
            into: collects the logged values; None: the values of the batch that has begun.
        """
        part, weight = works[n][i], self.splitter.log_weight(works[n][i], works[n])
        position = first + n, before + i
        with self._calling(step), context(), self.models.step_log.micro_batch(part.size, position, weight, into):
            yield

    def _calling(self, step: str) -> AbstractContextManager[None]:
        """Return a context within which a step function is called."""
        return contextlib.nullcontext()

    def drain(self) -> None:
        """Do nothing: no later batch has begun."""

    def leave(self, together: bool = True) -> None:
        """Do nothing: no batch was read ahead."""

    def stepped(self) -> None:
        """Do nothing after the optimizers have stepped."""

    def _run_skipped(
        self, step: str, context: Callable[[], Any], works: Works, run: Callable[..., Any], rest: Sequence[Any]
    ) -> None:
        """Run a batch that trains nothing, before the step is captured, for what the step changes and logs.

        The step runs on every process, as on one device, so that attributes stay the same everywhere: it may count.
        """
        if on_meta(self._module):  # no process has the whole module
            return
        self.models.step_log.begin(sum(map(len, works)))
        with alone():
            for n, parts in enumerate(works):
                for i, part in enumerate(parts):
                    if self.cluster.rank == 0:
                        run(n, i, part.data, *rest)
                        continue
                    with context():
                        getattr(self._module, step)(part.data, *rest)
        with context():
            if step == "training_step":
                self.models.step_log.tell_groups()
            self.models.step_log.issue()

    def _schedule(self, parts: Sequence[MicroBatch], trains: bool, plan: Plan | None = None) -> Schedule:
        if not trains:
            return build("forward", self.cluster.stage_map.num_stages, len(parts))
        return self.schedule_control.schedule(parts, self.configuration.num_pipelines, plan)

    def _merged(self, outputs: list[Any], parts: Sequence[MicroBatch]) -> Any:
        """Return the merged result of the micro-batches that were not skipped; None if all were."""
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
        """Return a number that no other batch of this step function has, and that stays when a run resumes."""
        if step == "training_step":
            # completed batches are counted, since an interrupted one runs again after a resume
            return 1 + int(self.trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        return int(self.trainer._active_loop.batch_progress.total.ready)  # type: ignore[union-attr]
