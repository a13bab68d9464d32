"""Rolling iterations: a pipeline begins its next batch as soon as its own model is ready for it.

::

    process of stage 0     F0 F1   B0 B1 step F0 F1    B0 B1 step            pipeline 0
                               F0 F1 .. B0 B1  step F0 F1 .. B0 B1 step      pipeline 1, in the time that 0 leaves

Lightning works on batch t (a bundle: one for each pipeline). Within Lightning's optimization the pipelines end one
after the other, 0 to N-1. Each process does this for its own stages, and none waits for the steps of another:

1. run whatever can run here, of all pipelines, until the lanes of pipeline n have no actions of t left;
2. call the hooks of a backward, check gradients, call the hooks before a step, and step the optimizer, for model n;
3. average model n with the reference (``averaging/staggered.py``);
4. give the lanes of n the actions of batch t+1, which run in steps 1 of later pipelines, and in the next optimization.

The consequences:

- Updates come in the order (iteration, pipeline) on every stage, so the numbers do not depend on the timing.
- Several groups of processes learn of each other's updates an iteration later, and log together. Before an event that
  needs drained pipelines the groups wait for these updates. A drain that was not foreseen does not change results.
- At most one iteration runs early, and no optimizer steps early. So between two optimizations hooks find models and
  optimizers as they are after batch t; gradients, and buffers that a step changes, may belong to batch t+1 already.
- Batch t+1 is read when pipeline 0 has stepped, at the same point of the program in all processes. Its transfer hooks
  run then. All other hooks of t+1 run when Lightning's loop comes to it, in the usual order.
- A step that runs early sees the trainer's counters as they will be. It must not read what is not known yet (learning
  rates, metrics), and a hook must not change what the step reads: see ``AheadWatch``.
- Before an event that needs drained pipelines (a validation, a checkpoint every n steps, the end of an epoch or of
  training), nothing of the next iteration runs. If such an event was not foreseen, :meth:`RollingIterations.drain`
  discards what has run: no optimizer has used it, and buffers get their contents back. The batch is kept, and runs
  again.
- Iterations that are observed (timeline, first measurement of memory) run all pipelines to their end first, as without
  rolling; the updates are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.pipeline import Outcome, Pipeline
from lightning_avgpipe.engine.rolling_pipelines import RollingPipelines
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.strategy.ahead import STEP as _STEP
from lightning_avgpipe.strategy.ahead import AheadIterations, BatchRead
from lightning_avgpipe.strategy.checks import gives_way
from lightning_avgpipe.strategy.foresight import Progress, as_it_will_be
from lightning_avgpipe.strategy.preparation import Works
from lightning_avgpipe.utils.patching import nothing, replaced
from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(kw_only=True)
class _Iteration(BatchRead):
    """A batch for each pipeline, while it is on its way through the stages.

    Attributes:
        works: micro-batches by pipeline.
        begun: numbers of the pipelines that have begun the iteration.
        outcomes: outcomes of the pipelines that have ended; of all pipelines, if they ran without rolling.
        entries: values that steps have logged.
        loss: loss that the hooks of backwards are given.
        first_loss: loss of the first micro-batch that ran early, for a hook that is called later.
        kept: by pipeline, contents of buffers before the iteration began early.
    """

    works: Works
    begun: set[int] = field(default_factory=set)
    outcomes: list[Outcome] | None = None
    entries: list[Any] = field(default_factory=list)
    loss: Tensor | None = None
    first_loss: Tensor | None = None
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(kw_only=True)
class RollingIterations(AheadIterations):
    """Iterations of parallel models that overlap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rolling = RollingPipelines(self.cluster, _STEP)
        self._now: _Iteration | None = None  # iteration in which models step
        self._next: _Iteration | None = None  # iteration that has been read ahead
        self._trained: frozenset[str] = frozenset()  # parameters that were trained when the iteration began
        self.models.step_log.batch_values.refuses = lambda: self._mixed if self._checked and self._overlaps else ""

    def train(self, batches: Sequence[Any], *rest: Any) -> Any:
        """Run until pipeline 0 has ended its batch; without an optimizer step, until all pipelines have."""
        if not self._overlaps or self.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward:
            return super().train(batches, *rest)
        iteration, self._next = self._next, None
        if iteration is None:
            if self.zero_grad is not None and self.deployment.arrange(batches):
                self.schedule_control.begin_again()
            iteration = self._made(batches, rest, None)
        elif iteration.batches[0] is not batches[0] or iteration.changed:
            raise self.other_batch()
        iteration.progress = None
        self._clear_in_turn(iteration)
        if iteration.begun:
            self._foresight.check()
            if [*self.schedule_control.observers]:
                self._undo(iteration)
        if not self._run_first(iteration):
            return None
        result: Any = {"loss": torch.zeros((), device=self.cluster.device)}
        self._end(iteration, 0)
        assert iteration.outcomes is not None
        found = iteration.outcomes[0]
        if found.results is not None:
            result = self._merged(found.results, iteration.works[0])
        if result is not None:
            iteration.loss = loss_in(result)
        steps = not self.trainer.fit_loop._should_accumulate()
        self._after(iteration, 0, steps)
        rolls = self.configuration.rolls  # the first iteration may have found a reason against it
        if not steps or not rolls:
            for n in range(1, len(iteration.works)):
                self._end(iteration, n)
                self._after(iteration, n, steps)
            self._issue(iteration)
        self._now = iteration if steps and rolls else None
        return None if 0 in self.models.skipped else result

    def step_in_turn(self, step: Callable[[int], object]) -> None:
        """Let pipeline 0 begin its next iteration, now that it has stepped; let the others end, step and begin in turn.

        Args:
            step: steps the optimizers of a pipeline.
        """
        iteration, self._now = self._now, None
        ensemble, groups = self.deployment.models.ensemble, self.cluster.stage_map.num_teams
        if ensemble is None or (iteration is None and groups == 1):  # no batch was trained
            return
        try:
            goes_on = self._may_go_on()
            ensemble.averager.turns.begin()
            for n in range(ensemble.models.size):
                if iteration is not None and 0 < n < self.models.stepping:
                    if n < len(iteration.works):
                        self._end(iteration, n)
                        self._after(iteration, n, steps=True)
                    step(n)
                with self.schedule_control.observers.activity("averaging"):
                    ensemble.averager.turns.end(n)
                if iteration is not None and goes_on:
                    self._go_on(n, iteration)
            if not goes_on:  # the same in all groups
                ensemble.averager.turns.settle()
            if iteration is not None:
                self._issue(iteration)
                self._foresight.check()
        except BaseException:
            self.broken()
            raise

    def drain(self) -> None:
        """Drain the pipelines: models, buffers and channels are as after the last batch. Every process calls it.

        An iteration that has begun early is discarded, and runs again.
        """
        if self._next is not None:
            self._undo(self._next)

    def leave(self, together: bool = True) -> None:
        """Drop the batches that were read ahead: the epoch ends, or batches change.

        Args:
            together: whether every process calls it; else the channels are not used any more.
        """
        if self._next is not None:
            self._undo(self._next, together)
        self._next = None
        self.batches.forget_ahead()
        if together and self.deployment.models.ensemble is not None:
            self.deployment.models.ensemble.averager.turns.settle()

    def give_way(self) -> bool:
        """Stop rolling for this run, with ``rolling="auto"``, if the captured step or its data do not allow it.

        Return whether that is so: pipelines then wait for each other. Every process calls it.
        """
        if not self.configuration.is_open or _STEP not in self.deployment.pipeline.steps:
            return False
        gives = gives_way(self._against(), self.cluster)
        self.configuration.can_roll = not gives
        return gives

    def _against(self) -> str:
        return super()._against() or (self._mixed if self.models.step_log.batch_values.in_step is not None else "")

    @property
    def _mixed(self) -> str:
        """The error message for a metric object that the step updates."""
        metric = self.models.step_log.batch_values.in_step
        name = next(path for path, m in self._module.named_modules() if m is metric)
        return (
            f"{type(self._module).__name__}.{_STEP} updates the metric object '{name}', but with {self._option} it "
            "would see micro-batches of two batches mixed; log tensors, update it in a hook that looks at the outputs "
            f"(on_train_batch_end), or use {self._instead}"
        )

    @property
    def _first(self) -> int:
        """The number of pipeline 0 among the pipelines of all groups."""
        return self.cluster.group_number // self.cluster.stage_map.replicas * self.configuration.num_pipelines

    @property
    def _pipelines(self) -> list[Pipeline]:
        return self.deployment.models.pipelines

    # -- an iteration ------------------------------------------------------------------------------------------------

    def _made(self, batches: Sequence[Any], rest: tuple[Any, ...], progress: Progress | None) -> _Iteration:
        works = [self.splitter.split(one, n) for n, one in enumerate(batches)]
        number = self._number(_STEP) + (progress is not None)
        return _Iteration(number=number, works=works, batches=batches, rest=rest, progress=progress)

    def _clear_in_turn(self, iteration: _Iteration) -> None:
        """Clear the gradients as Lightning does; in an iteration that has begun early, only call the hooks."""
        zero_grad = self.zero_grad
        if zero_grad is None:
            pass
        elif not iteration.begun:
            self.models.clear_gradients()
            zero_grad()
        else:
            self.models.fed = 0
            with replaced(self._module, "optimizer_zero_grad", nothing):
                zero_grad()
        if iteration.first_loss is not None:
            self.trainer.precision_plugin.pre_backward(iteration.first_loss, self._module)

    def _run_first(self, iteration: _Iteration) -> bool:
        """Begin the pipelines that have not begun, or run all to the end; return whether there is anything to run."""
        works = iteration.works
        context = self.trainer.precision_plugin.train_step_context
        self.models.skipped, before = frozenset(), self._pipelines
        if not iteration.begun and self._checked:
            self._freeze(trains=True)
        if iteration.begun or self._rolls(iteration):
            self.models.pipelines_for(_STEP, len(works))
            others = any(p is not before for p, before in zip(self._pipelines, before, strict=False))
            if iteration.begun and (others or self._trained != self._trained_now):
                raise self.others_trained()
            self._begin_turns()
            iteration.outcomes = iteration.outcomes or []
            for n in range(len(works)):
                if n not in iteration.begun:
                    self._begin(iteration, n)
            return True
        finish = self._finish(lambda: works, None)
        iteration.outcomes = self._run(_STEP, context, works, iteration.rest, finish)
        iteration.begun = set(range(len(works)))
        if not iteration.outcomes:
            self.models.skipped = frozenset(iteration.begun)
            return False
        with context():
            self.models.step_log.issue()
        if not self._checked and self.give_way():
            return True
        self._check_graph()
        self._begin_turns()
        return True

    def _begin_turns(self) -> None:
        assert self.deployment.models.ensemble is not None
        self.deployment.models.ensemble.averager.turns.begin()
        self._foresight.begin(self.deployment.pipeline.graph(_STEP))
        self._trained = self._trained_now

    def _rolls(self, iteration: _Iteration) -> bool:
        """Return whether this iteration may overlap others: the stages are there, and nothing observes it alone."""
        ensemble = self.deployment.models.ensemble
        return (
            self._checked
            and _STEP in self.deployment.pipeline.steps
            and ensemble is not None
            and ensemble.models.size == self.configuration.num_pipelines
            and not self.deployment.replans
            and not [*self.schedule_control.observers]
            and not self.schedule_control.measures(iteration.works, self.configuration.num_pipelines)
        )

    def _begin(self, iteration: _Iteration, n: int) -> None:
        """Give pipeline n the actions of an iteration; none of them runs yet."""
        works = iteration.works
        if iteration.finish is None:
            iteration.finish = self._finish(lambda: works, None, partial(self._announce_loss, iteration))
        task = Task(
            partial(self._rolled, iteration, n),
            [(part.data, *iteration.rest) for part in works[n]],
            partial(iteration.finish, n),
            RandomKey(self.configuration.seed, iteration.number, self._first + n),
            around=partial(self._around_rolled, iteration, n),
        )
        self._rolling.begin(self._pipelines[n], self._schedule(works[n], True), task)
        iteration.begun.add(n)

    def _announce_loss(self, iteration: _Iteration, loss: Tensor) -> bool:
        """Return whether hooks are told of the first loss now; keep the loss of an early iteration for later."""
        if iteration.progress is not None:
            iteration.first_loss = loss.detach()
        return iteration.progress is None

    def _rolled(self, iteration: _Iteration, n: int, i: int, *args: Any) -> Any:
        """Call the step function with a micro-batch, whichever batch Lightning's loop is at."""
        with self._around_rolled(iteration, n, i):
            return getattr(self._module, _STEP)(*args)

    @contextlib.contextmanager
    def _around_rolled(self, iteration: _Iteration, n: int, i: int) -> Iterator[None]:
        """Within this context the step function is called with a micro-batch."""
        context, works = self.trainer.precision_plugin.train_step_context, iteration.works
        with (
            as_it_will_be(self.trainer, iteration.progress),
            replaced(self._module, "_current_fx_name", _STEP),
            self._around(_STEP, context, works, self._first, 0, n, i, iteration.entries),
        ):
            yield

    def _end(self, iteration: _Iteration, n: int) -> None:
        """Run until pipeline n has ended the iteration."""
        assert iteration.outcomes is not None and self.deployment.models.ensemble is not None
        if n == len(iteration.outcomes):
            try:
                iteration.outcomes.append(self._rolling.finish(n))
            finally:
                self.deployment.models.ensemble.place(0)
        skipped = len(iteration.outcomes[n].skipped) == len(iteration.works[n])
        if self.schedule_control.choice.frozen and self.cluster.group.world_size > 1:
            skipped = self.cluster.channels.control.publish(skipped)  # no gradient tells the first stages
        if skipped:
            self.models.skipped |= {n}

    def _after(self, iteration: _Iteration, n: int, steps: bool) -> None:
        """Sum the gradients of tied parameters, call the hooks of a backward, and check the gradients of pipeline n."""
        if steps:
            self.deployment.models.sum_copied_gradients(n)
        loss = torch.zeros((), device=self.cluster.device) if iteration.loss is None else iteration.loss
        self.models.after_backward(n, loss)
        if steps:
            self.models.check.look_at(n)

    def _issue(self, iteration: _Iteration) -> None:
        if iteration.finish is None:  # the iteration did not roll, and has logged
            return
        with self.trainer.precision_plugin.train_step_context():
            self.models.step_log.issue_collected(iteration.entries)

    # -- the next iteration -------------------------------------------------------------------------------------------

    def _go_on(self, n: int, iteration: _Iteration) -> None:
        """Let pipeline n begin the next iteration, if it may."""
        if n == 0:
            self._next = self._read_ahead(iteration)
        if self._next is None or n >= len(self._next.works) or not self._rolls(self._next):
            return
        self._next.kept[n] = {name: tensor.detach().clone() for name, tensor in self._buffers(n).items()}
        self._clear(n)
        self._begin(self._next, n)

    def _read_ahead(self, iteration: _Iteration) -> _Iteration | None:
        """Return the next iteration; None if it must not begin early. Every process gets the same."""
        if [*self.schedule_control.observers]:
            return None
        batches = self.batches.read_ahead()
        if not batches:
            return None
        rest = tuple(index + 1 for index in iteration.rest)  # batch_idx, if the step takes it
        return self._made(batches, rest, Progress.after_steps(self.trainer))

    def _buffers(self, n: int) -> dict[str, Tensor]:
        """Return the tensors of one model that a step writes into, other than trained parameters."""
        assert self.deployment.models.ensemble is not None
        return self.deployment.models.ensemble.models.buffers(n, self.deployment.pipeline.graph(_STEP).changed)

    def _clear(self, n: int) -> None:
        """Clear the gradients of one model."""
        assert self.deployment.models.ensemble is not None
        if n:
            self.deployment.models.ensemble.models.replicas[n].clear_gradients()
        else:
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()

    def _undo(self, iteration: _Iteration, together: bool = True) -> None:
        """Discard what an early iteration has run; no optimizer has used it."""
        begun, iteration.begun = sorted(iteration.begun), set()
        if together and self.cluster.group.world_size > 1:
            for n in begun:  # run to the end, since messages are on their way
                self._rolling.finish(n)
        self._rolling.clear()
        ensemble = self.deployment.models.ensemble
        if ensemble is not None and begun:
            ensemble.place(0)
            for n in begun:
                self._clear(n)
        with torch.no_grad():
            for n, kept in iteration.kept.items():
                for name, tensor in self._buffers(n).items():
                    tensor.copy_(kept[name])
        iteration.kept, iteration.entries = {}, []
        iteration.first_loss = iteration.finish = iteration.outcomes = None
