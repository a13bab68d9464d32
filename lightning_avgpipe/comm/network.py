"""The network: the interface to what connects processes, by torch.distributed or within one process."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.channel import Inbox, Outbox
from lightning_avgpipe.comm.routes import Party, Route


class HostGroup(Protocol):
    """The methods of a process group of torch that collectives use. Ranks are those within the group.

    Each method starts an operation and returns its work, on which one can ``wait()`` or ask ``is_completed()``. If a
    connection breaks, it raises an error for which :func:`is_broken_connection` is true.
    """

    def broadcast(self, tensor: Tensor, root: int) -> Any: ...

    def allreduce(self, tensors: list[Tensor]) -> Any: ...

    def allgather(self, output_tensors: list[Tensor], input_tensor: Tensor) -> Any: ...

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any: ...


class Connector(Protocol):
    """The connections of this process with others. All processes call open, connect and join in the same order."""

    def next_run(self, store: dist.Store | None) -> dist.Store:
        """Return the part of a store that only the next run uses; None stands for the store of torch.distributed."""

    @property
    def is_open(self) -> bool:
        """Whether connections can be made."""

    def open(self) -> None:
        """Make it possible to connect."""

    def connect(self, route: Route) -> None:
        """Connect the two ends of a route, unless they are connected. Every process calls it, not only the two."""

    def join(self, party: Party) -> None:
        """Connect the members of a party, unless they are connected. Every process calls it, not only the members."""

    def outbox(self, route: Route, arrivals: Arrivals) -> Outbox:
        """Open the sending end of a route."""

    def inbox(self, route: Route, arrivals: Arrivals) -> Inbox:
        """Open the receiving end of a route."""

    def group(self, party: Party) -> Any:
        """Return the process group of a party: at least a :class:`HostGroup`."""

    def disconnect(self) -> None:
        """End the transfers for which threads wait. Nothing can be sent any more."""

    def close(self) -> None:
        """Give up all connections; no message may be in flight. They may be opened again."""
