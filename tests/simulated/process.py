"""Processes that have the simulated device, and do for tests what these ask of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
NAME = "simulated device"


class SimulatedProcess:
    """A process with the device.

    Args:
        library: that :mod:`tests.simulated.build` has made.
    """

    def __init__(self, library: Path) -> None:
        self._library = library
        self._start()

    def _start(self) -> None:
        self._is_asked = False
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._library), name=NAME, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any, **environment: str) -> None:
        """Let it call a function of a module, in the folder where this process is now."""
        if self._is_asked:  # nobody waited for its last answer: a test failed
            self.restart()
        self._is_asked = True
        self._connection.send((function, args, environment, os.getcwd()))

    def end(self) -> Any:
        """What the function returned.

        Raises:
            AssertionError: it failed, or takes too long.
        """
        try:
            assert self._connection.poll(LIMIT_S), f"no answer for {LIMIT_S:.0f} s"
            result, error = self._connection.recv()
        except BaseException:  # the next test gets another one
            self.restart()
            raise
        self._is_asked = False
        assert error is None, error
        return result

    def restart(self) -> None:
        """Begin anew, with a device on which nothing has failed yet."""
        self.close()
        self._start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Both."""
        self.begin(function, *args)
        return self.end()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join(LIMIT_S)
        self._connection.close()


def _serve(connection: Any, library: Path) -> None:
    import torch

    from tests.simulated import communicator, device

    torch.set_num_threads(1)
    device.start(library)
    communicator.register()
    while True:
        function, args, environment, folder = connection.recv()
        result, error = None, None
        with _surroundings(environment, folder):
            try:
                torch.manual_seed(0)
                result = function(*args)
            except BaseException:  # reported to the test, whatever it is
                error = traceback.format_exc()
        connection.send((result, error))


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str], folder: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment, XDG_CACHE_HOME=f"{folder}/cache")
    os.chdir(folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
