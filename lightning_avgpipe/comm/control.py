"""The control channel: what rank 0 tells the other processes while training runs, and what they report to it.

::

    group 0    rank 0   -- items -->     rank 1
                 |      <-- reports --
               relay
                 v
    group 1    rank 2   -- items -->     rank 3
                        <-- reports --

Nobody waits for those who listen. Requests from outside (such as a signal to stop) go with the news, so that all
processes learn of them at the same point of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_avgpipe.comm.channel import Inbox, Outbox
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import pack, unpack
from lightning_avgpipe.comm.waits import Waits

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class ControlChannels:
    """This process's ends of all channels that carry news.

    Attributes:
        out: on rank 0 to each other rank of the group.
        source: on other ranks from rank 0.
        relay_out: on rank 0 of all processes to rank 0 of each other group.
        relay_source: on these from rank 0 of all processes.
        reports_out: on other ranks to rank 0.
        reports: on rank 0 from each other rank.
    """

    out: Sequence[Outbox] = ()
    source: Inbox | None = None
    relay_out: Sequence[Outbox] = ()
    relay_source: Inbox | None = None
    reports_out: Outbox | None = None
    reports: Mapping[int, Inbox] = field(default_factory=dict)


class ControlChannel:
    """One process's part in the news.

    Args:
        rank: of this process in its group.
        num_groups: of processes.
        channels: to and from the others.
        waits: for rank 0; their monitor knows of failures, and of what this process has been asked for from outside.
        leaders: the processes with rank 0 in each group, if some of these may leave: then news come from the first of
            those that are left, and all of them take part.
    """

    def __init__(
        self,
        rank: int,
        num_groups: int,
        channels: ControlChannels,
        waits: Waits,
        leaders: Collectives | None = None,
    ) -> None:
        self._leaders = leaders
        self._rank = rank
        self._num_groups = num_groups
        self._channels = channels
        self._waits = waits
        self._monitor = waits.monitor
        self._listeners: list[Callable[[str], None]] = []
        self._agreed: frozenset[str] = frozenset()
        self._expects = False  # a receive is posted

    def expect(self) -> None:
        """News will come: if they had to wait until they are asked for, they would behind what else is on the links."""
        if self._rank != 0 and not self._expects:
            assert self._channels.source is not None
            self._channels.source.expect(1)
            self._expects = True

    def publish(self, item: T | None = None, requests: frozenset[str] | None = None) -> T:
        """Rank 0 tells all processes of its group: it passes the item; the others get what it passed.

        Args:
            item: any tree of tensors and picklable leaves; ignored on other ranks.
            requests: that go with it; None: what is known.
        """
        self._monitor.check()
        if self._rank == 0:
            requests = self.requests() if requests is None else requests
            message = pack((item, requests)) if self._channels.out else None
            for outbox in self._channels.out:
                assert message is not None
                outbox.put(message)
            self.agree(requests)
            return item  # type: ignore[return-value]
        self.expect()
        news, requests = self._hear(self._channels.source)
        self._expects = False
        self.agree(requests)
        return news  # type: ignore[no-any-return]

    def relay(self, common: T | None, own: U | None = None) -> tuple[T, U]:
        """Rank 0 of all processes tells everybody, and rank 0 of each group its group. Every process calls it.

        Args:
            common: on rank 0 of all processes.
            own: on rank 0 of each group.
        """
        if self._num_groups == 1 or self._rank != 0:
            return self.publish((common, own))  # type: ignore[return-value]
        self._monitor.check()
        if self._leaders is not None:
            common, requests = self._leaders.broadcast((common, self._monitor.requests.known))
            return self.publish((common, own), requests)  # type: ignore[return-value]
        if self._channels.relay_source is None:
            requests = self._monitor.requests.known
            message = pack((common, requests))
            for outbox in self._channels.relay_out:
                outbox.put(message)
        else:
            self._channels.relay_source.expect(1)
            common, requests = self._hear(self._channels.relay_source)
        return self.publish((common, own), requests)  # type: ignore[return-value]

    def report(self, item: T) -> list[tuple[int, T]]:
        """Tell rank 0, and do not wait. Every process calls it equally often.

        Args:
            item: any tree of tensors and picklable leaves.
        Returns:
            On rank 0 what has arrived since the last call, with ranks, and its own item; of each rank in order.
            Elsewhere nothing.
        """
        if self._channels.reports_out is not None:
            self._channels.reports_out.put(pack(item))
            return []
        arrived = [(self._rank, item)]
        for peer, inbox in self._channels.reports.items():
            inbox.expect(1)
            while inbox.ready():
                arrived.append((peer, unpack(inbox.get())))
        return arrived

    def requests(self) -> frozenset[str]:
        """What goes with the next message. With several groups all of them must learn of it at the same point."""
        return self._monitor.requests.known if self._num_groups == 1 else self._agreed

    def agree(self, requests: frozenset[str]) -> None:
        """All processes learn of requests with the same message, so all do what was asked for at the same point."""
        for request in sorted(requests - self._agreed):
            for listener in self._listeners:
                listener(request)
        self._agreed |= requests

    def when_agreed(self, listener: Callable[[str], None]) -> None:
        """From now on tell of each request, at the same point of the program on each process."""
        self._listeners.append(listener)

    def agreed(self, request: str) -> bool:
        """Whether all processes know by now of what one was asked for."""
        return request in self._agreed

    def _hear(self, inbox: Inbox | None) -> Any:
        assert inbox is not None
        self._waits.until(inbox.ready, "waits for rank 0's news")
        return unpack(inbox.get())
