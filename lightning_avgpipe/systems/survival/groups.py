"""The groups of a run on this machine: they are started, watched, and started again when they have died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchft.coordination import LighthouseServer

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.systems.survival.survival import LIGHTHOUSE, NUMBER, STARTED
from lightning_avgpipe.utils.lightning import _IS_INTERACTIVE, _basic_subprocess_cmd, _Launcher, rank_zero_info
from lightning_avgpipe.utils.parent import ended

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
    from lightning_avgpipe.systems.survival.survival import Survival

_POLL_S = 0.1
_PAUSE_S = 1.0  # before a group is started again: an error that all have alike ends the others meanwhile
_END_S = 10.0  # time in which groups may end by themselves when they are asked to
_JOIN_MS = 7 * 24 * 3_600_000  # a group that lives is waited for, however long; the strategy's timeout limits that


def check_start(survival: Survival, strategy: AvgPipeStrategy) -> None:
    """Check that the processes are started in a way in which groups find each other.

    Raises:
        ConfigurationError: they are not.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    yours = f"start each group by itself, with its number in {NUMBER} and the address of a lighthouse in {LIGHTHOUSE}"
    if not survival.starts_groups:
        if survival.group is None and NUMBER not in os.environ:
            raise ConfigurationError(
                f"{survival!r} with a lighthouse at {survival.meets_at}, but without the number of this process's "
                f"group: set {NUMBER}, or group=..."
            )
        return
    if survival.group is not None or NUMBER in os.environ:
        raise ConfigurationError(
            f"group {survival.world_number} of {survival!r} has no lighthouse: start one (torchft_lighthouse "
            f"--min_replicas 1) and set {LIGHTHOUSE}, or leave the number out, and this process starts all groups"
        )
    found = {
        f"{type(environment).__name__}, which has started processes": environment.creates_processes_externally,
        f"num_nodes={strategy.num_nodes}": strategy.num_nodes > 1,
        "a notebook, which is no script that groups could run": _IS_INTERACTIVE,
    }
    for what, is_so in found.items():
        if is_so:
            raise ConfigurationError(f"{survival!r} with {what}: {yours}")


class GroupsLauncher(_Launcher):
    """Runs the script again for each group, and again for a group that has died while another one lives.

    This process has the lighthouse, and does not train. It ends when all groups have ended.

    Args:
        survival: options of the groups.
    """

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = dict.fromkeys(range(survival.groups), survival.restarts)
        self._stopping = False

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may start groups."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the groups, and end this process when all have ended: with 0 if one of them has trained to the end."""
        lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=_JOIN_MS,
            heartbeat_timeout_ms=int(1e3 * self._survival.heartbeat_timeout),
        )
        address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        with tempfile.TemporaryDirectory() as folder:
            try:
                code = self._watch(address, Path(folder) / "over")
            finally:
                self._end()
        lighthouse.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not sys.exit: callbacks would take that for a failure of a training which is not here

    def kill(self, signum: Any) -> None:
        """Send a signal to the first process of each group, which tells the others of its group."""
        for process in self._running.values():
            process.send_signal(signum)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        self.kill(signum)

    def _watch(self, address: str, over: Path) -> int:
        """Start the groups, and return an exit code when all have ended."""
        codes: dict[int, int] = {}  # of groups that have ended
        died: dict[int, float] = {}  # when those died that are to be started again
        for number in range(self._survival.groups):
            self._start(number, address, over)
        while self._running:
            time.sleep(_POLL_S)
            for number, process in list(self._running.items()):
                if (code := process.poll()) is not None:
                    self._clear(number)
                    codes[number] = code
                    if code:
                        died[number] = time.monotonic()
                    else:
                        over.touch()
            for number, when in list(died.items()):
                if over.exists() or self._stopping or not self._running:
                    died.clear()
                    break
                if time.monotonic() - when > _PAUSE_S:
                    self._start_again(number, codes[number], address, over)
                    del died[number]
        return 0 if 0 in codes.values() else max(1, *codes.values())

    def _start_again(self, number: int, code: int, address: str, over: Path) -> None:
        self._restarts[number] -= 1
        left = self._restarts[number]
        goes_on = f"the others go on; restarts={self._survival.restarts} are used up"
        if left >= 0:
            goes_on = f"the others go on, and it is started again ({left} more times at most)"
            self._start(number, address, over)
        rank_zero_info(f"group {number} {ended(code)}: {goes_on}")

    def _start(self, number: int, address: str, over: Path) -> None:
        environment = {**os.environ, NUMBER: str(number), LIGHTHOUSE: address, STARTED: str(over)}
        environment.pop("MASTER_PORT", None)  # each group is a world of its own
        # a process group of its own, in which all its processes can be ended at once
        self._running[number] = subprocess.Popen(_basic_subprocess_cmd(), env=environment, process_group=0)

    def _clear(self, number: int) -> None:
        """End what is left of a group: processes that have not noticed yet, or cannot, that their first one is gone."""
        leader = self._running.pop(number)
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all have ended

    def _end(self) -> None:
        """End all groups that still run."""
        self.kill(signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        while self._running:
            for number, process in list(self._running.items()):
                if process.poll() is not None or time.monotonic() > deadline:
                    self._clear(number)
                    process.wait()
            time.sleep(_POLL_S)
