"""Foresight: the trainer as a step finds it that runs before Lightning's loop comes to its batch.

Such a step sees the counters as they will be, and must not read what is not known yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.state.objects import Variable
from lightning_avgpipe.state.outside import outside, variable
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import replaced

# Attributes of the trainer that are known only when the batch before has ended.
_NOT_YET = (
    "optimizers", "lr_scheduler_configs", "callback_metrics", "logged_metrics", "progress_bar_metrics", "is_last_batch",
)  # fmt: skip
# Models take turns in recurrent layers, which keep their weights in lists too.
_IGNORED = frozenset(vars(pl.LightningModule())) | {"_flat_weights", "_flat_weight_refs"}


@dataclass(frozen=True)
class Progress:
    """Counters of a trainer as they will be in a later iteration.

    Attributes:
        values: (object, name of its attribute, value) for each counter.
    """

    values: tuple[tuple[Any, str, Any], ...]

    @classmethod
    def after_steps(cls, trainer: pl.Trainer, count: int = 1) -> Progress:
        """Return the counters of a later iteration, given the trainer within the step of an iteration.

        Args:
            trainer: the trainer.
            count: number of iterations until then.
        """
        loop = trainer.fit_loop.epoch_loop
        batches, steps = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step
        counted: list[tuple[Any, str]] = [(loop, "_batches_that_stepped")]
        counted += [(p, name) for p in (batches.total, batches.current) for name in ("ready", "started")]
        counted += [(p, name) for p in (batches.total, batches.current) for name in ("processed", "completed")]
        counted += [(p, name) for p in (steps.total, steps.current) for name in ("ready", "completed")]
        return cls(tuple((owner, name, getattr(owner, name) + count) for owner, name in counted))


@contextlib.contextmanager
def as_it_will_be(trainer: pl.Trainer, progress: Progress | None) -> Iterator[None]:
    """Within this context the trainer's counters are those of ``progress``; None leaves them."""
    if progress is None:
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in progress.values]
    for owner, name, value in progress.values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


class AheadWatch:
    """Checks that steps which run before their turn find what they would find in their turn.

    Args:
        trainer: trainer of the run.
        option: option that lets steps run early, for messages.
        instead: option with which they do not, for messages.

    Attributes:
        only_notes: whether reading what is not known yet is noted, instead of refused.
        noted: message on what a step has read that is not known yet; empty: nothing.
    """

    only_notes = False

    def __init__(self, trainer: pl.Trainer, option: str, instead: str) -> None:
        self._trainer = trainer
        self._option, self._instead = option, instead
        self.noted = ""
        self._view: Any = None
        self._modules: list[pl.LightningModule] = []
        self._read: dict[str, Variable] = {}
        self._held: dict[str, Snapshot] = {}
        self._graph: CallGraph | None = None
        self._settles = False  # the batch runs from which the step was captured

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Within this context a step runs, which must not read what the trainer does not know yet if the step is early.

        Reading it is refused whether the step is early or not, so that errors do not depend on the timing.
        """
        if self._view is None:
            self._view = self._made_view()
            modules = self._trainer.lightning_module.modules()
            self._modules = [module for module in modules if isinstance(module, pl.LightningModule)]
        with contextlib.ExitStack() as undo:
            for module in self._modules:
                undo.enter_context(replaced(module, "_trainer", self._view))
                undo.enter_context(replaced(module, "optimizers", self._refuse("optimizers()", module.optimizers)))
            yield

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within this context a step runs in its turn.

        What the very first one sets for all that follow (an attribute that is made when it is first needed) does not
        count as a change by a hook. Capture has seen it, and no cut lies between it and those who read it.
        """
        unchanged = [name for name in self._held if not self._changed(name)] if self._settles else []
        yield
        self._held |= {name: self._hold(name) for name in unchanged if self._changed(name)}

    def begin(self, graph: CallGraph) -> None:
        """Note the values that a step reads: until the next call hooks must not change them."""
        module = self._trainer.lightning_module
        if graph is not self._graph:
            keys = [key for key, _ in graph.reads if key[1] not in _IGNORED and key not in graph.written]
            self._read = {".".join(filter(None, key)): variable(module, *key) for key in keys} | outside(module)
        self._held = {name: self._hold(name) for name in self._read}
        self._graph, self._settles = graph, graph is not self._graph

    def check(self) -> None:
        """Check that hooks have changed nothing that steps read.

        Raises:
            ConfigurationError: names what has changed.
        """
        self._settles = False
        changed = next(filter(self._changed, self._held), None)
        if changed is not None:
            raise ConfigurationError(
                f"with {self._option} a hook of a batch, or a step after the first, has changed '{changed}', which "
                "training_step reads, when micro-batches of the next batch may have run already. Change it where the "
                "pipeline drains (on_train_epoch_start, on_validation_epoch_end), let the step work it out of "
                f"self.global_step, or use {self._instead}"
            )

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
                f"training_step reads {name}, which with {self._option} is not known yet when a part of the step runs, "
                "while the batch before still goes on; read it in on_train_batch_start or on_train_batch_end, or use "
                f"{self._instead}"
            )
            if not self.only_notes:
                raise ConfigurationError(why)
            self.noted = self.noted or why
            return read(*args, **kwargs)

        return refuse
