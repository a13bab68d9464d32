"""The mesh: which process hosts which stage, and everything that connects the processes.

::

    K = 4 stages on 2 processes      rank 1: stages 0, 2       rank 0: stages 1, 3
    the last stage is always on rank 0, and so are the loss, the loggers and the dataloader
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe import tree
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.runtime.channel import (
    Arrivals,
    Inbox,
    LocalChannel,
    NetworkInbox,
    NetworkOutbox,
    Outbox,
    Wire,
    as_bytes,
)
from lightning_avgpipe.runtime.clock import ClockOffset, estimate_offset, host_now
from lightning_avgpipe.runtime.message import Message
from lightning_avgpipe.runtime.recording import Recorder

__all__ = ["Mesh", "Wiring"]

T = TypeVar("T")

_ACKNOWLEDGE_S = 5.0  # how long a failing process stays, so that the others can read why
_CLOCK_ROUNDS = 16
_REPORT_S = 0.2  # a process that fails reports before it closes its connections
_GRACE = timedelta(seconds=60)
_POLL_S = 0.5  # between two looks at whether another process has failed
_instances = itertools.count()


class Wiring:
    """The channels of one stage: its ends of the hop before and of the hop after it."""

    def __init__(self) -> None:
        self.values: Inbox | None = None
        self.to_next: Outbox | None = None
        self.gradients: Inbox | None = None
        self.to_previous: Outbox | None = None


class Mesh:
    """Processes, stages and channels of one group.

    Args:
        num_stages: K, a multiple of ``world_size``.
        rank: of this process.
        world_size: number of processes.
        device: of this process.
        timeout: longest wait for another process.
        device_backend: backend of the channels between devices, such as "nccl"; None sends over the host.

    All processes build it at the same time. With one process nothing is connected.
    """

    def __init__(
        self,
        num_stages: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        device_backend: str | None = None,
    ) -> None:
        if num_stages % world_size:
            raise ConfigurationError(
                f"num_stages={num_stages} on {world_size} processes: the number of stages must be a multiple of the "
                f"number of processes; use num_stages={max(1, num_stages // world_size) * world_size}"
            )
        self.num_stages = num_stages
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timeout
        self.arrivals = Arrivals()
        self._number = next(_instances)
        self._reported = False
        self._opened: list[NetworkInbox | NetworkOutbox] = []
        self._local: list[LocalChannel] = []
        self._news_out: list[NetworkOutbox] = []
        self._news_in: NetworkInbox | None = None
        self.recorder: Recorder | None = None
        self.wiring: dict[int, Wiring] = {}
        self._groups: dict[tuple[str, int, int], dist.ProcessGroup] = {}
        self._control: dist.ProcessGroup | None = None
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._subset_backend = f"cpu:gloo,cuda:{device_backend}" if device_backend else "gloo"
        if world_size > 1:
            self._make_groups(device_backend)

    # -- who is where ------------------------------------------------------------------------------------------------

    def rank_of(self, stage: int) -> int:
        """The process that hosts a stage."""
        return (self.num_stages - 1 - stage) % self.world_size

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this process."""
        return tuple(k for k in range(self.num_stages) if self.rank_of(k) == self.rank)

    @property
    def hosts_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == 0

    # -- groups and channels -----------------------------------------------------------------------------------------

    def _make_groups(self, device_backend: str | None) -> None:
        # Our own waits end first: their errors name stage and action.
        timeout = self.timeout + _GRACE

        def group(kind: str, a: int, b: int, backend: str) -> None:
            self._groups[kind, a, b] = dist.new_group([a, b], timeout=timeout, backend=backend)

        # Every process takes part in making every group, in the same order.
        self._control = dist.new_group(list(range(self.world_size)), timeout=timeout, backend="gloo")
        for peer in range(1, self.world_size):
            group("news", 0, peer, "gloo")
        for k in range(self.num_stages - 1):
            a, b = self.rank_of(k), self.rank_of(k + 1)
            for direction in ("forward", "backward"):
                # two hops between the same processes (several stages per process) need two groups as well
                group(f"{direction} {k}", a, b, "gloo")
                if device_backend not in (None, "gloo"):
                    assert device_backend is not None
                    group(f"{direction} {k} device", a, b, device_backend)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Connect some processes for collectives among them. Every process calls it, also those that are not named."""
        key = tuple(ranks)
        if key not in self._subsets:
            timeout = self.timeout + _GRACE
            self._subsets[key] = dist.new_group(list(key), timeout=timeout, backend=self._subset_backend)
        return self._subsets[key]

    def open(self) -> None:
        """Start the channels, unless they are open."""
        if self.wiring:
            return
        self.arrivals = Arrivals()
        self.wiring = {k: Wiring() for k in self.stages}
        for k in range(self.num_stages - 1):
            a, b = self.rank_of(k), self.rank_of(k + 1)
            if a == b:
                if a == self.rank:
                    forward, backward = LocalChannel(), LocalChannel()
                    self._local += [forward, backward]
                    self.wiring[k].to_next, self.wiring[k + 1].values = forward, forward
                    self.wiring[k + 1].to_previous, self.wiring[k].gradients = backward, backward
            elif self.rank == a:
                self.wiring[k].to_next = self._outbox(f"forward {k}", a, b, b)
                self.wiring[k].gradients = self._inbox(f"backward {k}", a, b, b)
            elif self.rank == b:
                self.wiring[k + 1].values = self._inbox(f"forward {k}", a, b, a)
                self.wiring[k + 1].to_previous = self._outbox(f"backward {k}", a, b, a)
        if self.rank == 0:
            self._news_out = [self._outbox("news", 0, peer, peer) for peer in range(1, self.world_size)]
        else:
            self._news_in = self._inbox("news", 0, self.rank, 0)

    def close(self, failed: bool = False) -> None:
        """Stop the channels and their threads; after a failure without waiting for peers."""
        for channel in self._opened:
            channel.close(join_s=0.1 if failed else self.timeout.total_seconds())
        self._opened, self._local, self._news_out, self._news_in = [], [], [], None
        self.wiring = {}

    def record(self, recorder: Recorder | None) -> None:
        """From now on tell this recorder, or nobody, what executor and channels do."""
        self.recorder = recorder
        for wiring in self.wiring.values():
            for end in (wiring.values, wiring.to_next, wiring.gradients, wiring.to_previous):
                if isinstance(end, (NetworkInbox, NetworkOutbox)):
                    end.recorder = recorder

    def _outbox(self, kind: str, a: int, b: int, peer: int) -> NetworkOutbox:
        outbox = NetworkOutbox(kind, self._wire(kind, a, b, peer), self.arrivals)
        self._opened.append(outbox)
        return outbox

    def _inbox(self, kind: str, a: int, b: int, peer: int) -> NetworkInbox:
        inbox = NetworkInbox(kind, self._wire(kind, a, b, peer), self.arrivals)
        self._opened.append(inbox)
        return inbox

    def _wire(self, kind: str, a: int, b: int, peer: int) -> Wire:
        return Wire(peer, self._groups[kind, a, b], self.device, self._groups.get((f"{kind} device", a, b)))

    # -- news: from rank 0 to all ------------------------------------------------------------------------------------

    def publish(self, item: T | None = None) -> T:
        """Rank 0 tells all processes: it passes the item and does not wait; the others get what it passed.

        Args:
            item: any tree of tensors and picklable leaves; ignored on other ranks.
        """
        if self.rank == 0:
            if self._news_out:
                leaves, spec = tree.flatten(item)
                tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
                rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                for outbox in self._news_out:
                    outbox.put(Message(0, tensors, (), [rest, spec]))
            return item  # type: ignore[return-value]
        inbox = self._news_in
        assert inbox is not None
        inbox.expect(1)
        self.arrivals.wait_for(
            inbox.ready,
            self.timeout.total_seconds(),
            lambda: f"rank {self.rank} (stages {self.stages}) waits for rank 0's batch or metrics",
            self.check_peers,
        )
        message = inbox.get()
        rest, spec = message.entries
        tensors_in = iter(message.tensors)
        leaves = [next(tensors_in) if isinstance(leaf, str) and leaf == _TENSOR else leaf for leaf in rest]
        return tree.unflatten(leaves, spec)  # type: ignore[no-any-return]

    # -- collectives on the host -------------------------------------------------------------------------------------

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all processes."""
        self.together(what, lambda: dist.barrier(group=self._control))

    def broadcast(self, item: T, source: int = 0) -> T:
        """Every process gets the source's item."""
        if self.world_size == 1:
            return item
        if source == 0 and self.wiring:
            return pickle.loads(self.publish(pickle.dumps(item)))  # type: ignore[no-any-return]
        box = [item]
        self.together("a broadcast", lambda: dist.broadcast_object_list(box, source, group=self._control))
        return box[0]

    def gather_objects(self, item: T) -> list[T]:
        """On rank 0 every process's item, by rank; elsewhere only one's own."""
        items: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [item]
        self.together(
            "a gathering of objects",
            lambda: dist.gather_object(item, items if self.rank == 0 else None, dst=0, group=self._control),
        )
        return items if self.rank == 0 else [item]

    def clock(self) -> ClockOffset:
        """How far this process's clock is from that of rank 0. Every rank calls it."""
        rounds: list[tuple[float, float, float]] = []

        def exchange() -> None:
            reading = torch.empty((), dtype=torch.float64)
            for _ in range(_CLOCK_ROUNDS):
                asked = host_now()
                dist.send(reading, 0, group=self._control)
                dist.recv(reading, 0, group=self._control)
                rounds.append((asked, float(reading), host_now()))

        def answer() -> None:
            for peer in range(1, self.world_size):
                for _ in range(_CLOCK_ROUNDS):
                    dist.recv(torch.empty((), dtype=torch.float64), peer, group=self._control)
                    dist.send(torch.tensor(host_now(), dtype=torch.float64), peer, group=self._control)

        self.together("an alignment of clocks", answer if self.rank == 0 else exchange)
        return estimate_offset(rounds) if rounds else ClockOffset()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place, for a tensor on the host."""
        self.together("a sum", lambda: dist.all_reduce(tensor, group=self._control))
        return tensor

    def collect(self, tensors: Mapping[str, Tensor], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """On rank 0 the owners' tensors, those of other processes as copies on the host; elsewhere one's own.

        Args:
            tensors: the same names, shapes and types on every process.
            owner: name -> rank.
        """
        collected = dict(tensors)

        def exchange() -> None:
            for name, tensor in tensors.items():
                source = owner(name)
                if source == 0 or tensor.numel() == 0:
                    continue
                if self.rank == source:
                    dist.send(as_bytes(tensor.cpu()), 0, group=self._control)
                elif self.rank == 0:
                    collected[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    dist.recv(as_bytes(collected[name]), source, group=self._control)

        self.together("a gathering of parameters", exchange)
        return collected

    def spread(self, tensors: Mapping[str, Tensor], owner: Callable[[str], int]) -> dict[str, Tensor]:
        """On every process all owners' tensors; those of other processes as copies on the host."""
        spread = dict(tensors)

        def exchange() -> None:
            for name, tensor in tensors.items():
                if tensor.numel() == 0:
                    continue
                mine = owner(name) == self.rank
                copy = tensor.detach().cpu().contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
                dist.broadcast(as_bytes(copy), owner(name), group=self._control)
                if not mine:
                    spread[name] = copy

        self.together("a spreading of parameters", exchange)
        return spread

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective on the host; while it waits, look whether another process has failed.

        It runs in a thread, because a collective of gloo can neither be polled nor given up.
        """
        if self.world_size == 1:
            return
        done, errors = threading.Event(), []

        def work() -> None:
            try:
                with torch.no_grad():
                    collective()
            except Exception as error:  # re-raised below, in the thread that asked
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=work, name=f"avgpipe {what}", daemon=True).start()
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not done.wait(_POLL_S):
            self.check_peers()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {self.rank} (stages {self.stages}) waited {self.timeout.total_seconds():.0f} s for the "
                    f"other processes in {what}"
                )
        if errors:
            time.sleep(_REPORT_S)
            self.check_peers()
            raise PeerError(f"rank {self.rank} lost another process in {what}: {errors[0]}") from errors[0]

    # -- failure -----------------------------------------------------------------------------------------------------

    def _store(self) -> dist.Store:
        return dist.PrefixStore(f"avgpipe/{self._number}", dist.distributed_c10d._get_default_store())

    def report(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, and give them a moment to read it."""
        if self.world_size == 1 or self._reported or isinstance(error, PeerError):
            return
        self._reported = True
        text = "".join(traceback.format_exception(error)).rstrip()
        with contextlib.suppress(RuntimeError):  # the store is gone if rank 0 is: nobody is left to tell
            store = self._store()
            store.set("failure", f"rank {self.rank} failed: {error}\n\n{text}")
            deadline = time.monotonic() + _ACKNOWLEDGE_S
            while store.add("read", 0) < self.world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)

    def check_peers(self) -> None:
        """Raise PeerError if another process has reported a failure."""
        if self.world_size == 1 or self._reported:
            return
        try:
            store = self._store()
            failed = store.check(["failure"])
            if failed:
                text = store.get("failure").decode()
                store.add("read", 1)
        except RuntimeError as error:
            self._reported = True
            raise PeerError("rank 0 is gone, and with it the store that the processes share") from error
        if failed:
            self._reported = True
            raise PeerError(text)


_TENSOR = "\0tensor"
