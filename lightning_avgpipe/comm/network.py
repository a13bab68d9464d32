"""The network: what connects processes, as the rest of this room sees it; of torch, or within one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channel import Inbox, Outbox
from lightning_avgpipe.comm.routes import Party, Route
from lightning_avgpipe.comm.stores import Stores


class HostGroup(Protocol):
    """What collectives need of a process group of torch; ranks are those within the group.

    Each method begins something and returns what can be waited for, or asked whether it ``is_completed()``. It raises
    RuntimeError when a connection breaks.
    """

    def broadcast(self, tensor: Tensor, root: int) -> Any: ...

    def allreduce(self, tensors: list[Tensor]) -> Any: ...

    def allgather(self, output_tensors: list[Tensor], input_tensor: Tensor) -> Any: ...

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any: ...


class Network(Protocol):
    """Connects this process with others. All processes open it, connect and join in the same order."""

    @property
    def stores(self) -> Stores:
        """Parts of the store that all processes share."""

    @property
    def is_open(self) -> bool:
        """Whether it may connect."""

    def open(self, ranks: Sequence[int] | None = None) -> None:
        """Begin to connect; only these processes, if others are not to be there."""

    def connect(self, route: Route) -> None:
        """Connect the two ends of a route, unless they are. Every process calls it, also one that is no end of it."""

    def join(self, party: Party) -> None:
        """Connect a party, unless it is. Every process calls it, also one that is no member."""

    def meet(self, party: Party, name: str) -> HostGroup:
        """Connect a party on the host, under a name of its own. Only its members call it."""

    def part(self, group: HostGroup) -> None:
        """Close the connections of such a party; what is under way there ends with an error."""

    def outbox(self, route: Route, arrivals: Arrivals) -> Outbox:
        """Open the sending end of a route."""

    def inbox(self, route: Route, arrivals: Arrivals) -> Inbox:
        """Open the receiving end of a route."""

    def group(self, party: Party) -> Any:
        """What connects a party: a :class:`HostGroup`, and more where it is torch's."""

    def disconnect(self) -> None:
        """End the transfers that wait in threads; nothing can be sent any more."""

    def close(self) -> None:
        """Give up all connections, on which nothing is under way. They may be opened again."""
