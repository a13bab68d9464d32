"""The groups of a run on this machine: start them, watch them, and restart those that have died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.systems.survival.survival import LIGHTHOUSE, NUMBER, STARTED, torchft
from lightning_avgpipe.utils.lightning import (
    _basic_subprocess_cmd,
    _Launcher,
    find_free_network_port,
    rank_zero_info,
)
from lightning_avgpipe.utils.parent import ended

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
    from lightning_avgpipe.systems.survival.survival import Survival

_POLL_S = 0.05
_PAUSE_S = 1.0  # before a group is started again: an error that all groups share ends the others meanwhile
_END_S = 10.0  # time in which the processes of a group that has failed, or is told to stop, may end by themselves
_JOIN_MS = 7 * 24 * 3_600_000  # as good as no limit: the strategy's timeout limits the wait for a living group


def check_start(survival: Survival, strategy: AvgPipeStrategy) -> None:
    """Check that the processes are started so that groups can find each other.

    Raises:
        ConfigurationError: a number or a lighthouse is missing or left over, or the processes are started otherwise.
    """
    environment = strategy.cluster_environment
    assert environment is not None
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
    if environment.creates_processes_externally or strategy.num_nodes > 1:
        raise ConfigurationError(
            f"{survival!r} on {strategy.num_nodes} nodes with {type(environment).__name__}: start each group by "
            f"itself, with its number in {NUMBER} and the address of a lighthouse in {LIGHTHOUSE}"
        )


class Group:
    """The processes of a group that has been started.

    Args:
        command: command of each process.
        size: number of processes.
        variables: variables of their environment.
    """

    def __init__(self, command: Sequence[str], size: int, variables: dict[str, str]) -> None:
        port = str(find_free_network_port())  # each group is a world of its own
        shared = {**os.environ, **variables, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE_RANK": "0"}
        self._processes = [
            subprocess.Popen(command, env={**shared, "LOCAL_RANK": str(rank)}, start_new_session=True)
            for rank in range(size)
        ]
        self._since = 0.0  # when it began to end

    def send(self, signum: int) -> None:
        """Send a signal to all processes."""
        for process in self._processes:
            process.send_signal(signum)

    def ends(self) -> str | None:
        """Return how the group failed, "" if it ended well, or None if it still runs; end the rest of a failed one."""
        codes = [process.poll() for process in self._processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and not self._since:
            self._since = time.monotonic()
            first = failed[0]
            self._failure = f"rank {first} {ended(codes[first] or 0)}"
        if None not in codes:
            return self._failure if failed else ""
        if any((codes[rank] or 0) < 0 for rank in failed) or (failed and time.monotonic() - self._since > _END_S):
            self.kill()  # at once after a signal: it can report nothing, and its signs of life would make others wait
        return None

    def kill(self) -> None:
        """End all processes at once, and those that they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class GroupsLauncher(_Launcher):
    """Runs the script again for each process of all groups, and restarts a group that died while another one lives.

    This process hosts the lighthouse, and does not train. It ends when all groups have ended.

    Args:
        survival: options of the groups.
        size: number of processes of a group.
    """

    def __init__(self, survival: Survival, size: int) -> None:
        self._survival, self._size = survival, size
        self._running: dict[int, Group] = {}
        self._stopping = 0  # number of the signal to stop that has been received; 0: none

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook may start groups."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the groups, and end this process when all have ended: with 0 if one of them has trained to the end."""
        lighthouse = torchft(".coordination").LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=_JOIN_MS,
            heartbeat_timeout_ms=int(1e3 * self._survival.heartbeat_timeout),
        )
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        with tempfile.TemporaryDirectory() as folder:
            over = Path(folder) / "over"
            address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
            try:
                self._watch({LIGHTHOUSE: address, STARTED: str(over)}, over)
            finally:
                for group in self._running.values():
                    group.kill()
            code = 0 if over.exists() else 1
        lighthouse.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not sys.exit, which callbacks would take for a failure of training, though none runs here

    def kill(self, signum: Any) -> None:
        """Send a signal to the processes of all groups."""
        for group in self._running.values():
            group.send(signum)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = signum
        self.kill(signum)

    def _watch(self, variables: dict[str, str], over: Path) -> None:
        """Start the groups, and return when all have ended; make the file ``over`` when one has trained to the end."""
        left = dict.fromkeys(range(self._survival.groups), self._survival.restarts)
        due = dict.fromkeys(left, 0.0)  # when groups are to be started
        while due or self._running:
            for number in [number for number, when in due.items() if time.monotonic() > when]:
                if self._stopping:
                    break
                variables[NUMBER] = str(number)
                self._running[number] = Group(_basic_subprocess_cmd(), self._size, variables)
                del due[number]
                if self._stopping:  # the signal came while the group was started, and has not reached it
                    self._running[number].send(self._stopping)
            time.sleep(_POLL_S)
            for number, said in [(n, said) for n, group in self._running.items() if (said := group.ends()) is not None]:
                del self._running[number]
                if not said:
                    over.touch()
                    continue
                if self._stopping:
                    continue
                left[number] -= 1
                if left[number] >= 0:
                    due[number] = time.monotonic() + _PAUSE_S
                rank_zero_info(f"group {number} has died ({said}); it may start again {max(0, left[number] + 1)} times")
            if not self._running or self._stopping or over.exists():  # no group is left that others could come back to
                due.clear()
