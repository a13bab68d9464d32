"""Absence: notes on errors of user code that reads all weights of a module, some of which are on other processes."""

from __future__ import annotations

from torch import nn

from lightning_avgpipe.errors import AvgPipeError

# Parts of the messages of torch for computing on the meta device, and of Python for a gradient that is None.
_SAID = ("meta", "'NoneType' object")


def explain(error: BaseException, module: nn.Module | None) -> None:
    """Add a note on parameters without contents to an error of user code, if they may be its cause."""
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
