"""The strategy's part in steps: a batch is split, its micro-batches run through the stages, the results are merged."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.engine.loss import loss_in, trainable_loss
from lightning_avgpipe.engine.microbatch import MicroBatch, fewest_samples, mean, merge, split, split_with, whole
from lightning_avgpipe.engine.pipeline import Outcome, run_together
from lightning_avgpipe.engine.sample_layout import Seen
from lightning_avgpipe.engine.stage import Task
from lightning_avgpipe.engine.weighting import LossWeight, uneven_targets, weighted
from lightning_avgpipe.errors import BatchError, ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.schedule import Schedule, build
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.strategy.bundles import recount
from lightning_avgpipe.strategy.data import expected_now
from lightning_avgpipe.strategy.lightning_changes import quiet_hooks
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.options import SplitBatch
from lightning_avgpipe.strategy.parallel import ParallelModelsStrategy
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.strategy.whole import WholeSteps
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.option_types import Count, Natural
from lightning_avgpipe.utils.random_streams import RandomKey
from lightning_avgpipe.verify import Verifier
from lightning_avgpipe.weights.initialisation import on_meta

__all__ = ["SteppingStrategy"]

# A stage with more than this part of the time leaves nothing to gain from the others.
_USELESS = 0.9


class SteppingStrategy(ParallelModelsStrategy):
    """A strategy whose steps are iterations of a pipeline.

    Attributes:
        plan: the stages with their units, parameters and boundary values, known from the first batch on.
        whole_steps: of a run on several processes whose steps run whole; None of any other.
        verifier: compares the first iterations with plain ones; None if nobody asked for it.
        tuner: is shown the first batch of training before it is used, and may reconfigure; called once more before each
            further batch until it returns True. Set before the run is set up.
    """

    plan: Plan | None = None
    _asked: dict[str, Any] = {}  # by reconfigure, within an iteration
    whole_steps: WholeSteps | None = None
    _seen: dict[tuple[str, int], Seen]
    _warned: set[str]
    verifier: Verifier | None = None
    _unweighted: int
    _zero_grad: Callable[[], None] | None = None
    tuner: Callable[[Any], bool] | None = None

    @property
    def peak_memory_bytes(self) -> dict[int, int]:
        """Stage -> bytes at its peak, measured in the first iteration with a kind of batches and an advance.

        On CUDA as the allocator counts; elsewhere weights, gradients, optimizer states, the batch, and what backwards
        wait for; of several pipelines all that they have, and their reference. Empty before training, and on a CPU with
        ``costs="flops"``.
        """
        return {} if self.schedule_control is None else dict(self.schedule_control.peaks)

    def reconfigure(
        self,
        num_pipelines: Count | None = None,
        num_microbatches: Count | Literal["auto"] | None = None,
        advance: Natural | None = None,
    ) -> None:
        """Change how training runs, from the next iteration on. Every rank calls it, in a hook of a callback.

        Within an iteration, from ``on_train_batch_start`` to the optimizer's step, everything stays as it is; what was
        asked for comes when it has ended. New parallel models start from the reference. Those with the highest numbers
        go when there are to be fewer, and the reference stays; with ``num_pipelines=1`` it is the model.

        Args:
            num_pipelines: N; None leaves it.
            num_microbatches: M, or ``"auto"``; None leaves it.
            advance: h, which adapts no more; None leaves it.
        Raises:
            ConfigurationError: a number that cannot work, or a callback that knows one model only; on several processes
                also when, at the end of the iteration, it turns out that not all have asked for the same.
        """
        numbers = {"num_pipelines": num_pipelines, "num_microbatches": num_microbatches, "advance": advance}
        asked = {**self._asked, **{name: number for name, number in numbers.items() if number is not None}}
        wanted = replace(self._options, **asked)
        module = self.lightning_module
        if self.whole is not None and module is not None:
            raise ConfigurationError(f"reconfigure: {type(module).__name__} {self.whole}; its steps run whole")
        if self.plain and module is not None:
            raise ConfigurationError(
                "reconfigure: with one device, one stage, one micro-batch and one pipeline this run began as with "
                "strategy='auto', and has no pipeline to change; begin with 2 or more of stages, micro-batches or "
                "pipelines"
            )
        if module is not None:
            checks.trainer(module.trainer, self.world_size, wanted.num_pipelines)
        self._asked = asked
        if not self.in_iteration:
            self._take_over()

    def end_iteration(self) -> None:
        """What was asked for within the iteration comes now."""
        super().end_iteration()
        self._take_over()

    def _take_over(self) -> None:
        asked, self._asked = self._asked, {}
        if not asked:
            return
        if self._mesh is not None and self._mesh.wiring:
            call = f"reconfigure({', '.join(f'{name}={number!r}' for name, number in asked.items())})"
            self.mesh.confirm(
                call, "in a hook of a callback, such as on_train_batch_end, and not only if is_global_zero"
            )
        changed = asked.get("num_pipelines", self.num_pipelines) != self.num_pipelines
        self._options = replace(self._options, **asked)
        if "advance" in asked and self.schedule_control is not None:
            self.schedule_control.fix(asked["advance"])
        module = self.lightning_module
        if changed and module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            recount(module.trainer)

    @property
    def given(self) -> dict[str, Any]:
        """What ``reconfigure`` would change that is not as by default."""
        return self._options.given

    @property
    def clears_gradients(self) -> bool:
        """Whether the training step that runs now begins with cleared gradients."""
        return self._zero_grad is not None

    @property
    def loss_is_mean(self) -> bool:
        """Whether losses are means over the samples of their micro-batch; else they are sums."""
        return self._options.loss_reduction == "mean"

    @property
    def step_log(self) -> StepLog:
        """What collects ``self.log`` in this run."""
        assert self._log is not None
        return self._log

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages of a parameter, a buffer, or an attribute of a unit, by its full name; empty if it has none."""
        known = {} if self.plan is None else self.plan.stages_of
        while name and name not in known:
            name = name.rpartition(".")[0]
        return known.get(name, ())

    @property
    def schedule_name(self) -> str:
        """``"advance_forward"``, ``"1f1b"`` or ``"afab"``."""
        return self._options.schedule

    @contextlib.contextmanager
    def clearing_gradients(self, zero_grad: Callable[[], None] | None) -> Iterator[None]:
        """Within this context a training step clears the gradients where Lightning does: before its first backward."""
        self._zero_grad = zero_grad
        try:
            yield
        finally:
            self._zero_grad = None

    @contextlib.contextmanager
    def trying(self, batch: Any) -> Iterator[Any]:
        """Within this context steps are on trial, see :meth:`ParallelModelsStrategy.trying` and :meth:`try_next`."""
        options, schedule_control = self._options, self.schedule_control
        try:
            with super().trying(batch) as here:
                yield here
        finally:
            self._options, self.schedule_control = options, schedule_control

    def try_next(self, batches: Sequence[Any], num_microbatches: int, schedule_control: ScheduleControl) -> Any:
        """While steps are on trial: what the next one runs with.

        Args:
            batches: on the device, one for each pipeline; a step may change them.
            num_microbatches: M.
            advancing: gives the iteration its schedule.
        Returns:
            The batch of pipeline 0, which the step takes as its argument.
        """
        self._options = replace(self._options, num_pipelines=len(batches), num_microbatches=num_microbatches)
        self.schedule_control = schedule_control
        return self.hand_out(batches)

    def num_samples(self, batch: Any) -> int:
        """Samples of a batch, as its micro-batches count them."""
        return sum(part.size for part in self._parts(batch))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run all forwards and backwards of a batch, and of those of the other pipelines.

        A micro-batch for which the step returns None has no backward. With none left the batch is skipped.

        Returns:
            What the step would have returned for the batch, detached; None if it is skipped.
        """
        if self.plain or self.whole_steps is not None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        assert self._deployment is not None
        module, precision = self.lightning_module, self.precision_plugin
        batches = [args[0], *self.take_beside()]
        works = [self._split(batch, n) for n, batch in enumerate(batches)]
        averages = self._options.loss_reduction == "mean"
        accumulate, zero_grad = module.trainer.accumulate_grad_batches, self._zero_grad
        if zero_grad is not None and (self.num_models > 1 or not self.mesh.hosts_last):
            # here no forward comes before all backwards, or the module may show another pipeline's model by then
            self.clear_gradients()
            zero_grad()
            zero_grad = None

        started: list[Tensor] = []

        def finish(n: int, i: int, result: Any) -> Tensor | None:
            if i == 0 and zero_grad is not None:  # after a forward, as on one device, and before all backwards
                zero_grad()
            if result is None or (averages and not works[n][i].weight):  # a mean over nothing is not a number
                return None
            loss = trainable_loss(result)
            if accumulate > 1:
                loss = loss / accumulate
            # a batch deserves its hooks once: with the first micro-batch's loss, before anything else is known
            first = n == 0 and not started
            with contextlib.nullcontext() if first else quiet_hooks(module.trainer, "on_before_backward"):
                loss = precision.pre_backward(loss, module)
            if n == 0:
                started.append(loss.detach())
            return loss * works[n][i].weight if averages and len(works[n]) > 1 else loss

        # Lightning's weight averaging passes over the data once more without training
        trains = not module.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        context = precision.train_step_context
        outcomes = self._run("training_step", context, works, args[1:], finish if trains else None)
        if not outcomes:  # all is skipped, and nothing is known of the step yet
            self.skipped = frozenset(range(len(works)))
            return None
        skips = (n for n, outcome in enumerate(outcomes) if len(outcome.skipped) == len(works[n]))
        self.skipped = frozenset(skips)
        result: Any = {"loss": torch.zeros((), device=self.root_device)}
        if outcomes[0].results is not None:
            result = self._merge_training(outcomes[0].results, works[0])
        if trains:
            if not module.trainer.fit_loop._should_accumulate():
                self._deployment.sum_copied_gradients()
            if self.verifier is not None and self.verifier.active:
                self.verifier.compare()
            loss = torch.zeros((), device=self.root_device) if result is None else loss_in(result)
            self.after_backwards(loss, len(works))
        return None if 0 in self.skipped else result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run validation_step; on the last stage's rank the merged result, None elsewhere."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run test_step; on the last stage's rank the merged result, None elsewhere."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run predict_step; on the last stage's rank the merged result, None elsewhere."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args)

    def _evaluate(self, step: str, context: Callable[[], Any], args: Sequence[Any]) -> Any:
        if self.plain:
            return getattr(super(), step)(*args)
        if self.whole_steps is not None:
            return self.whole_steps.run(step, getattr(super(), step), *args)
        parts = self._split(args[0], weighs=step != "predict_step" and self.loss_weight is not None)
        (outcome,) = self._run(step, context, [parts], args[1:], None)
        return None if outcome.results is None else merge(outcome.results, *self._counts(parts))

    def _run(
        self,
        step: str,
        context: Callable[[], Any],
        works: Sequence[Sequence[MicroBatch]],
        rest: Sequence[Any],
        finish: Callable[[int, int, Any], Tensor | None] | None,
    ) -> list[Outcome]:
        """Run the micro-batches of one pipeline or several; returns nothing if a first batch is skipped altogether."""
        module, deployment, step_log = self.lightning_module, self._deployment, self._log
        assert module is not None and deployment is not None and step_log is not None

        def run(n: int, i: int, *args: Any) -> Any:
            part, total = works[n][i], sum(part.size for part in works[n])
            weight = None if self.loss_weight is None else part.weight * (total or 1)
            with context(), step_log.micro_batch(part.size, (first + n, i), weight):
                return getattr(module, step)(*args)

        # groups train on batches of their own, but evaluate the same
        first = self.mesh.group_number * self.num_pipelines if step == "training_step" else 0
        decides = step == "training_step" or module.trainer.state.fn != TrainerFn.FITTING
        verifier = self.verifier if finish is not None and self.verifier is not None and self.verifier.active else None
        if verifier is not None:
            verifier.watch()
        schedules = [self._schedule(parts, training=finish is not None) for parts in works]
        examples = [(part.data, *rest) for parts in works for part in parts]
        trains = self.num_pipelines if step == "training_step" else 1
        if deployment.prepare(step, partial(run, 0, 0), examples, decides, schedules[0], trains):
            self._announce(deployment.plan)
        if step not in deployment.pipeline.steps:
            self._run_skipped(module, step, context, works, run, rest)
            return []
        self.plan = deployment.plan
        pipelines = self.pipelines_for(step, len(works))
        step_log.begin(sum(map(len, works)))
        iteration = self._iteration(step)
        if verifier is not None and finish is not None:
            finish = verifier.begin(works, rest, context, iteration, finish)
        tasks = [
            Task(
                partial(run, n),
                [(part.data, *rest) for part in parts],
                None if finish is None else partial(finish, n),
                RandomKey(self.seed, iteration, first + n),
            )
            for n, parts in enumerate(works)
        ]
        assert self.schedule_control is not None and self.plan is not None
        self.schedule_control.beside = self.tensors_beside
        with self.schedule_control.iteration(tasks[0], works, self.plan, schedules[0], self.num_pipelines):
            try:
                outcomes = run_together(pipelines, step, schedules, tasks)
            finally:
                if deployment.ensemble is not None:
                    deployment.ensemble.place(0)
        with context():  # which may decide what a number is
            step_log.issue(over_groups=step == "training_step")
        return outcomes

    def _announce(self, plan: Plan | None) -> None:
        groups = f", {self.mesh.num_groups} groups of them" if self.mesh.num_groups > 1 else ""
        size = self.mesh.world_size
        processes = "one process" if size == 1 else f"{size} processes"
        rank_zero_info(f"\n{self.num_stages} stages on {processes}{groups}:\n{plan}")
        if plan is not None and plan.note:
            tell = rank_zero_warn if plan.slowest.share > _USELESS else rank_zero_info
            tell(plan.note)
        if plan is not None and plan.graph.carried and self._options.microbatches(self.num_stages) > 1:
            self._warn_once(
                f"'{plan.graph.carried[0]}', which {plan.graph.step} keeps for the next time, goes from micro-batch to "
                "micro-batch, that is to other samples of the same batch, and must fit each of them; with "
                "num_microbatches=1 it goes from batch to batch, as on one device"
            )

    def _split(self, batch: Any, pipeline: int = 0, weighs: bool = True) -> list[MicroBatch]:
        self._distributor.check_seal(batch, pipeline)
        parts = self._parts(batch)
        if not (weighs and self.mesh.hosts_last and len(parts) > 1):  # elsewhere there is no loss
            return parts
        if self.loss_weight is not None:
            return weighted(parts, self.loss_weight)
        if self._unweighted > 0 and self._options.loss_reduction == "mean":
            self._unweighted -= 1
            name = uneven_targets(parts)
            if name is not None:
                self._unweighted = 0
                self._warn_once(
                    f"'{name}' of the batch holds ignored targets (-100), and micro-batches have unequal numbers of "
                    "others. A loss that is a mean over targets is then not that of the whole batch, since each "
                    f"micro-batch counts by its samples; loss_weight={name!r} lets it count by its targets"
                )
        return parts

    @property
    def loss_weight(self) -> LossWeight | None:
        """What micro-batches count by, if not by samples: a method of the module that takes a batch, or the option."""
        own = getattr(self.lightning_module, "loss_weight", None)
        if inspect.ismethod(own) and next(iter(inspect.signature(own).parameters), None) == "batch":
            return own
        return self._options.loss_weight

    def _parts(self, batch: Any) -> list[MicroBatch]:
        count, splitter = self._options.microbatches(self.num_stages), self._splitter
        if splitter is not None:
            return split_with(splitter, batch, count)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        expected = expected_now(trainer, self.dataloader_idx, changed=not self._distributor.early)
        stage = "" if trainer.state.stage is None else trainer.state.stage.value
        first = (stage, self.dataloader_idx) not in self._seen
        seen = self._seen.setdefault((stage, self.dataloader_idx), Seen())
        try:
            chosen = self._options.num_microbatches == "auto"
            parts = split(batch, count, expected, seen, fewest_samples(self.lightning_module) if chosen else 1)
        except BatchError as error:
            if self._options.num_microbatches != "auto":
                raise
            self._warn_once(
                f"a batch of the {stage} data is not split into micro-batches, so its stages take turns: {error}. An "
                "explicit num_microbatches makes this an error"
            )
            return whole(batch, expected)
        if first and len(parts) == 1 < count and self.num_stages > 1:
            self._warn_once(
                f"the first batch of the {stage} data holds {parts[0].size} sample(s) and makes one micro-batch where "
                f"num_microbatches={self._options.num_microbatches!r} wants {count}, so its stages take turns; use a "
                "larger batch_size"
            )
        return parts

    def _run_skipped(
        self,
        module: pl.LightningModule,
        step: str,
        context: Callable[[], Any],
        works: Sequence[Sequence[MicroBatch]],
        run: Callable[..., Any],
        rest: Sequence[Any],
    ) -> None:
        """Run a batch that trains nothing, before it is known what a step calls: for what it changes and logs.

        As on one device, and on every process, so that attributes stay the same everywhere: a step may count.
        """
        if on_meta(module):  # nobody has all of it
            return
        self.step_log.begin(sum(map(len, works)))
        with alone():
            for n, parts in enumerate(works):
                for i, part in enumerate(parts):
                    if self.mesh.hosts_last:
                        run(n, i, part.data, *rest)
                        continue
                    with context():
                        getattr(module, step)(part.data, *rest)
        with context():
            self.step_log.issue(over_groups=step == "training_step")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            rank_zero_warn(text)

    @property
    def _splitter(self) -> SplitBatch | None:
        return getattr(self.lightning_module, "split_batch", None) or self._options.split_batch

    def _schedule(self, parts: Sequence[MicroBatch], training: bool) -> Schedule:
        assert self.schedule_control is not None
        return (
            self.schedule_control.schedule(parts, self.num_pipelines)
            if training
            else build("forward", self.num_stages, len(parts))
        )

    def _merge_training(self, outputs: list[Any], parts: Sequence[MicroBatch]) -> Any:
        """The result of those that were not skipped; None if all were."""
        given = [(output, part) for output, part in zip(outputs, parts, strict=True) if output is not None]
        if not given:
            return None
        detached = [tree.map_tensors(Tensor.detach, output) for output, _ in given]
        losses, (sizes, weights) = [loss_in(output) for output in detached], self._counts([p for _, p in given])
        loss = torch.stack(losses).sum(0) if self._options.loss_reduction == "sum" else mean(losses, weights)
        if not all(isinstance(output, Mapping) for output in detached):
            return loss
        merged = {}
        for name in dict.fromkeys(name for output in detached for name in output):
            having = [(o[name], s, w) for o, s, w in zip(detached, sizes, weights, strict=True) if name in o]
            merged[name] = merge(*map(list, zip(*having, strict=True)))
        return {**merged, "loss": loss}

    def _counts(self, parts: Sequence[MicroBatch]) -> tuple[list[int], list[float]]:
        """Sizes of micro-batches, and what they count in a mean."""
        sizes = [part.size for part in parts]
        return sizes, list(sizes) if self.loss_weight is None else [part.weight for part in parts]

    def _iteration(self, step: str) -> int:
        """A number that no other batch of this step function has, and the same after a resume."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if step == "training_step":
            # of batches that are done, since one that was interrupted comes again after a resume
            return 1 + int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        return int(trainer._active_loop.batch_progress.total.ready)  # type: ignore[union-attr]
