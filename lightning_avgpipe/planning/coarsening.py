"""Closing of units: units that were opened for balance, and that no cut divides, become one unit again.

::

    opened    embed | norm  qkv  out  up  down | norm  qkv  out  up  down | head
    cut                                                  |
    closed    embed | block0                   | norm  qkv  out  up  down | head

A stage then runs a whole block as in plain PyTorch, instead of call by call. Nothing else changes: a module is closed
only where its calls use all of its parameters, no others, change only its own buffers, and observe nothing, and where
its parts have no forward hooks and are not called from elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph, FollowedCall
from lightning_avgpipe.planning.divisible import Divisible


@dataclass(frozen=True)
class Closing:
    """A mapping from a graph with open units to one with coarser units.

    Attributes:
        graph: graph as captured with the open units.
        units: paths of the coarser units.
        names: names of the nodes with the coarser units, in order.
        bounds: the nodes ``bounds[i] .. bounds[i + 1] - 1`` of the graph become node i.
    """

    graph: CallGraph
    units: tuple[str, ...]
    names: tuple[str, ...]
    bounds: tuple[int, ...]

    def cuts(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Return cuts of the graph as positions among the coarser nodes."""
        return tuple(self.bounds.index(cut) for cut in cuts)

    def costs(self, costs: Costs) -> Costs:
        """Return the costs of the coarser nodes: the sums over their parts."""
        ranges = [slice(*pair) for pair in zip(self.bounds, self.bounds[1:], strict=False)]
        return replace(
            costs,
            forward=tuple(sum(costs.forward[r]) for r in ranges),
            backward=tuple(sum(costs.backward[r]) for r in ranges),
            stash_bytes=tuple(sum(costs.stash_bytes[r]) for r in ranges),
        )

    def is_met_by(self, graph: CallGraph, cuts: Sequence[int]) -> bool:
        """Return whether a capture with the coarser units has the expected nodes, and allows the same cuts."""
        fine = self.graph
        if tuple(node.name for node in graph.nodes) != self.names:
            return False
        for node, begin, end in zip(graph.nodes, self.bounds, self.bounds[1:], strict=False):
            parts = fine.nodes[begin:end]
            if set(node.parameters) != {name for part in parts for name in part.parameters}:
                return False
            if set(node.states) != {name for part in parts for name in part.states}:
                return False
        return all(
            graph.obstacles[new] is None and graph.boundary_bytes[new] == fine.boundary_bytes[old]
            for old, new in zip(cuts, self.cuts(cuts), strict=True)
        )


def closing(subject: Divisible, graph: CallGraph, cuts: Sequence[int], keep: Collection[str]) -> Closing | None:
    """Find the units that can be closed; None if there are none.

    Args:
        subject: module whose step was captured.
        graph: graph as captured with the open units.
        cuts: positions that must stay possible cuts.
        keep: paths of modules that stay units, or hold units.
    """
    calls: dict[str, list[FollowedCall]] = {}
    for call in graph.followed_calls:
        calls.setdefault(call.path, []).append(call)
    rules = _Rules(subject, graph, cuts, keep)
    allowed = [path for path, of_module in calls.items() if rules.allow(path, of_module)]
    chosen = [path for path in allowed if not any(path.startswith(f"{other}.") for other in allowed)]
    if not chosen:
        return None
    wholes = {call.begin: call for path in chosen for call in calls[path]}
    names, bounds = [], [0]
    while bounds[-1] < len(graph.nodes):
        whole = wholes.get(bounds[-1])
        names.append(graph.nodes[bounds[-1]].name if whole is None else whole.path)
        bounds.append(bounds[-1] + 1 if whole is None else whole.end)
    outer = (next((path for path in chosen if unit.startswith(f"{path}.")), unit) for unit in graph.units)
    return Closing(graph, tuple(dict.fromkeys(outer)), tuple(names), tuple(bounds))


@dataclass(frozen=True)
class _Rules:
    """The rules for which modules may be closed; the fields are the arguments of :func:`closing`."""

    subject: Divisible
    graph: CallGraph
    cuts: Sequence[int]
    keep: Collection[str]

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.subject.module.named_parameters()}

    def allow(self, path: str, calls: Sequence[FollowedCall]) -> bool:
        """Return whether a module, given all of its calls, may become a unit."""
        module, below = self.subject.module.get_submodule(path), f"{path}."
        if any(name.startswith(below) for name in self.keep):
            return False
        observers = set(map(id, self.subject.observers))
        if any(inner._forward_hooks or id(inner) in observers for inner in module.modules()):
            return False  # hooks are glue, which every stage executes
        if not all(self._is_whole(module, below, call) for call in calls):
            return False
        inside = {i for call in calls for i in range(call.begin, call.end)}
        return all(n.index in inside for n in self.graph.nodes if n.kind == "call" and n.name.startswith(below))

    def _is_whole(self, module: nn.Module, below: str, call: FollowedCall) -> bool:
        nodes = self.graph.nodes[call.begin : call.end]
        if not nodes or call.observes or any(call.begin < cut < call.end for cut in self.cuts):
            return False
        used = {name for node in nodes for name in node.parameters}
        changed = {name for node in nodes for name in node.states}
        own = {self._names[id(p)] for p in module.parameters()}
        return used == own and all(name.startswith(below) for name in changed)
