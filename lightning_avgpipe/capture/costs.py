"""Costs: what each node of a call graph takes, and what a byte takes on the way from stage to stage.

Nothing here needs torch: costs are measured elsewhere, counted from the graph, or read from a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lightning_avgpipe.capture.graph import CallGraph


@dataclass(frozen=True)
class Link:
    """One hop, in one direction. The default is a hop inside a process: free.

    Attributes:
        per_byte: seconds for which a byte occupies it (or the unit of the costs of the nodes): 1 / bandwidth.
        latency: seconds that a message takes beyond that.
    """

    per_byte: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What nodes and hops cost, for one micro-batch.

    Attributes:
        forward: of each node, shape ``(len(graph.nodes),)``; seconds if ``measured``, else counted operations.
        backward: of each node, in the same unit.
        stash_bytes: what each node leaves in memory from its forward to its backward: what its operations save for
            themselves, and those of its outputs that any node saves. Parameters and the batch do not count.
        links: one for each hop, or one for all; none: hops are free.
        measured: whether the costs are seconds of this machine.
        kept: how many nodes, from the first, are not executed: what they gave is kept, and their forwards take no time.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stash_bytes: tuple[int, ...]
    links: tuple[Link, ...] = ()
    measured: bool = False
    kept: int = 0

    @classmethod
    def from_flops(cls, graph: CallGraph) -> Costs:
        """Counted operations (a backward costs two forwards); a byte on a link costs as much as 20 of them.

        The stash is that of the values between the nodes: what a unit keeps inside is not known.
        """
        forward = tuple(node.flops for node in graph.nodes)
        backward = tuple(2.0 * flops for flops in forward)
        kept = (v.index for v in graph.values if v.requires_grad)
        return cls(forward, backward, value_bytes(graph, kept), (Link(20.0),))

    @cached_property
    def node(self) -> tuple[float, ...]:
        """Forward plus backward of each node."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    def link(self, hop: int) -> Link:
        """The link from stage ``hop`` to the next."""
        if not self.links:
            return Link()
        return self.links[hop] if len(self.links) > 1 else self.links[0]


def value_bytes(graph: CallGraph, kept: Iterable[int]) -> tuple[int, ...]:
    """Bytes of the kept values, counted once per storage at the node that made the first of them."""
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
