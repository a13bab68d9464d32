"""Lines of the user's code, for messages."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (str(Path(torch.__file__).resolve().parent), _PACKAGE)


def source_line() -> str:
    """The innermost line being executed that is neither torch's nor ours, as ``file.py:12 in forward``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARIES) and not path.startswith("<"):
            return f"{Path(path).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"
