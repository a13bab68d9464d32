"""Whose code a file contains (the user's, an installed package's, Python's, this package's), and lines of user code."""

from __future__ import annotations

import copy
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

_TORCH = Path(torch.__file__).parent
# Folders end with a separator, so that ``lightning_avgpipe_demo`` does not count as this package.
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
LIGHTNING_FOLDERS = tuple(  # some may not exist
    f"{_TORCH.parent / name}{os.sep}" for name in ("lightning", "lightning_fabric", "pytorch_lightning")
)
_LIBRARIES = (f"{_TORCH}{os.sep}", PACKAGE)
_FRAMEWORKS = (*_LIBRARIES, *LIGHTNING_FOLDERS)  # code that calls user code during training
_STANDARD = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")})
# Installed packages may be in several places: the user's site, a virtual environment, or PYTHONPATH.
_INSTALLED = frozenset(("site-packages", "dist-packages"))
_OF_LIBRARY = "a line of a library"


@functools.cache
def is_installed(path: str) -> bool:
    """Return whether a file belongs to an installed package; models may come from one too."""
    return not _INSTALLED.isdisjoint(Path(path).parts)


@functools.cache
def is_standard(path: str) -> bool:
    """Return whether a file belongs to Python's standard library."""
    return path.startswith(_STANDARD) and not is_installed(path)


def source_line() -> str:
    """Return the innermost line of user code that is being executed, such as ``file.py:12 in forward``.

    Code of torch, of Lightning, of Python's standard library and of this package is skipped.
    """
    return _innermost(traceback.walk_stack(sys._getframe(1)), _FRAMEWORKS)


def lines_of_thread(thread: int, most: int) -> str:
    """Return the innermost lines of user code in which a thread is, such as ``a.py:12 in f, called at b.py:3 in g``.

    Args:
        thread: identifier of the thread.
        most: largest number of lines.
    """
    frame = sys._current_frames().get(thread)
    lines = _lines_of_user(traceback.walk_stack(frame) if frame is not None else (), _FRAMEWORKS)
    return ", called at ".join(islice(lines, most)) or _OF_LIBRARY


def is_copying() -> bool:
    """Return whether ``copy.deepcopy`` is running in this thread."""
    return any(frame.f_code is copy.deepcopy.__code__ for frame, _ in traceback.walk_stack(sys._getframe(1)))


def is_within(modules: Collection[str], others: Collection[str]) -> bool:
    """Return whether this thread's innermost frame of any of these Python modules is one of ``modules``.

    Args:
        modules: full names of Python modules.
        others: full names of other Python modules.
    """
    names = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next((name in modules for name in names if name in modules or name in others), False)


def caught_line(error: BaseException) -> str:
    """Return the line of the function that caught an error from which the error came."""
    return _innermost(list(traceback.walk_tb(error.__traceback__))[:1])


def raising_line(error: BaseException) -> str:
    """Return the innermost line of user code from which an error came."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def _innermost(frames: Iterable[tuple[FrameType, int]], libraries: tuple[str, ...] = _LIBRARIES) -> str:
    return next(_lines_of_user(frames, libraries), _OF_LIBRARY)


def _lines_of_user(frames: Iterable[tuple[FrameType, int]], libraries: tuple[str, ...]) -> Iterator[str]:
    for frame, line in frames:
        path = frame.f_code.co_filename
        if not (path.startswith((*libraries, "<")) or is_standard(path)):
            yield f"{Path(path).name}:{line} in {frame.f_code.co_name}"


def traceback_of_user_code(error: BaseException) -> str:
    """Return the traceback of an error without the frames of torch, Lightning and this package.

    An error that passed only through these, such as one of this package's own, keeps all of its frames.
    """
    shown = part = traceback.TracebackException.from_exception(error)
    while part is not None:
        kept = [frame for frame in part.stack if not frame.filename.startswith(_FRAMEWORKS)]
        if kept:
            part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__  # type: ignore[assignment]
    return "".join(shown.format()).rstrip()
