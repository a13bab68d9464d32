"""Define costs: the time of each node of a call graph, and the time that a byte takes between two stages.

Here costs are estimated from counted operations. ``measure`` measures them, and ``cost_cache`` keeps them in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_avgpipe.capture.graph import CallGraph, Value
from lightning_avgpipe.capture.wire_format import FORMATS, Format, Wire, mildest_hidden_format

OPERATIONS_PER_BYTE = 20.0  # assumed cost of a link where nothing is measured


@dataclass(frozen=True)
class Link:
    """A connection from one stage to the next, in one direction. By default it is free, as inside a process.

    Attributes:
        per_byte: seconds (or counted operations, as for the nodes' costs) per byte, 1 / bandwidth.
        latency: additional seconds per message.
    """

    per_byte: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Costs of nodes and links, for one micro-batch.

    Attributes:
        forward: cost of each node's forward, shape ``(len(graph.nodes),)``; seconds if ``measured``, else counted
            operations.
        backward: cost of each node's backward, in the same unit.
        stash_bytes: bytes that each node keeps from its forward to its backward: tensors that its operations save, and
            those of its outputs that any node saves. Parameters and the batch do not count. They are taken from the
            captured run, even if times are measured.
        links: one link for each pair of neighbouring stages, or one for all; empty: links are free.
        measured: whether the costs are seconds that were measured on this machine.
        kept: number of leading nodes that are not executed because their outputs are cached; their forwards cost
            nothing.
        wire: format in which values travel between processes; None: uncompressed.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stash_bytes: tuple[int, ...]
    links: tuple[Link, ...] = ()
    measured: bool = False
    kept: int = 0
    wire: Wire = None

    @classmethod
    def from_flops(cls, graph: CallGraph) -> Costs:
        """Estimate costs from counted operations: a backward costs two forwards, a byte on a link 20 operations."""
        forward = tuple(node.flops for node in graph.nodes)
        backward = tuple(2.0 * flops for flops in forward)
        return cls(forward, backward, stash_bytes(graph), (Link(OPERATIONS_PER_BYTE),))

    @cached_property
    def node(self) -> tuple[float, ...]:
        """The forward plus backward cost of each node."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    def link(self, hop: int) -> Link:
        """Return the link from stage ``hop`` to the next."""
        if not self.links:
            return Link()
        return self.links[hop] if len(self.links) > 1 else self.links[0]

    @property
    def planning_format(self) -> Format | None:
        """The format that is assumed when cuts are chosen: for ``"auto"`` the smallest one, if costs are measured."""
        return (FORMATS[-1] if self.measured else None) if self.wire == "auto" else self.wire

    def chosen(self, hop: int, values: Sequence[Value], slowest: float) -> Format | None:
        """Return the format in which values travel on a hop.

        Args:
            hop: number of the stage before it.
            values: values that cross it.
            slowest: time of a forward and a backward of the slowest stage.
        """
        per_byte = self.link(hop).per_byte
        if self.measured and not per_byte:  # within a process
            return None
        if self.wire != "auto":
            return self.wire
        return mildest_hidden_format(values, per_byte, slowest) if self.measured else None


def stash_bytes(graph: CallGraph) -> tuple[int, ...]:
    """Return the bytes that each node keeps for backwards, see :attr:`Costs.stash_bytes`."""
    values = value_bytes(graph, (value.index for value in graph.values if value.is_saved))
    return tuple(node.saved_bytes + nbytes for node, nbytes in zip(graph.nodes, values, strict=True))


def value_bytes(graph: CallGraph, kept: Iterable[int]) -> tuple[int, ...]:
    """Return the bytes of the kept values per node; a storage counts once, for the first node with a value in it."""
    storages = {graph.values[v].storage for v in kept}
    first: dict[int, tuple[int, int]] = {}
    for value in graph.values:
        if value.storage in storages:
            born = graph.born[value.index]
            node, nbytes = first.get(value.storage, (born, 0))
            first[value.storage] = (min(node, born), max(nbytes, value.nbytes))
    totals = [0] * len(graph.nodes)
    for node, nbytes in first.values():
        if node < len(totals):
            totals[node] += nbytes
    return tuple(totals)
