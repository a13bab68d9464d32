"""A watch says why processes end, whatever the reason is made of, and who is silent, also if it keeps the store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.comm.watch import Watch
from lightning_avgpipe.errors import PeerError

NAMES = ("rank 0 (stage 1)", "rank 1 (stage 0)")
LIMIT_S = 20.0

Watching = Callable[..., Watch]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Stopped:
    """A store that does not answer until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        self.released.wait(LIMIT_S)
        raise dist.DistNetworkError("the store is gone")


@pytest.fixture
def watching() -> Iterator[Watching]:
    with ExitStack() as undo:

        def start(rank: int, store: Any, arrivals: Arrivals | None = None, **options: Any) -> Watch:
            watch = Watch(rank, [*NAMES], store, LIMIT_S, arrivals or Arrivals(), keeper=NAMES[0], **options)
            undo.callback(watch.close)
            return watch

        yield start


def failure_of(watch: Watch) -> str:
    """What the main thread of a process is told while it waits."""
    with pytest.raises(PeerError) as caught:
        Waits(Arrivals(), watch, LIMIT_S).until(lambda: False, "waits")
    return str(caught.value)


REASONS = {
    "plain": (ValueError("the fuse has blown"), "ValueError: the fuse has blown"),
    "a file name that is not UTF-8": (FileNotFoundError("caf\udce9.jpg"), r"FileNotFoundError: caf\\udce9\.jpg"),
    "a zero": (ValueError("a zero \0 inside"), "a zero \0 inside"),
    "without a text": (Unprintable(), r"Unprintable: \(str\(\) of it raises ValueError\)"),
    "huge": (ValueError("begin" + "x" * 10_000_000 + "end"), "(?s)ValueError: begin.* characters are left out .*end"),
    "a group": (ExceptionGroup("several", [KeyError("a"), ValueError("b")]), "(?s)ExceptionGroup: several.*KeyError"),
    "an interrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_every_exception_reaches_the_other_process(reason: str, watching: Watching) -> None:
    store = dist.HashStore()
    failing, other = watching(1, store), watching(0, store)
    error, expected = REASONS[reason]
    failing.report(error)
    told = failure_of(other)
    assert told.startswith(f"{NAMES[1]} failed: ")
    assert re.search(expected, told)
    assert len(told) < 200_000


def test_a_watch_that_fails_itself_says_so(watching: Watching) -> None:
    class Broken(dist.HashStore):
        def __getattribute__(self, name: str) -> Any:
            raise TypeError("not a store")

    assert f"the monitor of {NAMES[0]} failed: TypeError: not a store" in failure_of(watching(0, Broken()))


def test_who_does_not_answer_is_named(watching: Watching) -> None:
    account = watching(0, dist.HashStore()).status_of_all().text
    assert re.search(rf"{re.escape(NAMES[0])} is not in a step \(at test_watch.py:\d+ in test_who", account)
    assert re.search(rf"{re.escape(NAMES[1])} does not answer within 1\.5 s: it is gone, stopped or stuck", account)


def test_a_keeper_of_the_store_that_is_stopped_is_named_and_nobody_waits_for_it(watching: Watching) -> None:
    store = Stopped()
    watch = watching(1, store)
    begin = time.monotonic()
    account = watch.status_of_all().text
    assert re.search(rf"{re.escape(NAMES[0])}, which keeps the store .* has not answered for [345]\.\d s", account)
    silent = time.monotonic()
    assert silent - begin < 5
    watch.report(ValueError("of no use"))
    watch.await_readers()
    watch.close()
    assert time.monotonic() - silent < 1
    store.released.set()


def test_a_store_that_is_gone_is_named_after_who_kept_it(watching: Watching) -> None:
    store = Stopped()
    store.released.set()
    assert f"{NAMES[0]} is gone, and with it the store" in failure_of(watching(1, store))


def test_the_death_of_a_process_that_was_started_here_is_told_to_all(watching: Watching) -> None:
    store = dist.HashStore()
    watching(0, store, deaths=lambda: {1: "was killed by SIGKILL"})
    assert f"{NAMES[1]} was killed by SIGKILL" in failure_of(watching(1, store))


def test_the_first_failure_is_the_cause(watching: Watching) -> None:
    store = dist.HashStore()
    first, second = watching(0, store), watching(1, store)
    first.report(ValueError("first"))
    second.report(ValueError("second"))
    assert "first" in failure_of(first) and "first" in failure_of(second)


@pytest.mark.parametrize("moves", ["here", "elsewhere"])
def test_a_wait_in_which_bytes_flow_is_not_silence(moves: str, watching: Watching) -> None:
    store = dist.HashStore()
    arrivals, flowing = {"here": Arrivals(), "elsewhere": Arrivals()}, threading.Event()
    watch = watching(0, store)
    watching(1, store, arrivals["elsewhere"])

    def flow() -> None:
        while not flowing.wait(0.1):
            arrivals[moves].moved()

    thread = threading.Thread(target=flow)
    thread.start()
    threading.Timer(1.0, flowing.set).start()
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 0 \(stage 1\) waits, and nothing arrived for 0\.5 s"):
        Waits(arrivals["here"], watch, 0.5).until(lambda: False, "waits")
    thread.join(5.0)
    assert time.monotonic() - begin >= 1.0


def test_a_long_wait_says_what_it_is_for(watching: Watching, caplog: pytest.LogCaptureFixture) -> None:
    waits, begin = Waits(Arrivals(), watching(0, dist.HashStore()), 60.0, silent_s=0.4), time.monotonic()
    waits.until(lambda: time.monotonic() - begin > 0.6, "waits for the input of F0")
    (record,) = caplog.records
    assert re.fullmatch(
        r"rank 0 \(stage 1\) waits for the input of F0, for \d+ s by now; it gives up when nothing moves between "
        r"processes for 60 s \(timeout=\.\.\.\)",
        record.getMessage(),
    )
