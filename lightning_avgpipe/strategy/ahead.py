"""Iterations that overlap: micro-batches of the next batches run before Lightning's loop comes to these batches.

Such a step sees the trainer's counters as they will be, and must not read what is not known yet.
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
from lightning_avgpipe.state.outside import outside, variable
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.strategy.data import saves_position
from lightning_avgpipe.strategy.iteration import STEP, Iteration
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import ModelCheckpoint, pl
from lightning_avgpipe.utils.patching import Replacement, all_replaced
from lightning_avgpipe.utils.torch_compat import version_of

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.loop import PipelineLoop

# Attributes of the trainer that are known only when the batch before has ended.
_NOT_YET = (
    "optimizers", "lr_scheduler_configs", "callback_metrics", "logged_metrics", "progress_bar_metrics", "is_last_batch",
)  # fmt: skip
# Models take turns in recurrent layers, which keep their weights in lists too.
_IGNORED = frozenset(vars(pl.LightningModule())) | {"_flat_weights", "_flat_weight_refs"}


class Overlap:
    """Keeps the iterations that were read ahead, and checks that steps which run before their turn do as in their turn.

    Orders use it whose iterations begin before Lightning's loop comes to their batches.

    Attributes:
        option: option that lets steps run early, for messages.
        instead: option with which they do not, for messages.
        coming: iterations that were read ahead, in order.
        checked: whether the captured step has been found to allow overlaps.
        awaits_step: whether the optimizers are to step before the next batch.
    """

    def __init__(self, loop: PipelineLoop) -> None:
        self.option, self.instead = loop.configuration.options.overlap
        self.coming: deque[Iteration] = deque()
        self.checked = self.awaits_step = False
        self._loop = loop
        self._trainer, self._module = loop.trainer, loop.module
        self._noted = ""  # message on what a step has read that is not known yet; empty: nothing
        self._view: Any = None
        self._modules: list[pl.LightningModule] = []
        self._read: dict[str, Variable] = {}
        self._held: dict[str, Snapshot] = {}
        self._graph: CallGraph | None = None
        self._is_first = False  # the batch runs from which the step was captured
        self._trained: frozenset[str] = frozenset()  # parameters that were trained at :meth:`begin`

    # -- iterations that were read ahead -------------------------------------------------------------------------------

    def take(self, batches: Sequence[Any], rest: tuple[Any, ...]) -> Iteration:
        """Return the iteration of these batches, to which Lightning's loop has come: one read ahead, or a new one.

        Raises:
            ConfigurationError: the optimizers have not stepped after the last batch, as a hook decides.
            StepChangedError: the batch is not the one that was read ahead.
        """
        if self.awaits_step:
            raise ConfigurationError(
                f"{type(self._module).__name__}.optimizer_step does not step after each batch (or the optimizer "
                f"evaluates its closure several times), but with {self.option} a batch begins before the step of the "
                f"one before; step once for each batch, or use {self.instead}"
            )
        iteration = self.coming.popleft() if self.coming else self._loop.new_iteration(STEP, batches, rest)
        if iteration.batches[0] is not batches[0] or iteration.changed:
            raise StepChangedError(
                "a batch that has been read ahead, and may have run in part, was changed or left out by a hook; with "
                f"{self.option} change batches in on_after_batch_transfer, or use {self.instead}"
            )
        iteration.progress = None
        return iteration

    def next(self, rest: tuple[Any, ...], ahead: int = 1) -> Iteration | None:
        """Return a later iteration; None at the end of the data. Every process gets the same.

        Args:
            rest: other arguments of the step that runs now.
            ahead: number of iterations until then; those before it have been read.
        """
        if len(self.coming) < ahead:
            batches = self._loop.batches.next(ahead)
            if not batches:
                return None
            iteration = self._loop.new_iteration(STEP, batches, rest, ahead)
            iteration.versions = [(t, version_of(t)) for t in tree.tensors(batches) if not t.is_inference()]
            self.coming.append(iteration)
        return self.coming[ahead - 1]

    def put_back(self) -> None:
        """Put back the batches that were read ahead."""
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
            or self._loop.configuration.asked
            or self._loop.deployment.replans
        )

    def check_graph(self, further: str = "") -> None:
        """Check that the step changes nothing that overlapping batches share, and that its data may be read ahead.

        Args:
            further: a further reason why iterations must not overlap; empty: there is none.
        Raises:
            ConfigurationError: iterations must not overlap; the message says why.
        """
        if found := self.why_not() or further:
            raise ConfigurationError(found)
        self.checked = True

    def why_not(self) -> str:
        """Return why iterations of a captured step must not overlap; empty if they may."""
        if self._noted:
            return self._noted
        loader = self._trainer.fit_loop._combined_loader
        loaders = [] if loader is None else loader.flattened
        if saving := next(filter(None, (saves_position(one, self._trainer) for one in loaders)), ""):
            return (
                f"{self.option} reads ahead, but the {saving} saves its position in checkpoints, "
                f"which would then be ahead of the training; use data without state_dict, or {self.instead}"
            )
        if what := changed_in_common(self._loop.deployment.pipeline.graph(STEP)):
            return (
                f"{type(self._module).__name__}.{STEP} changes {what}, but with {self.option} micro-batches of two "
                "batches run at the same time, and would see it in an order that the timing decides; leave that to a "
                f"hook that looks at the outputs (on_train_batch_end), or use {self.instead}"
            )
        return ""

    # -- what steps find that run before their turn --------------------------------------------------------------------

    def calling(self, iteration: Iteration) -> AbstractContextManager[None]:
        """Return a context within which a step runs, whichever batch Lightning's loop is at.

        The step must not read what the trainer does not know yet if the step is early. Reading it is refused whether
        the step is early or not, so that errors do not depend on the timing.
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
        """Within this context a step runs in its turn.

        What the very first one sets for all that follow (an attribute that is made when it is first needed) does not
        count as a change by a hook. Capture has seen it, and no cut lies between it and those who read it.
        """
        unchanged = [name for name in self._held if not self._changed(name)] if self._is_first else []
        yield
        self._held |= {name: self._hold(name) for name in unchanged if self._changed(name)}

    def begin(self) -> None:
        """Note the values that a step reads: until the next call hooks must not change them."""
        module, graph = self._module, self._loop.deployment.pipeline.graph(STEP)
        if graph is not self._graph:
            keys = [key for key in graph.reads if key[1] not in _IGNORED and key not in graph.written_tensors]
            self._read = {".".join(filter(None, key)): variable(module, *key) for key in keys} | outside(module)
        self._held = {name: self._hold(name) for name in self._read}
        self._graph, self._is_first = graph, graph is not self._graph
        self._trained = self._trained_now

    def check(self) -> None:
        """Check that hooks have changed nothing that steps read.

        Raises:
            ConfigurationError: names what has changed.
        """
        self._is_first = False
        changed = next(filter(self._changed, self._held), None)
        if changed is not None:
            raise ConfigurationError(
                f"with {self.option} a hook of a batch, or a step after the first, has changed '{changed}', which "
                "training_step reads, when micro-batches of the next batch may have run already. Change it where the "
                "pipeline drains (on_train_epoch_start, on_validation_epoch_end), let the step work it out of "
                f"self.global_step, or use {self.instead}"
            )

    def check_trained(self, changed: bool = False) -> None:
        """Check that the same parameters are trained as when the iteration began.

        Args:
            changed: whether it is known that others are.
        Raises:
            ConfigurationError: a hook has frozen or unfrozen parameters too late.
        """
        if changed or self._trained != self._trained_now:
            raise ConfigurationError(
                f"a hook has changed which parameters of {type(self._module).__name__} are trained when "
                f"micro-batches of the next batch had run already; with {self.option} do so in on_train_epoch_start"
            )

    @property
    def _trained_now(self) -> frozenset[str]:
        return self._loop.deployment.pipeline.steps[STEP].trained.names

    def _hold(self, name: str) -> Snapshot:
        return Snapshot((self._read[name],), opaque=True)

    def _changed(self, name: str) -> bool:
        return any(not isinstance(found, nn.Parameter) for found in self._held[name].changed())

    def _made_view(self) -> Any:
        """Return a view of the trainer that refuses to tell what is not known yet."""
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
                f"training_step reads {name}, which with {self.option} is not known yet when a part of the step runs, "
                "while the batch before still goes on; read it in on_train_batch_start or on_train_batch_end, or use "
                f"{self.instead}"
            )
            # with rolling="auto" nothing runs early before the first iteration has shown whether the step allows it
            if self.checked or not self._loop.configuration.may_stop_rolling:
                raise ConfigurationError(why)
            self._noted = self._noted or why
            return read(*args, **kwargs)

        return refuse
