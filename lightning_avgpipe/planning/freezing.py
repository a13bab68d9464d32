"""Freezing: which stages, from the first, have nothing to train, so that no gradient comes back to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph

__all__ = ["Freezing", "num_frozen"]


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


class Freezing:
    """Follows which parameters of a step function are trained.

    Args:
        graph: of the step.
        cuts: K-1 positions.
        module: the whole module; parameters of other stages may be without contents.
    """

    def __init__(self, graph: CallGraph, cuts: Sequence[int], module: nn.Module) -> None:
        self._graph = graph
        self._cuts = cuts
        used = {name for node in graph.nodes for name in node.parameters}
        self._parameters = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if n in used]
        self._flags: tuple[bool, ...] | None = None
        self._stages = 0

    @property
    def stages(self) -> int:
        """How many stages, from the first, have nothing to train now."""
        flags = tuple(parameter.requires_grad for _, parameter in self._parameters)
        if flags != self._flags:
            self._flags, self._stages = flags, num_frozen(self._graph, self._cuts, self.trained)
        return self._stages

    @property
    def trained(self) -> frozenset[str]:
        """Full names of the parameters that the step uses and that are trained now."""
        return frozenset(name for name, parameter in self._parameters if parameter.requires_grad)
