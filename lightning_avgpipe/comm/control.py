"""The control channel: items that rank 0 sends to the other processes during training, and reports that it receives.

::

    group 0    rank 0   -- items -->     rank 1
                 |      <-- reports --
               relay
                 v
    group 1    rank 2   -- items -->     rank 3
                        <-- reports --

A sender does not wait for a receiver. External requests (such as a signal to stop) travel with the items, so that all
processes learn of them at the same point of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_avgpipe.comm.channel import Inbox, Outbox
from lightning_avgpipe.comm.message import pack, unpack
from lightning_avgpipe.comm.topology import Route
from lightning_avgpipe.comm.transport import Transport
from lightning_avgpipe.comm.waits import Waits

T = TypeVar("T")
U = TypeVar("U")


class ControlChannel:
    """One process's end of the control channel, without channels to other processes until it is opened.

    Args:
        rank: rank of this process in its group.
        waits: waits for rank 0; their watch knows of failures, and of external requests to this process.
    """

    def __init__(self, rank: int, waits: Waits) -> None:
        self._rank, self._waits, self._num_groups = rank, waits, 1
        self._source: Inbox | None = None  # from rank 0 of the group; None on rank 0
        self._out: Sequence[Outbox] = ()  # to the others
        self._reports_out: Outbox | None = None  # to rank 0 of the group; None on rank 0
        self._reports: dict[int, Inbox] = {}  # from the others, by rank
        self._relay_source: Inbox | None = None  # from rank 0 of all processes, to that of each other group
        self._relay_out: Sequence[Outbox] = ()
        self._listeners: list[Callable[[str], None]] = []
        self._agreed: frozenset[str] = frozenset()
        self._expects = False  # a receive is posted

    def open(self, transport: Transport, layout: Sequence[Sequence[int]], group: int) -> None:
        """Open the channels of this process.

        Args:
            transport: transport whose routes are connected.
            layout: ranks of each group among all processes.
            group: number of the group of this process.
        """
        inbox, outbox, (first, *others) = transport.inbox, transport.outbox, layout[group]
        self._num_groups = len(layout)
        if self._rank:
            me = layout[group][self._rank]
            self._source, self._reports_out = inbox(Route("news", first, me)), outbox(Route("reports", me, first))
            return
        self._out = [outbox(Route("news", first, rank)) for rank in others]
        self._reports = {peer: inbox(Route("reports", rank, first)) for peer, rank in enumerate(others, 1)}
        if group:
            self._relay_source = inbox(Route("relay", 0, first))
        else:
            self._relay_out = [outbox(Route("relay", 0, leader)) for leader, *_ in layout[1:]]

    def expect(self) -> None:
        """Post the receive of the next item in advance.

        Otherwise the sender would have to wait for the announcement of the receive, which queues behind other traffic
        on the link.
        """
        if self._source is not None and not self._expects:
            self._source.expect(1)
            self._expects = True

    def has_news(self) -> bool:
        """Return whether rank 0's next item has arrived, and :meth:`expect` it; on rank 0 it is always True."""
        self.expect()
        return self._source is None or self._source.ready()

    def broadcast(self, item: T | None = None, requests: frozenset[str] | None = None) -> T:
        """Send an item from rank 0 to all processes of its group, and return this item on all of them.

        Args:
            item: any tree of tensors and picklable leaves; ignored on other ranks.
            requests: requests that go with the item; None: those that :meth:`requests` returns.
        """
        self._waits.watch.check()
        if self._source is not None:
            self.expect()
            item, requests = self.receive(self._source, "waits for rank 0's news")
            self._expects = False
        else:
            requests = self.requests() if requests is None else requests
            _send((item, requests), self._out)
        self.agree(requests)
        return item  # type: ignore[return-value]

    def relay(self, common: T | None, own: U | None = None) -> tuple[T, U]:
        """Send ``common`` from rank 0 of all processes to everyone, and ``own`` from rank 0 of each group to its group.

        Every process calls it.

        Args:
            common: any tree of tensors and picklable leaves; ignored except on rank 0 of all processes.
            own: any tree of tensors and picklable leaves; ignored except on rank 0 of each group.
        """
        if self._num_groups == 1 or self._source is not None:
            return self.broadcast((common, own))  # type: ignore[return-value]
        self._waits.watch.check()
        if self._relay_source is None:
            requests = self._waits.watch.requests
            _send((common, requests), self._relay_out)
        else:
            self._relay_source.expect(1)
            common, requests = self.receive(self._relay_source, "waits for rank 0's news")
        return self.broadcast((common, own), requests)  # type: ignore[return-value]

    def report(self, item: T) -> list[tuple[int, T]]:
        """Send an item to rank 0 without waiting. Every process calls it equally often.

        Args:
            item: any tree of tensors and picklable leaves.

        Returns:
            On rank 0, pairs of a rank and an item: its own and those that have arrived since the last call, in order
            for each rank. An empty list on other ranks.
        """
        if self._reports_out is not None:
            self._reports_out.put(pack(item))
            return []
        arrived = [(self._rank, item)]
        for peer, inbox in self._reports.items():
            inbox.expect(1)
            while inbox.ready():
                arrived.append((peer, unpack(inbox.get())))
        return arrived

    def requests(self) -> frozenset[str]:
        """Return the requests that go with the next message.

        With several groups these are the agreed ones only, because all groups must learn of a request at the same
        point.
        """
        return self._waits.watch.requests if self._num_groups == 1 else self._agreed

    def agree(self, requests: frozenset[str]) -> None:
        """Note requests as agreed on, and call the listeners with each new one.

        All processes receive requests with the same message, so they act on a request at the same point of the program.
        """
        for request in sorted(requests - self._agreed):
            for listener in self._listeners:
                listener(request)
        self._agreed |= requests

    def when_agreed(self, listener: Callable[[str], None]) -> None:
        """Add a listener, which is called with each request at the same point of the program on each process."""
        self._listeners.append(listener)

    def agreed(self, request: str) -> bool:
        """Return whether the processes have agreed on a request."""
        return request in self._agreed

    def receive(self, inbox: Inbox, doing: str) -> Any:
        """Wait for the next item of a channel, and return it."""
        self._waits.until(inbox.ready, doing)
        return unpack(inbox.get())


def _send(item: Any, outboxes: Sequence[Outbox]) -> None:
    if outboxes:
        message = pack(item)
        for outbox in outboxes:
            outbox.put(message)
