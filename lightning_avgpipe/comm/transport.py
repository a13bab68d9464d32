"""The transport: the channels of a process's stages to those of other processes, and to each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_avgpipe.comm.channel import Inbox, MemoryChannel, Outbox, TurnsInbox, TurnsOutbox
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Edge, Route, StageMap, pairs
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.comm.waits import Waits


@dataclass(frozen=True)
class Ends:
    """One stage's ends of the channels to its two neighbours.

    Attributes:
        values: inbox of values from the previous stage; None for the first stage.
        to_next: outbox of values to the next stage; None for the last stage.
        gradients: inbox of gradients from the next stage; None for the last stage.
        to_previous: outbox of gradients to the previous stage; None for the first stage.
    """

    values: Inbox | None
    to_next: Outbox | None
    gradients: Inbox | None
    to_previous: Outbox | None


class Transport:
    """The open channels of a process.

    Args:
        stage_map: which process hosts which stage.
        rank: rank of this process among all.
        network: network that connects the processes.
        waits: waits for connections; the channels notify their arrivals.
    """

    def __init__(self, stage_map: StageMap, rank: int, network: ProcessGroups, waits: Waits) -> None:
        self._stage_map = stage_map
        self._rank = rank
        self._group, _ = stage_map.position(rank)
        self._network = network
        self._waits = waits
        self._inboxes: dict[Route, Any] = {}
        self._outboxes: dict[Route, Any] = {}
        self._num_pipelines = 0

    def widen(self, num_pipelines: int) -> None:
        """Connect the stages of pipelines up to ``num_pipelines``, and open their channels. Every process calls it.

        Raises:
            PeerError: a process does not connect.
        """
        for pipeline in range(self._num_pipelines, num_pipelines):
            if self._stage_map.world_size > 1:
                waits = f"waits for the other processes to connect pipeline {pipeline}"
                self._waits.run(partial(self._connect, pipeline), waits)
            for route in self._routes(pipeline, self._group):
                if route.source == self._rank:
                    self.outbox(route)
                if route.target == self._rank:
                    self.inbox(route)
            self._num_pipelines += 1

    def rearrange(self, stage_map: StageMap) -> None:
        """Connect the stages of another map of the same processes. Every process calls it; no message may be in flight.

        Channels between the same processes stay open, others between stages are closed.
        """
        self._stage_map = stage_map
        num_pipelines, self._num_pipelines = self._num_pipelines, 0
        stay = {route for pipeline in range(num_pipelines) for route in self._routes(pipeline, self._group)}
        for channels in (self._outboxes, self._inboxes):
            for route in [r for r in channels if isinstance(r.what, Edge) and r not in stay]:
                channels.pop(route).close(self._waits.timeout_s)
        self.widen(num_pipelines)

    def inbox(self, what: Edge | Route) -> Inbox:
        """Return the receiving end of a channel, and open the channel if necessary. Its route must be connected.

        The channel of an edge is the one between the first replicas of its stages.
        """
        return self._end(what, self._inboxes, self._network.inbox)  # type: ignore[no-any-return]

    def outbox(self, what: Edge | Route) -> Outbox:
        """Return the sending end of a channel, as :meth:`inbox` does."""
        return self._end(what, self._outboxes, self._network.outbox)  # type: ignore[no-any-return]

    def _end(self, what: Edge | Route, ends: dict[Route, Any], connected: Callable[[Route, Arrivals], Any]) -> Any:
        if isinstance(what, Edge):
            ranks = self._stage_map.layout[self._group]
            what = Route(what, *(ranks[self._stage_map.owner(stage)] for stage in (what.source, what.target)))
        if what not in ends and what.source == what.target:
            self._inboxes[what] = self._outboxes[what] = MemoryChannel()
        elif what not in ends:
            ends[what] = connected(what, self._waits.arrivals)
        return ends[what]

    def ends(self, pipeline: int, stage: int, trains: bool = True) -> Ends:
        """Return the channels of a stage of this process, in training or in evaluation."""
        first, last = stage == 0, stage == self._stage_map.num_stages - 1
        return Ends(
            values=None if first else self._from(Edge(pipeline, stage - 1, "forward"), trains),
            to_next=None if last else self._to(Edge(pipeline, stage, "forward"), trains),
            gradients=None if last else self._from(Edge(pipeline, stage, "backward"), trains),
            to_previous=None if first else self._to(Edge(pipeline, stage - 1, "backward"), trains),
        )

    def _from(self, edge: Edge, trains: bool) -> Inbox:
        """Return the inbox of an edge's target stage; it receives from the replicas of the source stage in turns."""
        sources, turns = self._turns(edge.target, edge.source, trains)
        inboxes = [self.inbox(Route(edge, sources[turn], self._rank)) for turn in turns]
        return inboxes[0] if len(inboxes) == 1 else TurnsInbox(inboxes)

    def _to(self, edge: Edge, trains: bool) -> Outbox:
        """Return the outbox of an edge's source stage; it sends to the replicas of the target stage in turns."""
        targets, turns = self._turns(edge.source, edge.target, trains)
        outboxes = {turn: self.outbox(Route(edge, self._rank, targets[turn])) for turn in sorted(turns)}
        return outboxes[0] if len(targets) == 1 else TurnsOutbox(outboxes, len(targets))

    def _turns(self, stage: int, other: int, trains: bool) -> tuple[list[int], list[int]]:
        """Return the processes of another stage, and the order (indices) in which this process exchanges with them."""
        ranks = self._stage_map.layout[self._group]
        others = [ranks[rank] for rank in self._stage_map.ranks(other, trains)]
        first, step = self._stage_map.share(stage, ranks.index(self._rank), trains)
        return others, [(first + n * step) % len(others) for n in range(len(others))]

    def close(self, limit_s: float) -> None:
        """Stop the channels and their threads, within ``limit_s`` seconds in total even if peers are gone."""
        deadline = time.monotonic() + limit_s
        channels = [*self._inboxes.values(), *self._outboxes.values()]
        for channel in channels:  # stop all before waiting for any, which might take all of the time
            channel.close(join_s=0.0)
        for channel in channels:
            channel.close(join_s=max(0.0, deadline - time.monotonic()))
        self._inboxes.clear()
        self._outboxes.clear()
        self._num_pipelines = 0

    def _connect(self, pipeline: int) -> None:
        for group in range(self._stage_map.num_groups):
            for route in self._routes(pipeline, group):
                if route.source != route.target:
                    self._network.connect(route)

    def _routes(self, pipeline: int, group: int) -> Iterator[Route]:
        """Yield the routes of all edges of a pipeline; two hops between the same two processes have separate routes."""
        ranks = self._stage_map.layout[group]
        for hop in range(self._stage_map.num_stages - 1):
            for edge in (Edge(pipeline, hop, "forward"), Edge(pipeline, hop, "backward")):
                for source, target in pairs(self._stage_map, edge.source, edge.target):
                    yield Route(edge, ranks[source], ranks[target])
