"""Groups for a test: forked processes that find each other through a lighthouse, and tell what they do."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.processes import free_port, until

LIMIT_S = 90.0


@contextlib.contextmanager
def lighthouse(heartbeat_ms: int = 1000) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a lighthouse; yields its address, and its process."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "torchft_lighthouse"), "--min_replicas", "1", "--bind", f"127.0.0.1:{port}",
        "--heartbeat_timeout_ms", str(heartbeat_ms), "--join_timeout_ms", "600000",
    ]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "RUST_LOG": "error"})
    try:
        listening(port)
        yield f"http://localhost:{port}", process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def listening(port: int) -> None:
    """Wait until somebody listens on a port."""

    def answers() -> bool:
        with socket.socket() as asked:
            asked.settimeout(1.0)
            return asked.connect_ex(("127.0.0.1", port)) == 0

    until(answers, f"somebody who listens on port {port}", LIMIT_S)


@dataclass(frozen=True)
class Event:
    """What a process has told.

    Attributes:
        when: by the clock that all processes share.
        group, rank, start: which process, and of which start of its group.
        what: name of the event.
        facts: more.
    """

    when: float
    group: int
    rank: int
    start: int
    what: str
    facts: dict[str, Any]


class Told(L.Callback):
    """Tells each step, with the place in the epoch; ends training at the step that :meth:`Run.stop` names."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self.tell = tell

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("step", step=trainer.global_step, epoch=trainer.current_epoch, batch=batch_idx)
        last = Path("..", "last")  # processes are in folders of their groups
        if last.exists() and trainer.global_step >= int(last.read_text()):
            trainer.should_stop = True


class Run:
    """The processes of all groups.

    Args:
        function: what each process runs, given ``tell`` and the arguments of :meth:`start`; what it returns is told as
            its end.
        address: of the lighthouse.
        folder: the processes write here.
    """

    def __init__(self, function: Callable[..., Any], address: str, folder: Path) -> None:
        self.events: list[Event] = []
        self.lose_lighthouse: Callable[[], None] = lambda: None
        self.processes: dict[tuple[int, int], Any] = {}
        self.starts: dict[int, int] = {}
        self._function, self._address, self._folder = function, address, folder
        self._pipes: dict[Connection, tuple[int, int, int]] = {}
        self._context = mp.get_context("fork")

    def start(self, group: int, size: int = 1, **arguments: Any) -> None:
        """Start the processes of a group, perhaps once more."""
        start = self.starts[group] = self.starts.get(group, -1) + 1
        variables = {
            "REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": self._address, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "GLOO_SOCKET_IFNAME": "lo",
            "RUST_LOG": "error",
        }  # fmt: skip
        for rank in range(size):
            here, there = self._context.Pipe(duplex=False)
            own = {**variables, "LOCAL_RANK": str(rank)} if size > 1 else variables
            args = (there, own, (group, rank, start), self._function, self._folder, arguments)
            process = self._context.Process(target=_work, args=args, daemon=True)
            process.start()
            there.close()
            self.processes[group, rank] = process
            self._pipes[here] = group, rank, start

    def kill(self, group: int, ranks: Sequence[int], signum: int = signal.SIGKILL) -> float:
        """Send a signal to processes of a group; returns when."""
        when = time.monotonic()
        for rank in ranks:
            os.kill(self.processes[group, rank].pid, signum)
        return when

    def until(self, seen: Callable[[Event], bool], after: float = 0.0, limit_s: float = LIMIT_S) -> Event:
        """Wait for an event after a time, which may have come already."""
        deadline, known = time.monotonic() + limit_s, 0
        while True:
            for event in self.events[known:]:
                if event.when > after and seen(event):
                    return event
            known = len(self.events)
            left = deadline - time.monotonic()
            ready = wait(list(self._pipes), left) if self._pipes and left > 0 else []
            if not ready:
                raise AssertionError(f"not seen within {limit_s:g} s; the last were {self.events[-8:]}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    self.events.append(Event(*pickle.loads(pipe.recv_bytes())))
                except EOFError:
                    self.events.append(Event(time.monotonic(), *self._pipes.pop(pipe), "gone", {}))

    def ends(self, group: int, rank: int = 0, limit_s: float = LIMIT_S) -> Any:
        """Wait for the end of a process; returns what its function returned."""
        start = self.starts[group]

        def is_end(event: Event) -> bool:
            of = (event.group, event.rank, event.start) == (group, rank, start)
            return of and event.what in ("end", "error", "gone")

        event = self.until(is_end, limit_s=limit_s)
        assert event.what == "end", f"group {group}, rank {rank}: {event.what} {event.facts.get('error')}"
        return event.facts["result"]

    def stop(self, step: int) -> None:
        """Let all end after a step that none has reached."""
        (self._folder / "new").write_text(str(step))
        (self._folder / "new").rename(self._folder / "last")

    def steps(self, group: int, rank: int = 0, start: int | None = None) -> list[tuple[int, int, int]]:
        """The steps that a group has told: (global step, epoch, batch)."""
        return [
            (e.facts["step"], e.facts["epoch"], e.facts["batch"]) for e in self.events
            if (e.group, e.rank, e.what) == (group, rank, "step") and start in (None, e.start)
        ]  # fmt: skip

    def close(self) -> None:
        """End all processes that are left."""
        for process in self.processes.values():
            process.kill()
            process.join(LIMIT_S)


@contextlib.contextmanager
def running(function: Callable[..., Any], folder: Path, heartbeat_ms: int = 1000) -> Iterator[Run]:
    """A lighthouse, and groups to be started; all have ended when the context ends."""
    with lighthouse(heartbeat_ms) as (address, process):
        run = Run(function, address, folder)
        run.lose_lighthouse = process.kill
        try:
            yield run
        finally:
            run.close()


def _work(
    pipe: Connection, variables: dict[str, str], who: tuple[int, int, int], function: Any, folder: Path, arguments: Any
) -> None:
    os.environ.update(variables)
    folder = folder / f"group-{who[0]}"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    torch.set_num_threads(1)

    def tell(what: str, **facts: Any) -> None:
        pipe.send_bytes(pickle.dumps((time.monotonic(), *who, what, facts)))

    code = 1
    try:
        tell("end", result=function(tell, who, **arguments))
        code = 0
    except BaseException as error:  # told to the test, whatever it is
        tell("error", error=f"{type(error).__name__}: {error}")
    finally:
        pipe.close()
        os._exit(code)
