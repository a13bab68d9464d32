"""Overlapping iterations: micro-batches of later batches run before Lightning's loop reaches those batches.

A step that runs early sees the trainer's counters with the values they will have for its batch. It must not read values
that are not final yet, such as metrics and learning rates.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph, changed_in_common
from lightning_avgpipe.errors import ConfigurationError, StepChangedError
from lightning_avgpipe.state.objects import Variable
from lightning_avgpipe.state.outside import outside_variables, variable
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.strategy.data import saves_position
from lightning_avgpipe.strategy.iteration import STEP, Iteration
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import ModelCheckpoint, pl
from lightning_avgpipe.utils.patching import Replacement, all_replaced
from lightning_avgpipe.utils.torch_compat import version_of

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.loop import PipelineLoop

# Attributes of the trainer that are final only after the previous batch has ended.
_NOT_YET = (
    "optimizers", "lr_scheduler_configs", "callback_metrics", "logged_metrics", "progress_bar_metrics", "is_last_batch",
)  # fmt: skip
# Attributes that may change: Lightning's own, and those with which recurrent layers list their weights, since parallel
# models take turns in the layers.
_IGNORED = frozenset(vars(pl.LightningModule())) | {"_flat_weights", "_flat_weight_refs"}


def counters_after(trainer: pl.Trainer, count: int) -> list[Replacement]:
    """Return replacements that give the trainer's counters the values of a later iteration, for a step that runs early.

    Args:
        trainer: the trainer.
        count: number of iterations from the current one to the later one.
    """
    loop = trainer.fit_loop.epoch_loop
    batches, steps = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step
    counted: list[tuple[Any, str]] = [(loop, "_batches_that_stepped")]
    names = ("ready", "started", "processed", "completed")
    counted += [(p, name) for p in (batches.total, batches.current) for name in names]
    counted += [(p, name) for p in (steps.total, steps.current) for name in ("ready", "completed")]
    return [(owner, name, getattr(owner, name) + count) for owner, name in counted]


class Overlap:
    """Holds the iterations that were read ahead, and checks that a step gives the same result early as in its turn.

    It is used by orders whose iterations begin before Lightning's loop reaches their batches.

    Attributes:
        option: option that lets steps run early, for error messages.
        instead: option to use instead, for error messages.
        coming: iterations that were read ahead, in order.
        checked: whether the captured step has been found to allow overlaps.
        awaits_step: whether the optimizers must still step for the last batch.
    """

    def __init__(self, loop: PipelineLoop) -> None:
        self.option, self.instead = loop.configuration.options.overlap
        self.coming: deque[Iteration] = deque()
        self.checked = self.awaits_step = False
        self._loop = loop
        self._trainer, self._module = loop.trainer, loop.module
        self._reason = ""  # why the step must not run early: it has read a value that was not final; empty: no reason
        self._view: Any = None  # what steps see in place of the trainer
        self._modules: list[pl.LightningModule] = []
        self._read: dict[str, Variable] = {}
        self._held: dict[str, Snapshot] = {}
        self._graph: CallGraph | None = None
        self._is_first = False  # whether the running batch is the one from which the step was captured
        self._trained: frozenset[str] = frozenset()  # parameters that were trained when :meth:`begin` was called

    # -- iterations that were read ahead -------------------------------------------------------------------------------

    def take(self, batches: Sequence[Any], rest: tuple[Any, ...]) -> Iteration:
        """Return the iteration of the batches that Lightning's loop has reached: one read ahead, or a new one.

        Raises:
            ConfigurationError: a hook did not step the optimizers after the last batch.
            StepChangedError: the batch is not the one that was read ahead, or a hook has changed it.
        """
        if self.awaits_step:
            raise ConfigurationError(
                f"{type(self._module).__name__}.optimizer_step does not step after each batch (or the optimizer "
                f"evaluates its closure several times), but with {self.option} the next batch begins before the "
                f"optimizers step; step once for each batch, or use {self.instead}"
            )
        iteration = self.coming.popleft() if self.coming else self._loop.new_iteration(STEP, batches, rest)
        if iteration.batches[0] is not batches[0] or iteration.changed:
            raise StepChangedError(
                "a hook has changed or skipped a batch that was read ahead, and that may have run in part; with "
                f"{self.option} change batches in on_after_batch_transfer, or use {self.instead}"
            )
        iteration.progress = None
        return iteration

    def read_ahead(self, rest: tuple[Any, ...], ahead: int = 1) -> Iteration | None:
        """Return a later iteration, read if necessary; None at the end of the data. It is the same on all processes.

        Args:
            rest: arguments of the current step other than the batch.
            ahead: position of the iteration after the current one, from 1; the iterations in between have been read.
        """
        if len(self.coming) < ahead:
            batches = self._loop.batches.next(ahead)
            if not batches:
                return None
            iteration = self._loop.new_iteration(STEP, batches, rest, ahead)
            iteration.progress = counters_after(self._trainer, ahead)
            iteration.versions = [(t, version_of(t)) for t in tree.tensors(batches) if not t.is_inference()]
            self.coming.append(iteration)
        return self.coming[ahead - 1]

    def return_batches(self) -> None:
        """Drop the iterations that were read ahead; their batches stay in the queue."""
        self.coming.clear()
        self._loop.batches.put_back()

    def may_go_on(self) -> bool:
        """Return whether the next batch may begin early: no validation, checkpoint or end of epoch comes before it."""
        trainer, loop, fetcher = self._trainer, self._trainer.fit_loop.epoch_loop, self._trainer.fit_loop._data_fetcher
        assert fetcher is not None
        steps = trainer.global_step + 1
        checkpoints = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        return not (
            loop._num_ready_batches_reached()
            or steps == trainer.max_steps
            or self._loop.stops
            or trainer.received_sigterm
            or loop._should_check_val_fx(fetcher)
            or any(c._every_n_train_steps and steps % c._every_n_train_steps == 0 for c in checkpoints)
            or self._loop.configuration.has_requests
            or self._loop.deployment.replans
        )

    def check_graph(self, further: str = "") -> None:
        """Check that the step changes nothing that overlapping batches share, and that its data may be read ahead.

        Args:
            further: another reason against overlapping iterations, found by the caller; empty: there is none.
        Raises:
            ConfigurationError: iterations must not overlap; the message says why.
        """
        if found := self.why_not() or further:
            raise ConfigurationError(found)
        self.checked = True

    def why_not(self) -> str:
        """Return why iterations of a captured step must not overlap; empty if they may."""
        if self._reason:
            return self._reason
        loader = self._trainer.fit_loop._combined_loader
        loaders = [] if loader is None else loader.flattened
        if saving := next(filter(None, (saves_position(one, self._trainer) for one in loaders)), ""):
            return (
                f"{self.option} reads ahead, but the {saving} saves its position in checkpoints, "
                f"and this position would be ahead of training; use data without state_dict, or {self.instead}"
            )
        if what := changed_in_common(self._loop.deployment.pipeline.graph(STEP)):
            return (
                f"{type(self._module).__name__}.{STEP} changes {what}, but with {self.option} micro-batches of two "
                "batches run at the same time, and would see the changes in an order that depends on timing; make the "
                f"change in a hook that is given the outputs (on_train_batch_end), or use {self.instead}"
            )
        return ""

    # -- what a step that runs early finds -----------------------------------------------------------------------------

    def calling(self, iteration: Iteration) -> AbstractContextManager[None]:
        """Return a context within which a step can run, for the current batch or early.

        A step that runs early must not read values of the trainer that are not final yet. Reading them is refused
        even if the step is not early, so that errors do not depend on the timing.
        """
        if self._view is None:
            self._view = self._made_view()
            modules = self._module.modules()
            self._modules = [module for module in modules if isinstance(module, pl.LightningModule)]
        replacements: list[Replacement] = [*(iteration.progress or ()), (self._module, "_current_fx_name", STEP)]
        for module in self._modules:
            replacements.append((module, "_trainer", self._view))
            replacements.append((module, "optimizers", self._refuse("optimizers()", module.optimizers)))
        return all_replaced(replacements)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within this context a step runs for the current batch.

        What the first step sets once (an attribute that is made when it is first needed) does not count as a change by
        a hook. Capture has seen this write, and no cut separates it from the units that read it.
        """
        unchanged = [name for name in self._held if not self._changed(name)] if self._is_first else []
        yield
        self._held |= {name: self._hold(name) for name in unchanged if self._changed(name)}

    def begin(self) -> None:
        """Record the values that a step reads. Hooks must not change them until the next call."""
        module, graph = self._module, self._loop.deployment.pipeline.graph(STEP)
        if graph is not self._graph:
            keys = [key for key in graph.reads if key[1] not in _IGNORED and key not in graph.written_tensors]
            named = {".".join(filter(None, key)): variable(module, *key) for key in keys}
            self._read = named | outside_variables(module)
        self._held = {name: self._hold(name) for name in self._read}
        self._graph, self._is_first = graph, graph is not self._graph
        self._trained = self._trained_now

    def check(self) -> None:
        """Check that hooks have changed nothing that steps read.

        Raises:
            ConfigurationError: a hook has changed something; the message names it.
        """
        self._is_first = False
        changed = next(filter(self._changed, self._held), None)
        if changed is not None:
            raise ConfigurationError(
                f"with {self.option} a hook of a batch, or a step after the first, has changed '{changed}', which "
                "training_step reads, when micro-batches of the next batch may have run already. Change it in a hook "
                "before which the pipeline drains (on_train_epoch_start, on_validation_epoch_end), compute it in the "
                f"step from self.global_step, or use {self.instead}"
            )

    def check_trained(self, changed: bool = False) -> None:
        """Check that the same parameters are trained as when the iteration began.

        Args:
            changed: whether the caller has found already that other parameters are trained.
        Raises:
            ConfigurationError: a hook has frozen or unfrozen parameters too late.
        """
        if changed or self._trained != self._trained_now:
            raise ConfigurationError(
                f"a hook has changed which parameters of {type(self._module).__name__} are trained after "
                f"micro-batches of the next batch had run; with {self.option} do so in on_train_epoch_start"
            )

    @property
    def _trained_now(self) -> frozenset[str]:
        return self._loop.deployment.pipeline.steps[STEP].trained.names

    def _hold(self, name: str) -> Snapshot:
        return Snapshot((self._read[name],), opaque=True)

    def _changed(self, name: str) -> bool:
        return any(not isinstance(found, nn.Parameter) for found in self._held[name].changed())

    def _made_view(self) -> Any:
        """Return a view of the trainer that raises an error where a value is read that is not final yet."""
        kind = type(self._trainer)
        refused = {
            name: property(self._refuse(f"trainer.{name}", lambda _, name=name: getattr(self._trainer, name)))
            for name in _NOT_YET
        }
        view: Any = object.__new__(type(kind.__name__, (kind,), {**refused, "__module__": kind.__module__}))
        object.__setattr__(view, "__dict__", vars(self._trainer))
        return view

    def _refuse(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            why = (
                f"training_step reads {name}, but with {self.option} a part of the step runs before the previous batch "
                "has ended, when this value is not known yet; read it in on_train_batch_start or on_train_batch_end, "
                f"or use {self.instead}"
            )
            # With rolling="auto" nothing runs early during the first iteration, which shows whether the step allows it.
            if self.checked or not self._loop.configuration.may_stop_rolling:
                raise ConfigurationError(why)
            self._reason = self._reason or why
            return read(*args, **kwargs)

        return refuse
