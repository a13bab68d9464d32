"""Freezing: which stages, from the first, have nothing to train, so that no gradient comes back to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_avgpipe.capture.graph import CallGraph

__all__ = ["num_frozen"]


def num_frozen(graph: CallGraph, cuts: Sequence[int], trained: Collection[str]) -> int:
    """How many stages, from the first, send only values that ask for no gradient.

    Args:
        graph: of the step.
        cuts: K-1 positions.
        trained: full names of the parameters that are trained now. What was trained when the step was captured may
            differ.
    """
    asking = _asking(graph, frozenset(trained))
    return max((k for k, cut in enumerate(cuts, 1) if asking.isdisjoint(graph.live(cut))), default=0)


def _asking(graph: CallGraph, trained: frozenset[str]) -> set[int]:
    """The values that require a gradient, or may."""
    found: set[int] = set()
    for node in graph.nodes:
        written = [value for _, value, _ in node.writes]
        read = {*node.inputs, *written}
        # why results of the node ask for a gradient: now, and when it was captured
        now: set[int | str] = {*(read & found), *trained.intersection(node.parameters)}
        then: set[int | str] = {*graph.trained.intersection(node.parameters)}
        then.update(value for value in read if graph.values[value].requires_grad)
        for value in {*node.outputs, *written}:
            if value < 0:
                continue
            asked = graph.values[value].requires_grad
            # what asked without a reason always does; what did not ask, for all its reasons, does not for fewer
            asks = (bool(now) or not then) if asked else not now <= then
            if asks or (now and value in written):
                found.add(value)
    return found
