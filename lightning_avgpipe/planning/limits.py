"""Limits of balance: parts of a step that cannot be divided, with their shares of the time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph

# Parts with a smaller share of the time are not reported.
_LEAST = 0.05


@dataclass(frozen=True)
class Limit:
    """A part of a step that cannot be divided.

    Attributes:
        share: its share of the time of the whole step, 0..1.
        reason: which part this is, and why it cannot be divided.
    """

    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of the time: {self.reason}"


def limits(
    graph: CallGraph, costs: Costs, whole: Mapping[str, str], start: int = 0, end: int | None = None
) -> list[Limit]:
    """Return the parts between two positions of a graph that cannot be divided, the largest first.

    Args:
        graph: call graph of a step.
        costs: costs of its nodes.
        whole: unit -> why it cannot be opened.
        start: first position.
        end: last position; None: the end of the graph.
    """
    total = sum(costs.node) or 1.0
    nodes = graph.nodes[start:end]
    reasons: dict[str, float] = {}
    for node in nodes:
        if node.kind == "call" and node.name in whole:
            reason = f"unit '{node.name}' {whole[node.name]}"
            reasons[reason] = reasons.get(reason, 0.0) + costs.node[node.index]
        elif node.kind == "region":
            reason = f"{node} is repeated in one piece; checkpoint its parts one by one, or use use_reentrant=False"
            reasons[reason] = reasons.get(reason, 0.0) + costs.node[node.index]
    for obstacle, group in itertools.groupby(nodes[1:], lambda node: graph.obstacles[node.index]):
        if obstacle is not None:
            positions = [node.index for node in group]
            reasons[f"no cut may lie there: {obstacle}"] = sum(costs.node[positions[0] - 1 : positions[-1] + 1])
    found = (Limit(cost / total, reason) for reason, cost in reasons.items())
    return sorted((limit for limit in found if limit.share >= _LEAST), key=lambda limit: -limit.share)
