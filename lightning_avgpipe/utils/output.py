"""Muting of a thread's output, warnings and log records that another thread or process produces as well."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_warnings: Any = warnings  # its hook for output has no type


class _Thread(threading.local):
    is_muted: Callable[[], bool] | None = None
    shows: tuple[Any, Any] = (None, None)  # functions that showed warnings when muting began


_thread = _Thread()


def _is_muted() -> bool:
    return _thread.is_muted is not None and _thread.is_muted()


class _Stream:
    """A replacement for ``sys.stdout`` or ``sys.stderr`` that drops what muted threads write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if _is_muted() else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def unmuted_stream(stream: Any) -> Any:
    """Return the stream behind a muting replacement; any other stream is returned unchanged."""
    return stream._stream if isinstance(stream, _Stream) else stream


class muted:
    """A context in which this thread's output, warnings and log records are dropped.

    Records of this package's loggers are kept, and so is output to the thread's own objects (``redirect_stdout``,
    ``catch_warnings(record=True)``, files).

    Args:
        when: function that returns whether the thread is muted now; called for each line.
    """

    __slots__ = ("_before", "_handle", "_show", "_streams", "_when")

    def __init__(self, when: Callable[[], bool] = lambda: True) -> None:
        self._when = when

    def __enter__(self) -> None:
        self._before = _thread.is_muted, _thread.shows
        _thread.is_muted, _thread.shows = self._when, _shows()
        self._streams = sys.stdout, sys.stderr
        self._handle, self._show = logging.Logger.handle, _warnings._showwarnmsg
        sys.stdout, sys.stderr = _Stream(unmuted_stream(sys.stdout)), _Stream(unmuted_stream(sys.stderr))
        logging.Logger.handle, _warnings._showwarnmsg = _handle, _show  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        _thread.is_muted, _thread.shows = self._before
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            if isinstance(getattr(sys, name), _Stream):  # otherwise user code has replaced the stream
                setattr(sys, name, stream)
        logging.Logger.handle, _warnings._showwarnmsg = self._handle, self._show  # type: ignore[method-assign]


_handle_any, _show_any = logging.Logger.handle, _warnings._showwarnmsg


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    if not _is_muted() or record.name.partition(".")[0] == _PACKAGE:
        _handle_any(logger, record)


def _shows() -> tuple[Any, Any]:
    return _warnings.showwarning, _warnings._showwarnmsg_impl


def _show(message: Any) -> None:
    if not _is_muted() or _shows() != _thread.shows:
        _show_any(message)
        return
    # forget the dropped warning, so that it is shown the next time that it is raised without muting
    text, category = str(message.message), message.category
    _warnings.onceregistry.pop((text, category), None)
    frame = sys._getframe(1)
    while frame is not None:
        registry = frame.f_globals.get("__warningregistry__", {})
        for line in (message.lineno, 0):
            registry.pop((text, category, line), None)
        frame = frame.f_back  # type: ignore[assignment]
