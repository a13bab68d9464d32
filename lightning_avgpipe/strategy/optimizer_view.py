"""A read-only view of the optimizers for a step that is divided into stages.

Each process has the optimizer states of its own parameters only. And each stage runs the step up to the end of its own
part. So every stage would repeat a change at the beginning of the step, and only the last one would make a change at
its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import unwrapped
from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.errors import CaptureError
from lightning_avgpipe.utils.patching import Replacement, all_replaced
from lightning_avgpipe.utils.source import source_line


def read_only(optimizers: Sequence[Optimizer], apart: bool) -> AbstractContextManager[None]:
    """Return a context within which changing an optimizer's parameter groups raises a CaptureError.

    Args:
        optimizers: optimizers of the run.
        apart: whether stages are in several processes; then reading an optimizer's state also raises a CaptureError.
    """
    replacements: list[Replacement] = []
    for optimizer in map(unwrapped, optimizers):
        replacements.append((optimizer, "param_groups", [_Group(g) for g in optimizer.param_groups]))
        if apart:
            replacements.append((optimizer, "state", _State()))
    return all_replaced(replacements)


def _refusing(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        error = CaptureError(f"at {source_line()} the step {what}; {instead}")
        if (tracer := StepTracer.current()) is not None:
            tracer.note(error)
        raise error

    return refuse


class _Group(dict[str, Any]):
    """A parameter group that can only be read."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refusing(  # type: ignore[assignment]
        "changes hyper-parameters of an optimizer, such as a learning rate, which every stage that reaches this line "
        "would repeat",
        "return the scheduler from configure_optimizers with interval='step', or change them in a hook "
        "(on_train_batch_end)",
    )


class _State:
    """A stand-in for the state of an optimizer, which refuses every access."""

    __contains__ = __delitem__ = __getattr__ = __getitem__ = __iter__ = __len__ = __setitem__ = _refusing(
        "uses the state of an optimizer, of which each process has only the part of its own parameters",
        "keep what the step needs in the module",
    )
