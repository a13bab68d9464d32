"""Exceptions and signals with several processes: all processes end together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_avgpipe.comm.watch import REQUEUE, STOP
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.utils.lightning import Callback, SIGTERMException, TrainerStatus, pl, rank_zero_warn
from lightning_avgpipe.utils.patching import replaced


@contextlib.contextmanager
def ending_together(trainer: pl.Trainer, connection: Connection) -> Iterator[None]:
    """Within this context, the whole run of a trainer, no process ends or goes on alone.

    A signal may reach any process at any time. It is only noted; all processes learn of it with the same message from
    rank 0, and obey at the same batch. So a checkpoint that is saved then is complete, although it takes all processes.
    Lightning would act at once in each process, and would ask all of them before every batch whether rank 0 has a
    signal.

    Args:
        trainer: trainer of the run.
        connection: connection of the processes.
    """
    signals = trainer._signal_connector
    requeue = signals._slurm_sigusr_handler_fn
    requeued: list[bool] = []

    def agreed(request: str) -> None:
        if request == STOP:
            signals.received_sigterm = True  # Lightning's loops do the rest

    def before_batch() -> None:
        if connection.agreed(REQUEUE) and not requeued:
            requeued.append(True)
            requeue(0, None)  # type: ignore[arg-type]
        if trainer.received_sigterm:
            raise SIGTERMException

    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(signals, "_sigterm_notifier_fn", partial(_on_sigterm, trainer, connection)))
        undo.enter_context(replaced(signals, "_slurm_sigusr_handler_fn", partial(_note, connection, REQUEUE)))
        epoch_loop = trainer.fit_loop.epoch_loop
        if hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            undo.enter_context(replaced(epoch_loop, "_broadcast_sigterm_tensor", before_batch))
        first = _FirstToKnow()
        trainer.callbacks.insert(0, first)  # type: ignore[attr-defined]
        undo.callback(trainer.callbacks.remove, first)  # type: ignore[attr-defined]
        undo.enter_context(connection.listening(agreed))
        yield


class _FirstToKnow(Callback):
    """A callback that reports an exception before other callbacks react to it together with all processes."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        trainer.strategy.on_exception(exception)


def _note(connection: Connection, request: str, signum: Any = None, frame: Any = None) -> None:
    """Note a request. A signal handler does nothing else, since it must not wait for what it has interrupted."""
    connection.note(request)


def _on_sigterm(trainer: pl.Trainer, connection: Connection, signum: Any, frame: Any) -> None:
    """Note the signal, and pass it on to the processes that this one has started."""
    launcher = trainer.strategy.launcher
    if STOP not in connection.noted and launcher is not None:
        launcher.kill(signum)
    _note(connection, STOP)


@contextlib.contextmanager
def saving_what_is_whole(trainer: pl.Trainer, connection: Connection, begun: Callable[[], bool]) -> Iterator[None]:
    """Within this context, from the start of a run on, no checkpoint replaces a better one after a failure.

    A callback that saves in ``on_exception`` would do that: before training has begun the module may not even have the
    weights that the run was to resume from, and after a failure of some process there is no whole model.

    Args:
        trainer: trainer of the run.
        connection: connection of the processes.
        begun: returns whether training has begun in this run.
    """
    save = trainer.save_checkpoint

    def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
        ended = trainer.state.status == TrainerStatus.INTERRUPTED
        if connection.failed:
            rank_zero_warn(
                f"No checkpoint is saved to {filepath} after the failure: each process holds a part of the model only, "
                "and the processes did not stop at the same iteration. Save regularly "
                "(ModelCheckpoint(every_n_train_steps=...)), and resume from the last checkpoint"
            )
        elif ended and not begun():
            rank_zero_warn(
                f"No checkpoint is saved to {filepath}: the run ended before training began, and what may be there "
                "from a run before is as it was"
            )
        else:
            save(filepath, *args, **kwargs)

    with replaced(trainer, "save_checkpoint", save_checkpoint):
        yield
