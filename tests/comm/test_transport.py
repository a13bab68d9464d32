"""The transport opens and closes channels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

from lightning_avgpipe.comm.topology import Edge, Route, StageMap
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.comm.transport import Transport


@dataclass
class Noting:
    """Makes channels that note when they are closed, and how long they would wait."""

    closed: list[tuple[str, bool]] = field(default_factory=list)

    def connect(self, route: Route) -> None:
        """All are."""

    def inbox(self, route: Route, arrivals: Arrivals) -> Any:
        return Noted(f"receives {route}", self.closed)

    def outbox(self, route: Route, arrivals: Arrivals) -> Any:
        return Noted(f"sends {route}", self.closed)


@dataclass
class Noted:
    name: str
    closed: list[tuple[str, bool]]

    def close(self, join_s: float) -> None:
        self.closed.append((self.name, join_s > 0))


def test_all_channels_are_told_to_close_before_any_is_waited_for() -> None:
    network = Noting()
    transport = Transport(StageMap(3, ((2, 1, 0),)), 1, network, Mock(arrivals=Arrivals()))  # type: ignore[arg-type]
    for stage in (0, 1):
        transport.inbox(Edge(0, stage, "forward" if stage == 0 else "backward"))
        transport.outbox(Edge(0, stage, "forward" if stage == 1 else "backward"))
    transport.close(5.0)
    names = [name for name, _ in network.closed]
    assert len(set(names)) == 4 and names == names[:4] * 2
    assert [waits for _, waits in network.closed] == [False] * 4 + [True] * 4
