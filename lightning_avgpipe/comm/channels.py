"""The channels: all that goes between a process and others, from one opening of the cluster to the next."""

from __future__ import annotations

import time

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.agreement import Agreement
from lightning_avgpipe.comm.batch_stream import BatchSink, BatchSource, BatchStream
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.control import ControlChannel, ControlChannels
from lightning_avgpipe.comm.links import measure_links
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.returns import Returns
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.comm.transport import Transport
from lightning_avgpipe.comm.waits import Waits

_DISCONNECTED_S = 3.0  # longest time that threads take to end when their connections are closed


class Channels:
    """Those of a process.

    Args:
        stage_map: who hosts what.
        process: this one.
        group: of this process.
        waits: of this process for others.
        agreement: of all processes; None if there is one.

    Attributes:
        waits: as given.
        transport: the channels between stages.
        control: from rank 0 to all, while these are open.
        batches: from the reader to all, while these are open.
        returns: of groups that have left; None if none may leave.
        are_open: whether they are.
    """

    control: ControlChannel
    batches: BatchStream

    def __init__(
        self, stage_map: StageMap, process: Process, group: Collectives, waits: Waits, agreement: Agreement | None
    ) -> None:
        self.waits = waits
        self.transport = Transport(stage_map, process.rank, process.network, waits.arrivals, waits)
        self.returns: Returns | None = None
        self.are_open = False
        self._process = process
        self._group = group
        self._agreement = agreement
        self._links: dict[StageMap, tuple[Link, ...]] = {}

    @property
    def monitor(self) -> Monitor:
        """Of all processes."""
        return self.waits.monitor

    def open(self, stage_map: StageMap, num_groups: int, leaders: Collectives, survives: bool) -> None:
        """Start them. Every process calls it, when they are connected.

        Args:
            stage_map: who hosts what.
            num_groups: of processes, at the start.
            leaders: of the groups.
            survives: whether groups may leave.
        """
        self.transport.widen(1)
        rank, ends = self._group.rank, self._control_ends(() if survives else leaders.ranks)
        self.control = ControlChannel(rank, num_groups, ends, self.waits, leaders if survives else None)
        self.batches = self._open_batches(stage_map.reader)
        self.are_open = True

    def close(self, failed: bool) -> None:
        """Stop them and their threads; after a failure without waiting for peers, and for good."""
        network, timeout_s = self._process.network, self.waits.timeout_s
        if failed:
            # rank 0 holds the store; and connections that break before the reason is known would look like one
            self.monitor.await_readers()
            network.disconnect()
        elif self.are_open:
            self.batches.close()
        begin, limit_s = time.monotonic(), _DISCONNECTED_S if failed else timeout_s
        self.transport.close(limit_s)
        self.waits.close(max(0.0, min(_DISCONNECTED_S, begin + limit_s - time.monotonic())))
        self.monitor.close()
        self.are_open = False
        if failed:
            network.close()

    def confirm(self, asked: str, where: str) -> None:
        """Wait until all ask for the same, if these are open. Arguments and errors as of :meth:`Agreement.confirm`."""
        if self.are_open and (agreement := self._agreement) is not None:
            waits = f"waits for the other processes to ask for {asked} as well"
            self.waits.run(lambda: agreement.confirm(asked, where), waits)

    def links(self, stage_map: StageMap) -> tuple[Link, ...]:
        """The link of each hop, as :func:`measure_links` finds them once. Every process calls it."""
        if stage_map not in self._links:
            found = measure_links(stage_map, self._group, self.transport, self.waits, self._process.device)
            self._links[stage_map] = found
        return self._links[stage_map]

    def _control_ends(self, leaders: tuple[int, ...]) -> ControlChannels:
        """With relays to and from leaders, if there are these."""
        me, ranks = self._process.rank, self._group.ranks
        inbox, outbox = self.transport.inbox, self.transport.outbox
        if me != ranks[0]:
            return ControlChannels(
                source=inbox(Route("news", ranks[0], me)), reports_out=outbox(Route("reports", me, ranks[0]))
            )
        return ControlChannels(
            out=[outbox(Route("news", me, rank)) for rank in ranks[1:]],
            reports={peer: inbox(Route("reports", ranks[peer], me)) for peer in range(1, len(ranks))},
            relay_out=[outbox(Route("relay", me, leader)) for leader in leaders[1:] if me == 0],
            relay_source=inbox(Route("relay", 0, me)) if leaders and me != 0 else None,
        )

    def _open_batches(self, first: int) -> BatchStream:
        control, ranks, rank = self.control, self._group.ranks, self._group.rank
        routes = {peer: Route("batches", ranks[first], to) for peer, to in enumerate(ranks) if peer != first}
        if rank == first:
            outboxes = {peer: self.transport.outbox(route) for peer, route in routes.items()}
            return BatchSource(outboxes, control.agree, control.requests)
        inbox = self.transport.inbox(routes[rank])
        waits = f"waits for a batch from {self.monitor.activity.names[ranks[first]]}"
        return BatchSink(inbox, control.agree, self._process.device, lambda ready: self.waits.until(ready, waits))
