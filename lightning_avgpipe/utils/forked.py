"""Forked child processes that run one function, so that its side effects do not remain in this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch

from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.utils.device import accelerator_in_use, port_of
from lightning_avgpipe.utils.output import muted

T = TypeVar("T")

_PACKAGE = __name__.partition(".")[0]
_POLL_S = 0.2
_IDLE_S = 30.0  # a child that computes nothing for longer is stuck, waiting for a thread that was not forked
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
_TICKS_S = os.sysconf("SC_CLK_TCK")


class ForkError(AvgPipeError):
    """A child that could not be forked, has died or hangs, or whose result cannot be sent."""


class _Records(logging.Handler):
    """A logging handler that sends records to the parent process."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, with its message formatted."""
        record.msg, record.args, record.exc_info = record.getMessage(), (), None
        self._connection.send_bytes(pickle.dumps(("record", record)))


class _ChildTraceback(Exception):
    """The traceback of an error in the child, which becomes the cause of the error in the parent."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


def why_no_fork(device: torch.device) -> str | None:
    """Return why a forked child could not compute on a device, or None if it could.

    Args:
        device: device on which the child would compute.
    """
    if sys.platform != "linux":
        return f"on {sys.platform} a forked child that hangs could not be noticed, nor would it end with its parent"
    if not port_of(device).is_host:
        return f"a forked process cannot use {device.type}"
    if (used := accelerator_in_use()) is not None:
        return f"{used} is in use, which does not survive a fork"
    return None


class Child:
    """A forked copy of this process that runs one function.

    Changes of modules, objects and generators by the function stay in the child. Output, warnings and log records of
    the child are dropped, so that those of user code appear only once, in the process that trains. Records of this
    package's loggers are forwarded. Sockets are closed in the child, so that peers notice when this process ends. The
    child is killed when this process ends.

    Args:
        work: function that runs in the child. It gets the connection to this process, from which it may receive. Its
            result or error is sent to this process.
        purpose: what the child does, for messages.
    Raises:
        ForkError: the system has no memory for a child, or allows no further process.
    """

    def __init__(self, work: Callable[[Connection], Any], purpose: str) -> None:
        self.purpose = purpose
        self.connection, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads: see _run
            try:
                self.pid = os.fork()
            except OSError as error:  # too little memory, or too many processes
                self.connection.close()
                theirs.close()
                raise ForkError(f"the child that {purpose} could not be forked: {error}") from error
        if self.pid == 0:
            _run(work, theirs, parent)
        theirs.close()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next message of the child, or its result, and return it.

        Args:
            timeout_s: seconds to wait; None: wait as long as the child computes.
        Raises:
            TimeoutError: nothing was received in time. The child continues.
            ForkError: the child has died, or hangs.
            Exception: the error that the function raised.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._wait(end)
            try:
                kind, payload = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                raise self._died() from None
            if kind == "error":
                error, text = payload
                raise error from _ChildTraceback(text)
            if kind != "record":
                return payload
            logging.getLogger(payload.name).handle(payload)

    def _wait(self, end: float) -> None:
        """Wait until the child has sent something."""
        seen, used = time.monotonic(), self._cpu_s()
        while not self.connection.poll(max(0.0, min(_POLL_S, end - time.monotonic()))):
            now = time.monotonic()
            if now >= end:
                raise TimeoutError(f"the child that {self.purpose} has not answered yet")
            if (uses := self._cpu_s()) > used:
                used, seen = uses, now
            elif now - seen > _IDLE_S:
                raise ForkError(f"the child that {self.purpose} has computed nothing for {_IDLE_S:g} s")

    def send(self, message: Any) -> None:
        """Send a message to the child.

        Raises:
            ForkError: the child has died.
        """
        try:
            self.connection.send_bytes(pickle.dumps(message))
        except OSError:
            raise self._died() from None

    def _died(self) -> ForkError:
        """Reap the child, whose end of the connection is closed, and return an error that says how it ended."""
        how = "before"
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # has no effect on a child that has ended and is not reaped yet
            _, status = os.waitpid(self.pid, 0)
            self.pid, code = 0, os.waitstatus_to_exitcode(status)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        return ForkError(f"the child that {self.purpose} has died {how}")

    def close(self) -> None:
        """Kill the child, and close the connection."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.connection.close()

    def _cpu_s(self) -> float:
        """Return the processor seconds that the child has used."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # other code has reaped it; the connection will show that it has ended
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / _TICKS_S


def in_child(work: Callable[[], T], purpose: str) -> T:
    """Run a function in a forked child, and return its result.

    Raises:
        ForkError: the child cannot be forked, has died or hangs, or its result cannot be sent.
        Exception: the error that the function has raised.
    """
    with contextlib.closing(Child(lambda _: work(), purpose)) as child:
        return child.receive()  # type: ignore[no-any-return]


def send(connection: Connection, message: Any) -> None:
    """Send a message from the child to its parent, before the result."""
    connection.send_bytes(pickle.dumps(("message", message)))


def receive(connection: Connection) -> Any:
    """Wait in the child for the next message of its parent."""
    return pickle.loads(connection.recv_bytes())


def _run(work: Callable[[Connection], Any], connection: Connection, parent: int) -> NoReturn:
    """Run the function in the child, and exit without returning to the code that forked it."""
    try:
        gc.freeze()  # do not collect garbage of the parent: it may own threads that do not exist here
        _detach(connection, parent)
        threads = torch.get_num_threads()
        if threads == 1:
            _answer(work, connection)
        else:
            # The OpenMP threads of the thread that forked do not exist here, so it would wait for them forever. Another
            # thread starts its own.
            thread = threading.Thread(target=_answer, args=(work, connection, threads, torch.is_grad_enabled()))
            thread.start()
            thread.join()
    finally:
        os._exit(0)  # without clean-up of objects that belong to the parent


def _answer(
    work: Callable[[Connection], Any], connection: Connection, threads: int | None = None, grad: bool = True
) -> None:
    try:
        if threads is not None:
            torch.set_num_threads(threads)
            torch.set_grad_enabled(grad)
        with muted():
            message = "result", work(connection)
        sent = pickle.dumps(message)
    except BaseException as error:
        sent = _pickled_error(error)
    connection.send_bytes(sent)


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        sent = pickle.dumps(("error", (error, text)))
        pickle.loads(sent)
    except Exception:
        return pickle.dumps(("error", (ForkError(f"{type(error).__name__}: {error}"), text)))
    return sent


def _detach(connection: Connection, parent: int) -> None:
    """Close or replace what the child shares with its parent: signal handlers, sockets, output and logging."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call of prctl
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # the descriptor that listed this folder
            if fd != connection.fileno() and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open as long as the child lives
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    logging.lastResort = None
    logging.getLogger(_PACKAGE).addHandler(_Records(connection))
