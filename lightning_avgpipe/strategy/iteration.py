"""An iteration of the pipelines, and the order in which iterations follow each other.

Subclasses of ``IterationOrder`` are orders in which pipelines do not drain after each iteration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_avgpipe.comm.alone import in_hook
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.microbatch import MicroBatch, merge
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.pipeline import Outcome
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.schedule import FORWARD
from lightning_avgpipe.state.writes import Writes
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import Replacement
from lightning_avgpipe.utils.random_streams import host_lent
from lightning_avgpipe.utils.torch_compat import version_of

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.loop import PipelineLoop

STEP = "training_step"

Works = Sequence[Sequence[MicroBatch]]  # micro-batches, by pipeline


@dataclass(kw_only=True)
class Iteration:
    """One iteration: the batches of a step, one for each pipeline or one that all pipelines divide, and their state.

    Attributes:
        step: name of the step function.
        precision: returns the context of the precision plugin for the step.
        batches: batches on the device.
        micro_batches: micro-batches of each pipeline.
        weighed: waits for the micro-batches' weights over all replicas, and returns the micro-batches with them.
        other_args: arguments of the step other than the batch.
        number: number of the iteration, from which random numbers are derived.
        first: number of this group's first pipeline among those of all groups, and of its first micro-batch among those
            of all replicas. Both are 0 in evaluation, where all groups have the same batches.
        trains: whether there is a backward.
        progress: replacements that give the trainer's counters the values for this batch; None once Lightning's loop
            has reached it.
        clears: clears the gradients once each stage of this process has run a forward; None: they are cleared already,
            or accumulate.
        entries: list of the values that steps log; None: they go to the log's current batch.
        outcomes: outcomes of the pipelines that have ended.
        loss: loss that is passed to the backward hooks.
        begun: numbers of the pipelines that have begun the iteration, if iterations overlap.
        first_loss: loss of the first micro-batch that has run, with which the backward hooks are called.
        kept: by pipeline, contents of the buffers from before the iteration began early.
        versions: tensors of batches that were read ahead, with their versions.
    """

    step: str
    precision: Callable[[], Any]
    batches: Sequence[Any]
    micro_batches: Works
    weighed: Callable[[], Works]
    other_args: tuple[Any, ...]
    number: int
    first: tuple[int, int]
    trains: bool = True
    progress: Sequence[Replacement] | None = None
    clears: ClearingGradients | None = None
    entries: list[Any] | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    loss: Tensor | None = None
    begun: set[int] = field(default_factory=set)
    first_loss: Tensor | None = None
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def shares(self) -> int:
        """The number of pipelines that divide the first batch among them; 1 if each has a batch of its own."""
        return len(self.micro_batches) if len(self.batches) == 1 else 1

    @property
    def first_batch(self) -> Any:
        """The whole input of pipeline 0: its batch, or its share of a batch that pipelines divide."""
        first = self.micro_batches[0]
        return self.batches[0] if self.shares == 1 else merge([p.data for p in first], [p.size for p in first])

    @property
    def changed(self) -> bool:
        """Whether user code has changed a batch since it was read ahead."""
        return any(version_of(tensor) != version for tensor, version in self.versions)


class ClearingGradients(Observer):
    """Clears a process's gradients after each of its stages has run one forward, as plain training does after its own.

    So a change by a hook at this point (of a teacher's weights, or a temperature) applies from the second micro-batch
    on, on every stage.

    Args:
        module: module that is trained.
        stages: stages of the process.
        clear: clears the gradients and calls the hooks; it is called once.
    """

    def __init__(self, module: pl.LightningModule, stages: Sequence[int], clear: Callable[[], None]) -> None:
        self._module, self._before, self._clear = module, set(stages), clear
        self._ahead = False  # whether a stage has run its second forward before another stage its first
        self._is_cleared = False

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action. Before it clear the gradients, if all stages have run a forward, or it is not a forward.

        They are not cleared right after a forward: its output must be sent first, since a hook may wait for other
        processes.
        """
        if self._is_cleared:
            return do()
        if not self._before or work.action.kind is not FORWARD:
            self.end()
        self._ahead |= bool(self._before) and work.stage not in self._before
        output = do()
        self._before.discard(work.stage)
        return output

    def end(self) -> None:
        """Clear the gradients, unless they have been cleared.

        Raises:
            StepChangedError: a hook changes a weight or buffer when a stage has run its second micro-batch already.
        """
        if self._is_cleared:
            return
        self._is_cleared = True
        with host_lent(), in_hook(), Writes(self._module) if self._ahead else contextlib.nullcontext() as writes:
            self._clear()
        if writes is not None and writes.written:
            raise StepChangedError(
                f"a hook (on_before_zero_grad, optimizer_zero_grad) changes '{min(writes.written)}' after the first "
                "micro-batch, but one of this process's stages has run the second micro-batch already. Change it in "
                "on_train_batch_start, or use as many stages as devices"
            )


class IterationOrder:
    """The order "flush": all pipelines drain, step and average together, and then begin the next iteration.

    Subclasses are other orders. All processes of a run use the same order.
    """

    def __init__(self, loop: PipelineLoop) -> None:
        self.loop = loop

    def train(self, batches: Sequence[Any], rest: tuple[Any, ...]) -> Any:
        """Run an iteration of training until the optimizer of pipeline 0 may step.

        A micro-batch for which the step returns None has no backward. If this is so for all, the batch is skipped.

        Args:
            batches: batch of each pipeline, or one batch that all pipelines divide.
            rest: arguments of the step other than the batch.
        Returns:
            What the step would have returned for the first batch, detached; None if the batch is skipped.
        Raises:
            MicroBatchError: the step cannot be captured on a micro-batch; it may be retried on whole batches. All
                processes raise it.
        """
        loop, models = self.loop, self.loop.models
        loop.arrange(batches)
        models.add_to_sums()
        iteration = loop.new_iteration(STEP, batches, rest)
        iteration.trains = not loop.is_averaging_pass
        loop.clear_or_defer(iteration)
        ran = loop.run(iteration)
        iteration.micro_batches = iteration.weighed()
        if not ran:
            return None
        models.skipped = loop.skipped(iteration, [len(o.skipped) == o.count for o in iteration.outcomes])
        result = loop.result(iteration)
        loop.send_changes(loop.observed)
        if iteration.trains:
            sums = models.decide_to_sum(not loop.accumulates)
            if sums:
                loop.deployment.parallel.sum_copied_gradients()
            fed = models.synchronise(len(iteration.micro_batches), sums)
        with iteration.precision():
            models.step_log.flush()
        if iteration.trains:
            if loop.verifier is not None:
                loop.verifier.compare()
            assert iteration.loss is not None
            for n in range(fed):
                models.after_backward(n, iteration.loss)
        return None if 0 in models.skipped else result

    def calling(self, iteration: Iteration) -> AbstractContextManager[None]:
        """Return a context within which a step function is called with a micro-batch."""
        return contextlib.nullcontext()

    def step_in_turn(self, step: Callable[[int], object]) -> None:
        """End the iteration of pipelines 1.. one after the other, if pipelines roll.

        Args:
            step: steps the optimizers of a pipeline.
        """
        raise NotImplementedError

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run actions of other pipelines until ``over`` returns True, instead of waiting idly; this order has none."""

    def run_until_all_arrive(self, what: str, members: Collectives | None = None) -> None:
        """Run actions of other pipelines until all members have called this; this order has none.

        Every member calls it before a collective, in which it would wait idly for the others.

        Args:
            what: name of the collective, for messages.
            members: processes that take part; None: all processes of the group.
        """

    def stepped(self) -> None:
        """Continue after the optimizers have stepped."""

    def drain(self) -> None:
        """Drain the pipelines: models, buffers and channels are then as after the last batch. Every process calls it.

        What has run early of the next iteration is discarded, and runs again. If the run has failed, other processes
        may be elsewhere, and the channels are not used.
        """

    def put_back(self) -> None:
        """Drain, and put back the batches that were read ahead: the epoch ends, or an iteration's batches change."""
