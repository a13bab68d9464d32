"""Absence: what code that looks at all weights of a module meets where some are on other processes."""

from __future__ import annotations

from torch import nn

from lightning_avgpipe.errors import AvgPipeError

# What torch says of computing with contents that are not there, and Python of a gradient that is None.
_SAID = ("meta", "'NoneType' object")


def explain(error: BaseException, module: nn.Module | None) -> None:
    """Add to an error of user code that parameters of other stages have no contents here, if it may come of that."""
    absent = [] if module is None else [name for name, p in module.named_parameters() if p.is_meta]
    said = isinstance(error, (RuntimeError, AttributeError)) and any(what in str(error) for what in _SAID)
    if not absent or not said or isinstance(error, AvgPipeError):
        return
    note = (
        f"Parameters of other stages have no numbers and no gradient on this process, such as '{absent[0]}'. Code that "
        "looks at all of them in a hook can leave out those with is_meta"
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
