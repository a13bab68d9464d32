"""Freezing: which stages, from the first, have nothing to train, so that no gradient comes back to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.utils.names import is_within


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


def backward_ends(graph: CallGraph) -> int:
    """The node at which the backward ends: before it nothing was trained when the step was captured."""
    asking = _asking(graph, graph.trained)
    return max((p for p in range(len(graph.nodes)) if asking.isdisjoint(graph.live(p))), default=0)


def frozen_prefix(graph: CallGraph, trained: Collection[str]) -> tuple[int, str]:
    """How many nodes, from the first, give the same for the same samples as long as they are frozen.

    What crosses the cut behind them asks for no gradient, and neither chance nor what the step changes plays a part.

    Args:
        graph: of the step.
        trained: full names of the parameters that are trained now.
    Returns:
        The number, 0 if there are none; and why there are not more, empty if these are all that are frozen.
    """
    if graph.batch_writes:
        return 0, f"{graph.step} changes its batch"
    asking, most, why = _asking(graph, frozenset(trained)), len(graph.nodes) - 1, ""
    for path in sorted(graph.drawing | graph.host_drawing):
        if not any(is_within(path, unit) for unit in graph.units):  # code between units
            begins = min((call.begin for call in graph.opened if call.path == path), default=0)
            if begins < most:
                most, why = begins, f"{f'the code of {path!r}' if path else graph.step} draws random numbers"
    for node in graph.nodes:
        found = (
            "draws random numbers" if node.draws or graph.host_drawing.intersection(node.drawn)
            else "uses what the step changes" if node.states or node.index in graph.upkeep
            else "writes into objects" if node.opens
            else ""
        )  # fmt: skip
        if found:
            if node.index < most:
                most, why = node.index, f"{node} {found}"
            break
    free = (p for p in range(len(graph.nodes)) if graph.obstacles[p] is None and asking.isdisjoint(graph.live(p)))
    frozen = list(free)
    position = max((p for p in frozen if p <= most), default=0)
    return position, why if position < max(frozen, default=0) else ""


def begins_behind(graph: CallGraph, position: int) -> bool:
    """Whether a step of training may begin at a position with what the nodes before it gave: no gradient goes back."""
    return graph.obstacles[position] is None and _asking(graph, graph.trained).isdisjoint(graph.live(position))


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
