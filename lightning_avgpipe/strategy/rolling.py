"""Rolling iterations: a pipeline begins its next batch as soon as its own model is ready for it.

::

    process of stage 0     F0 F1   B0 B1 step F0 F1    B0 B1 step            pipeline 0
                               F0 F1 .. B0 B1  step F0 F1 .. B0 B1 step      pipeline 1, in the time that 0 leaves

Lightning works on batch t (a bundle: one for each pipeline). Within its optimization the pipelines end one after the
other, 0 to N-1, in each process for its own stages, and nobody waits for another process:

1. run whatever can run here, of all pipelines, until the lanes of pipeline n have no actions of t left;
2. the hooks of a backward, the check of gradients, the hooks before a step and the optimizer's step, of model n alone;
3. model n meets the reference (``elastic/staggered.py``);
4. lanes of n get the actions of batch t+1, which run in steps 1 of later pipelines, and in the next optimization.

What follows from that:

- Updates come in the order (iteration, pipeline) on every stage, so the numbers do not depend on the timing.
- Several groups of processes learn of each other's updates an iteration later, and log together. That is put right
  where something is foreseen that needs everything whole; what is not foreseen leaves no trace here, either.
- An iteration is ahead by one at most, and no optimizer steps ahead. So between two optimizations hooks find models and
  optimizers as they are after batch t; gradients, and buffers that a step changes, may be on their way.
- Batch t+1 is read when pipeline 0 has stepped, at the same point of the program in all processes; its hooks on the way
  to the device run then. All other hooks of t+1 run when Lightning comes to it, in the usual order.
- A step that runs ahead sees the trainer's counters as they will be. What is not known yet (learning rates, metrics)
  it must not read, and what a hook changes meanwhile that the step reads is an error: see ``Foresight``.
- Where something is foreseen that needs everything whole (a validation, a checkpoint every n steps, the end of an epoch
  or of training), nothing runs ahead. Where it is not, :meth:`RollingIterations.drain` throws away what has: no
  optimizer has seen it, and buffers get their contents back. The batch stays, and runs again.
- Iterations that are observed (timeline, first measurement of memory) run all pipelines to their end first, as without
  rolling; the updates are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from lightning_avgpipe.strategy.ahead import AheadIterations, Read
from lightning_avgpipe.strategy.foresight import Progress, as_it_will_be
from lightning_avgpipe.strategy.preparation import Works
from lightning_avgpipe.strategy.rolling_choice import gives_way
from lightning_avgpipe.utils.patching import nothing, replaced
from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(kw_only=True)
class _Iteration(Read):
    """A batch for each pipeline.

    Attributes:
        works: micro-batches by pipeline.
        begun: pipelines that have begun it.
        outcomes: of all pipelines, if they ran without rolling.
        entries: what steps have logged.
        loss: what hooks of backwards are told.
        first_loss: of a micro-batch that ran ahead, for a hook whose turn has not come.
        kept: by pipeline, contents of buffers before it ran ahead.
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
        self._now: _Iteration | None = None  # in which models step
        self._next: _Iteration | None = None  # has been read ahead
        self._trained: frozenset[str] = frozenset()  # as the iteration began
        self.models.step_log.batch_values.refuses = lambda: self._mixed if self._checked and self._overlaps else ""

    def train(self, batches: Sequence[Any], *rest: Any) -> Any:
        """Run batches until pipeline 0 has ended it; without a step, until all have."""
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
        """The optimizer of pipeline 0 has stepped: it goes on, the others end, step, and go on.

        Args:
            step: steps the optimizers of a pipeline.
        """
        iteration, self._now = self._now, None
        ensemble, groups = self.deployment.models.ensemble, self.cluster.stage_map.num_teams
        if ensemble is None or (iteration is None and groups == 1):  # nothing was trained
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
            if not goes_on:  # which all groups foresee
                ensemble.averager.turns.settle()
            if iteration is not None:
                self._issue(iteration)
                self._foresight.check()
        except BaseException:
            self.broken()
            raise

    def drain(self) -> None:
        """From now on nothing is ahead: models, buffers and channels are as after the last batch. Every process calls
        it; what has run ahead runs again.
        """
        if self._next is not None:
            self._undo(self._next)

    def leave(self, together: bool = True) -> None:
        """The epoch ends, or batches become others: what was read ahead is given up.

        Args:
            together: whether every process calls it; else the channels are used no more.
        """
        if self._next is not None:
            self._undo(self._next, together)
        self._next = None
        self.batches.forget_ahead()
        if together and self.deployment.models.ensemble is not None:
            self.deployment.models.ensemble.averager.turns.settle()

    def give_way(self) -> bool:
        """Where rolling was left open: whether the step, which has been captured, or its data do not bear it; then
        pipelines wait for each other from now on. Every process calls it.
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
        """What is wrong with a metric object that the step updates."""
        metric = self.models.step_log.batch_values.in_step
        name = next(path for path, m in self._module.named_modules() if m is metric)
        return (
            f"{type(self._module).__name__}.{_STEP} updates the metric object '{name}', but with {self._option} it "
            "would see micro-batches of two batches mixed; log tensors, update it in a hook that looks at the outputs "
            f"(on_train_batch_end), or use {self._instead}"
        )

    @property
    def _first(self) -> int:
        """The number of pipeline 0 among those of all groups."""
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
        """Clear gradients where Lightning does; those of an iteration that is ahead have begun anew when it did."""
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
        """Let all pipelines begin that have not, or run all to the end; tells whether there is anything to run."""
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
        """Whether nobody wants to see this iteration alone, and the stages are there."""
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
        """Pipeline n begins; nothing runs yet."""
        works = iteration.works
        if iteration.finish is None:
            iteration.finish = self._finish(lambda: works, None, partial(self._announce_loss, iteration))
        task = Task(
            partial(self._rolled, iteration, n),
            [(part.data, *iteration.rest) for part in works[n]],
            partial(iteration.finish, n),
            RandomKey(self.configuration.seed, iteration.number, self._first + n),
        )
        self._rolling.begin(self._pipelines[n], self._schedule(works[n], True), task)
        iteration.begun.add(n)

    def _announce_loss(self, iteration: _Iteration, loss: Tensor) -> bool:
        """Whether hooks are told of the first loss now; if it is ahead they are in their turn."""
        if iteration.progress is not None:
            iteration.first_loss = loss.detach()
        return iteration.progress is None

    def _rolled(self, iteration: _Iteration, n: int, i: int, *args: Any) -> Any:
        """Call the step function with a micro-batch, wherever Lightning is."""
        context = self.trainer.precision_plugin.train_step_context
        with as_it_will_be(self.trainer, iteration.progress), replaced(self._module, "_current_fx_name", _STEP):
            works = iteration.works
            return self._micro_batch(_STEP, context, works, self._first, 0, n, i, *args, into=iteration.entries)

    def _end(self, iteration: _Iteration, n: int) -> None:
        """Run until a pipeline has ended."""
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
        """What follows the backwards of a pipeline."""
        if steps:
            self.deployment.models.sum_copied_gradients(n)
        loss = torch.zeros((), device=self.cluster.device) if iteration.loss is None else iteration.loss
        self.models.after_backward(n, loss)
        if steps:
            self.models.check.look_at(n)

    def _issue(self, iteration: _Iteration) -> None:
        if iteration.finish is None:  # it did not roll, and has logged
            return
        with self.trainer.precision_plugin.train_step_context():
            self.models.step_log.issue_collected(iteration.entries)

    # -- what runs ahead ---------------------------------------------------------------------------------------------

    def _go_on(self, n: int, iteration: _Iteration) -> None:
        """Pipeline n begins the next iteration, if that may be."""
        if n == 0:
            self._next = self._read_ahead(iteration)
        if self._next is None or n >= len(self._next.works) or not self._rolls(self._next):
            return
        self._next.kept[n] = {name: tensor.detach().clone() for name, tensor in self._buffers(n).items()}
        self._clear(n)
        self._begin(self._next, n)

    def _read_ahead(self, iteration: _Iteration) -> _Iteration | None:
        """The next iteration; None if it must not begin before its turn. The same on every process."""
        if [*self.schedule_control.observers]:
            return None
        batches = self.batches.read_ahead()
        if not batches:
            return None
        rest = tuple(index + 1 for index in iteration.rest)  # batch_idx, if the step takes it
        return self._made(batches, rest, Progress.after_steps(self.trainer))

    def _buffers(self, n: int) -> dict[str, Tensor]:
        """What a step of one model writes into, beside its parameters."""
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
        """An iteration that is ahead has not begun: no optimizer has seen what it gave."""
        begun, iteration.begun = sorted(iteration.begun), set()
        if together and self.cluster.group.world_size > 1:
            for n in begun:  # its messages are on their way
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
