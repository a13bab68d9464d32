"""Detection of frozen stages and nodes: those, from the first on, that need no gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.utils.names import is_within


def num_frozen(graph: CallGraph, cuts: Sequence[int], trained: Collection[str]) -> int:
    """Return how many stages, from the first, send only values that require no gradient.

    Args:
        graph: call graph of the step.
        cuts: K-1 positions.
        trained: full names of the parameters that are trained now, which may differ from those that were trained when
            the step was captured.
    """
    asking = _asking(graph, frozenset(trained))
    return max((k for k, cut in enumerate(cuts, 1) if asking.isdisjoint(graph.live(cut))), default=0)


def backward_ends(graph: CallGraph) -> int:
    """Return the node at which the backward ends: nothing before it was trained when the step was captured."""
    asking = _asking(graph, graph.trained)
    return max((p for p in range(len(graph.nodes)) if asking.isdisjoint(graph.live(p))), default=0)


def frozen_prefix(graph: CallGraph, trained: Collection[str]) -> tuple[int, str]:
    """Return how many nodes, from the first, compute the same outputs for the same samples while they are frozen.

    Values that cross the cut behind these nodes require no gradient. The nodes neither draw random numbers nor use
    anything that the step changes.

    Args:
        graph: call graph of the step.
        trained: full names of the parameters that are trained now.
    Returns:
        The number of nodes, 0 if there are none; and why there are not more, empty if these are all frozen nodes.
    """
    if graph.batch_writes:
        return 0, f"{graph.step} changes its batch"
    asking, most, why = _asking(graph, frozenset(trained)), len(graph.nodes) - 1, ""
    for path in sorted(graph.drawing | graph.host_drawing):
        if not any(is_within(path, unit) for unit in graph.units):  # code between units
            begins = min((call.begin for call in graph.followed_calls if call.path == path), default=0)
            if begins < most:
                most, why = begins, f"{f'the code of {path!r}' if path else graph.step} draws random numbers"
    assigning = {path for path, _ in graph.of_units}
    for node in graph.nodes:
        found = (
            "draws random numbers" if node.draws or graph.host_drawing.intersection(node.drawn)
            else "uses what the step changes" if node.states or node.index in graph.upkeep
            else "writes into objects" if node.writes_objects
            else "assigns attributes" if node.kind == "call" and any(is_within(p, node.name) for p in assigning)
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


def _asking(graph: CallGraph, trained: frozenset[str]) -> set[int]:
    """Return the values that require a gradient, or may require one."""
    found: set[int] = set()
    for node in graph.nodes:
        written = [value for _, value, _ in node.writes]
        read = {*node.inputs, *written}
        # reasons for which results of the node require a gradient: now, and when the step was captured
        now: set[int | str] = {*(read & found), *trained.intersection(node.parameters)}
        then: set[int | str] = {*graph.trained.intersection(node.parameters)}
        then.update(value for value in read if graph.values[value].requires_grad)
        for value in {*node.outputs, *written}:
            if value < 0:
                continue
            asked = graph.values[value].requires_grad
            # a value that required a gradient without a known reason always does; a value that required none in spite
            # of its reasons requires none for a subset of them
            asks = (bool(now) or not then) if asked else not now <= then
            if asks or (now and value in written):
                found.add(value)
    return found
