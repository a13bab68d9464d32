"""Rolling iterations: a pipeline begins its next batch as soon as its own model is ready for it.

::

    process of stage 0     F0 F1   B0 B1 step F0 F1    B0 B1 step            pipeline 0
                               F0 F1 .. B0 B1  step F0 F1 .. B0 B1 step      pipeline 1, in the time that 0 leaves

Lightning works on batch t (a bundle: one for each pipeline). Within Lightning's optimization the pipelines end one
after the other, 0 to N-1. Each process does this for its own stages, and none waits idly for the steps of another:

1. run whatever can run here, of all pipelines, until the lanes of pipeline n have no actions of t left;
2. sum the gradients of tied parameters, and wait for the other processes if norms of gradients are clipped, while
   whatever can run here runs; call the hooks of a backward, check gradients, call the hooks before a step, and step the
   optimizer, for model n;
3. average model n with the reference (``averaging/staggered.py``);
4. give the lanes of n the actions of batch t+1, which run in steps 1 of later pipelines, and in the next optimization.

The consequences:

- Updates come in the order (iteration, pipeline) on every stage, so the numbers do not depend on the timing.
- Several groups of processes get each other's updates an iteration later, and log together. Before an event that needs
  drained pipelines the groups wait for these updates. A drain that was not foreseen does not change results.
- At most one iteration runs early, and no optimizer steps early. So between two optimizations hooks find models and
  optimizers as they are after batch t; gradients, and buffers that a step changes, may belong to batch t+1 already.
- Batch t+1 is read when pipeline 0 has stepped, at the same point of the program in all processes. Its transfer hooks
  run then. All other hooks of t+1 run when Lightning's loop comes to it, in the usual order.
- A step that runs early sees the trainer's counters as they will be. It must not read what is not known yet (learning
  rates, metrics), and a hook must not change what the step reads: see ``Overlap``.
- Before an event that needs drained pipelines (a validation, a checkpoint every n steps, the end of an epoch or of
  training), nothing of the next iteration runs. If such an event was not foreseen, :meth:`RollingOrder.drain`
  discards what has run: no optimizer has used it, and buffers get their contents back. The batch is kept, and runs
  again.
- Iterations that are observed (timeline, first measurement of memory) run all pipelines to their end first, as without
  rolling; the updates are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.engine.pipeline import Engine, Pipeline
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.ahead import Overlap
from lightning_avgpipe.strategy.checks import is_rolling_refused
from lightning_avgpipe.strategy.iteration import STEP, Iteration, IterationOrder
from lightning_avgpipe.strategy.loop import PipelineLoop
from lightning_avgpipe.training.replicas import sharing_last
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.patching import noop, replaced
from lightning_avgpipe.utils.torch_compat import version_of


class RollingOrder(IterationOrder):
    """Iterations of parallel models that overlap."""

    def __init__(self, loop: PipelineLoop) -> None:
        super().__init__(loop)
        self.overlap = Overlap(loop)
        self._engine = Engine(loop.cluster, STEP, rolls=True)
        self._now: Iteration | None = None  # iteration in which models step
        # versions of the weights, by name, of each model that has begun the next iteration
        self._versions: dict[int, dict[str, int]] = {}
        self._meets = False  # whether processes wait for each other before a model steps, to take norms of gradients
        values = loop.models.step_log.batch_values
        values.why_refused = lambda: self._metric_refused if self.overlap.checked and self.overlaps else ""

    @property
    def overlaps(self) -> bool:
        """Whether iterations of this run may overlap now."""
        return self.loop.configuration.rolls and self.loop.models.num_models > 1

    def calling(self, iteration: Iteration) -> AbstractContextManager[None]:
        """Return a context within which a step function is called, maybe before Lightning's loop is at its batch."""
        overlaps = iteration.step == STEP and self.overlaps
        return self.overlap.calling(iteration) if overlaps else super().calling(iteration)

    def train(self, batches: Sequence[Any], rest: tuple[Any, ...]) -> Any:
        """Run until pipeline 0 has ended its batch; if no optimizer steps after it, until all pipelines have.

        See :meth:`IterationOrder.train`.
        """
        loop, overlap = self.loop, self.overlap
        if not self.overlaps or loop.is_averaging_pass:
            return super().train(batches, rest)
        loop.models.add_to_sums()
        if not overlap.coming:
            loop.arrange(batches)
        iteration = overlap.take(batches, rest)
        self._clear_in_turn(iteration)
        if iteration.begun:
            overlap.check()
            self._check_weights(iteration)
            if [*loop.schedule_control.observers]:
                self._undo(iteration)
        if not self._run_first(iteration):
            return None
        self._end(iteration, 0)
        result, steps = loop.result(iteration), not loop.accumulates
        self._after(iteration, 0, steps)
        goes_on = steps and loop.configuration.rolls  # False if the first iteration has found a reason not to roll
        if not goes_on:
            for n in range(1, len(iteration.micro_batches)):
                self._end(iteration, n)
                self._after(iteration, n, steps)
            self._issue(iteration)
        self._now, overlap.awaits_step = iteration if goes_on else None, goes_on
        return None if 0 in loop.models.skipped else result

    def step_in_turn(self, step: Callable[[int], object]) -> None:
        """Average model 0, which has stepped, and begin its next iteration; then end, step and average the others.

        Args:
            step: steps the optimizers of a pipeline.
        """
        loop, iteration, self._now, self.overlap.awaits_step = self.loop, self._now, None, False
        if loop.deployment.parallel.ensemble is None or (iteration is None and loop.cluster.stage_map.num_teams == 1):
            return  # no batch was trained
        ensemble, observers = self._ensemble, loop.schedule_control.observers
        try:
            goes_on = self.overlap.may_go_on()
            ensemble.averager.begin_staggered()
            for n in range(ensemble.models.size):
                if iteration is not None and 0 < n < loop.models.num_stepping:
                    if n < len(iteration.micro_batches):
                        self._end(iteration, n)
                    self._after(iteration, n, steps=True)  # also without a batch: it may have accumulated gradients
                    step(n)
                with observers.activity("averaging"):
                    ensemble.averager.average_one(n)
                if iteration is not None and goes_on:
                    self._go_on(n, iteration)
            if not goes_on:  # decided alike in all groups, which reset together
                ensemble.averager.reset()
            if iteration is not None:
                self._issue(iteration)
                self.overlap.check()
                self._versions = {n: self._versions_of(n) for it in self.overlap.coming for n in it.begun}
        except BaseException:
            loop.context.connection.failed = True  # some models have stepped and others have not
            raise

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run the actions of all pipelines that are ready in this process until ``over()`` returns True."""
        if self._engine.runs:
            with self._running():
                self._engine.run_until(over)

    def run_until_all_arrive(self, what: str, members: Collectives | None = None) -> None:
        """Run the actions that are ready in this process until all members have called this; see the base class."""
        members = members or self.loop.cluster.group
        if self._engine.runs and members.world_size > 1:
            met = members.begin_barrier(what)
            self.run_until(met.over.is_set)
            met.finish()

    def drain(self) -> None:
        """Discard what has run of the next iteration; let the reference follow what hooks have changed in models."""
        for iteration in self.overlap.coming:
            self._undo(iteration)
        if self.loop.deployment.parallel.ensemble is not None:
            self._ensemble.settle()

    def put_back(self) -> None:
        """Put back the batches that were read ahead; see :meth:`IterationOrder.put_back`."""
        for iteration in self.overlap.coming:
            self._undo(iteration)
        self.overlap.return_batches()
        if not self.loop.context.connection.failed and self.loop.deployment.parallel.ensemble is not None:
            self._ensemble.averager.reset()

    def stop_if_refused(self) -> bool:
        """With ``rolling="auto"``, stop rolling for this run if the captured step or its data do not allow it.

        Every process calls it.

        Returns:
            Whether rolling has stopped, so that pipelines wait for each other from now on.
        """
        loop = self.loop
        if not loop.configuration.may_stop_rolling or STEP not in loop.deployment.pipeline.steps:
            return False
        refused = is_rolling_refused(self.overlap.why_not() or self._metric_refused, loop.cluster)
        loop.configuration.can_roll = not refused
        return refused

    @property
    def _metric_refused(self) -> str:
        """The error message for a metric object that the step updates; empty if it updates none."""
        metric, module = self.loop.models.step_log.batch_values.in_step, self.loop.module
        if metric is None:
            return ""
        name = next(path for path, m in module.named_modules() if m is metric)
        return (
            f"{type(module).__name__}.{STEP} updates the metric object '{name}', but with {self.overlap.option} it "
            "would see micro-batches of two batches mixed; log tensors, update it in a hook that looks at the outputs "
            f"(on_train_batch_end), or use {self.overlap.instead}"
        )

    @property
    def _pipelines(self) -> list[Pipeline]:
        return self.loop.deployment.parallel.pipelines

    @property
    def _ensemble(self) -> Ensemble:
        ensemble = self.loop.deployment.parallel.ensemble
        assert ensemble is not None
        return ensemble

    # -- an iteration ------------------------------------------------------------------------------------------------

    def _clear_in_turn(self, iteration: Iteration) -> None:
        """Clear the gradients as Lightning does. If the iteration has begun early, only call the hooks, now due."""
        loop, zero_grad = self.loop, self.loop.zero_grad
        if zero_grad is None:
            pass
        elif not iteration.begun:
            loop.models.clear_gradients(zero_grad)
        else:
            loop.models.num_fed = 0
            with replaced(loop.module, "optimizer_zero_grad", noop):
                zero_grad()
        if iteration.first_loss is not None:
            loop.trainer.precision_plugin.pre_backward(iteration.first_loss, loop.module)

    def _run_first(self, iteration: Iteration) -> bool:
        """Begin the pipelines that have not begun; if the iteration cannot overlap others, run all to their end.

        Returns:
            False if the batch is skipped, since it trains nothing and there are no stages yet.
        """
        loop, overlap, numbers = self.loop, self.overlap, range(len(iteration.micro_batches))
        loop.models.skipped, before = frozenset(), self._pipelines
        if not iteration.begun and overlap.checked:
            loop.freeze(trains=True)
        if iteration.begun or self._rolls(iteration):
            loop.models.pipelines_for(STEP, len(numbers))
            if iteration.begun:
                overlap.check_trained(any(p is not old for p, old in zip(self._pipelines, before, strict=False)))
            self._begin_turns()
            for n in numbers:
                if n not in iteration.begun:
                    self._begin(iteration, n)
            return True
        ran = loop.run(iteration)
        iteration.begun = set(numbers)
        if not ran:
            return False
        with iteration.precision():
            loop.models.step_log.flush()
        if not overlap.checked and self.stop_if_refused():
            return True
        overlap.check_graph(self._metric_refused)
        self._begin_turns()
        return True

    def _begin_turns(self) -> None:
        self._ensemble.settle()
        self._ensemble.averager.begin_staggered()
        self.overlap.begin()

    def _versions_of(self, n: int) -> dict[str, int]:
        return {name: version_of(weight) for name, weight in self._ensemble.models.parameters(n).items()}

    def _check_weights(self, iteration: Iteration) -> None:
        """Check that hooks have changed no weights of models that have begun this iteration.

        Raises:
            ConfigurationError: they have changed some, which the message names.
        """
        now = {n: self._versions_of(n) for n in sorted(iteration.begun)}
        changed = [f"'{name}'" for n in now for name, was in self._versions[n].items() if now[n].get(name) != was]
        if changed:
            raise ConfigurationError(
                f"with {self.overlap.option} a hook of a batch has changed {listed(list(dict.fromkeys(changed)))}, "
                "with which micro-batches of the next batch may have run already. Change weights where gradients are "
                f"seen (on_before_optimizer_step) or where the pipeline drains (on_train_epoch_end), or use "
                f"{self.overlap.instead}"
            )

    def _rolls(self, iteration: Iteration) -> bool:
        """Return whether an iteration may overlap others: it has stages, and is not verified, observed or measured."""
        deployment, num_pipelines = self.loop.deployment, self.loop.configuration.num_pipelines
        verifier = self.loop.verifier
        return (
            self.overlap.checked
            and (verifier is None or not verifier.active)
            and STEP in deployment.pipeline.steps
            and deployment.parallel.ensemble is not None
            and deployment.parallel.ensemble.models.size == num_pipelines
            and not deployment.replans
            and not [*self.loop.schedule_control.observers]
            and not self.loop.schedule_control.measures(iteration.micro_batches)
        )

    def _begin(self, iteration: Iteration, n: int) -> None:
        """Give pipeline n the actions of an iteration; none of them runs yet."""
        loop = self.loop
        if iteration.entries is None:
            iteration.entries = []
        schedule = loop.schedule(iteration.micro_batches[n], True)
        self._engine.begin([self._pipelines[n]], [schedule], [loop.task(iteration, n)])
        iteration.begun.add(n)

    def _end(self, iteration: Iteration, n: int) -> None:
        """Run until pipeline n has ended the iteration, and note whether its batch was skipped."""
        if n == len(iteration.outcomes):
            with self._running():
                ended = self._engine.finish([n])
            if (replicas := sharing_last(self.loop.cluster)) is not None:
                self.run_until_all_arrive(f"the end of pipeline {n}", replicas)
            iteration.outcomes += self.loop.of_replicas(ended)
        is_skipped = len(iteration.outcomes[n].skipped) == len(iteration.micro_batches[n])
        if self.loop.skipped(iteration, [is_skipped]):
            self.loop.models.skipped |= {n}

    def _after(self, iteration: Iteration, n: int, steps: bool) -> None:
        """Sum the gradients of model n over copies and replicas, call the hooks after the backward, and check them."""
        assert iteration.loss is not None
        if self.loop.models.decide_to_sum(steps):
            sums = self.loop.deployment.parallel.begin_sum(n, replicas=True)
            self.run_until(sums.is_over)
            sums.finish()
        self.loop.models.replicas.copy_changed([n])
        if n == 0:
            norms = self.loop.models.norms
            self._meets, norms.taken = norms.taken, False
        if steps and self._meets:
            self.run_until_all_arrive(f"the step of pipeline {n}")
        if n == 0 and self.loop.verifier is not None:
            self.loop.verifier.compare()
        if n < len(iteration.micro_batches):
            self.loop.models.after_backward(n, iteration.loss)
        if steps:
            self.loop.models.check.check_model(n)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Run actions, which show the model of their pipeline, within this context; show model 0 after it."""
        try:
            with torch.enable_grad():
                yield
        finally:
            self._ensemble.place(0)

    def _issue(self, iteration: Iteration) -> None:
        if iteration.entries is not None:  # otherwise the iteration did not roll, and its values are logged already
            with iteration.precision():
                self.loop.models.step_log.flush_collected(iteration.entries)

    # -- the next iteration -------------------------------------------------------------------------------------------

    def _go_on(self, n: int, iteration: Iteration) -> None:
        """Let pipeline n begin the next iteration, if it may; pipeline 0 reads its batches."""
        if n == 0 and not [*self.loop.schedule_control.observers]:
            self.overlap.read_ahead(iteration.other_args)
        following = self.overlap.coming[0] if self.overlap.coming else None
        if following is None or n >= len(following.micro_batches) or not self._rolls(following):
            return
        following.kept[n] = {name: tensor.detach().clone() for name, tensor in self._buffers(n).items()}
        self._clear(n)
        self._begin(following, n)

    def _buffers(self, n: int) -> dict[str, Tensor]:
        """Return the tensors of one model that a step writes into, other than trained parameters."""
        return self._ensemble.models.buffers(n, self.loop.deployment.pipeline.graph(STEP).changed)

    def _clear(self, n: int) -> None:
        """Clear the gradients of one model."""
        if n:
            self._ensemble.models.each[n].clear_gradients()
        else:
            for optimizer in self.loop.trainer.optimizers:
                optimizer.zero_grad()

    def _undo(self, iteration: Iteration) -> None:
        """Discard what has run of an early iteration, which no optimizer has used yet, and restore buffers."""
        begun, iteration.begun = sorted(iteration.begun), set()
        if not self.loop.context.connection.failed and self.loop.cluster.group.world_size > 1:
            with torch.enable_grad():
                for n in begun:  # run to the end, so that no message stays in a channel
                    self._engine.finish([n])
        self._engine.clear()
        if self.loop.deployment.parallel.ensemble is not None and begun:
            self._ensemble.place(0)
            for n in begun:
                self._clear(n)
        with torch.no_grad():
            for n, kept in iteration.kept.items():
                for name, tensor in self._buffers(n).items():
                    tensor.copy_(kept[name])
        iteration.kept, iteration.outcomes = {}, []
        iteration.first_loss = iteration.entries = None


def order(loop: PipelineLoop) -> RollingOrder | None:
    """Return a rolling order if the pipelines of the run can roll; otherwise None."""
    return RollingOrder(loop) if loop.configuration.can_roll else None
