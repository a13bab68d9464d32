"""The channels: everything that travels between a process and others while the cluster is open."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.comm.agreement import Agreement
from lightning_avgpipe.comm.batch_stream import BatchSink, BatchSource, BatchStream
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.control import ControlChannel, ControlChannels
from lightning_avgpipe.comm.links import measure_links
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.routes import Route
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.comm.transport import Transport
from lightning_avgpipe.comm.waits import Waits

_DISCONNECTED_S = 3.0  # longest time that threads take to end when their connections are closed


class Channels:
    """All channels of a process, and its waits for other processes.

    Args:
        stage_map: which process hosts which stage.
        process: this process.
        group: group of this process.
        waits: waits of this process for others.
        agreement: agreement of all processes; None if there is one process.

    Attributes:
        waits: as given.
        transport: channels between stages.
        control: control channel from rank 0 to the other ranks; set by :meth:`open`.
        batches: batch stream from the reader to the other ranks; set by :meth:`open`.
        are_open: whether the channels are open.
    """

    control: ControlChannel
    batches: BatchStream

    def __init__(
        self, stage_map: StageMap, process: Process, group: Collectives, waits: Waits, agreement: Agreement | None
    ) -> None:
        self.waits = waits
        self.transport = Transport(stage_map, process.rank, process.network, waits.arrivals, waits)
        self.are_open = False
        self._process = process
        self._group = group
        self._agreement = agreement
        self._links: dict[StageMap, tuple[Link, ...]] = {}

    @property
    def monitor(self) -> Monitor:
        """The monitor of all processes."""
        return self.waits.monitor

    def open(self, stage_map: StageMap) -> None:
        """Start the channels for the stages of the map. Every process calls it, once the processes are connected."""
        self.transport.widen(1)
        ends = self._control_ends([ranks[0] for ranks in stage_map.layout])
        self.control = ControlChannel(self._group.rank, stage_map.num_groups, ends, self.waits)
        self.batches = self._open_batches(stage_map.reader)
        self.are_open = True

    def close(self, failed: bool) -> None:
        """Stop the channels and their threads.

        Args:
            failed: whether the run failed: then peers are not waited for, and the connections are given up.
        """
        network, timeout_s = self._process.network, self.waits.timeout_s
        if failed:
            # Rank 0 holds the store; and a connection that breaks before the others have read the reason would look
            # like the reason.
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
        """Wait until all processes ask for the same operation, if the channels are open.

        Arguments and errors are those of :meth:`Agreement.confirm`.
        """
        if self.are_open and (agreement := self._agreement) is not None:
            waits = f"waits for the other processes to ask for {asked} as well"
            self.waits.run(lambda: agreement.confirm(asked, where), waits)

    def links(self, stage_map: StageMap) -> tuple[Link, ...]:
        """Return the link of each hop, which :func:`measure_links` measures once per map. Every process calls it."""
        if stage_map not in self._links:
            found = measure_links(stage_map, self._group, self.transport, self.waits, self._process.device)
            self._links[stage_map] = found
        return self._links[stage_map]

    def _control_ends(self, leaders: Sequence[int]) -> ControlChannels:
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
            relay_source=inbox(Route("relay", 0, me)) if me != 0 else None,
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
