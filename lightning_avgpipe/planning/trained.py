"""Trained parameters: which are trained now, and which leading stages and nodes therefore need no gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph


class TrainedParameters:
    """The parameters of a step function that are trained now, and the leading stages that have nothing to train.

    Args:
        graph: call graph of the step.
        cuts: positions of the K-1 cuts.
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
    def frozen_stages(self) -> int:
        """The number of leading stages that have nothing to train now."""
        flags = tuple(parameter.requires_grad for _, parameter in self._parameters)
        if flags != self._flags:
            self._flags, self._stages = flags, num_frozen(self._graph, self._cuts, self.names)
        return self._stages

    @property
    def names(self) -> frozenset[str]:
        """The full names of the parameters that the step uses and that are trained now."""
        return frozenset(name for name, parameter in self._parameters if parameter.requires_grad)


def num_frozen(graph: CallGraph, cuts: Sequence[int], trained: Collection[str]) -> int:
    """Return the number of leading stages after which no value requires a gradient.

    Args:
        graph: call graph of the step.
        cuts: K-1 positions.
        trained: full names of the parameters that are trained now, which may differ from those that were trained when
            the step was captured.
    """
    asking = requiring_gradient(graph, frozenset(trained))
    return max((k for k, cut in enumerate(cuts, 1) if asking.isdisjoint(graph.live(cut))), default=0)


def backward_ends(graph: CallGraph) -> int:
    """Return the node at which the backward ends: no value from before it required a gradient in the capture."""
    asking = requiring_gradient(graph, graph.trained)
    return max((p for p in range(len(graph.nodes)) if asking.isdisjoint(graph.live(p))), default=0)


def requiring_gradient(graph: CallGraph, trained: frozenset[str]) -> set[int]:
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
            # A value that required a gradient without a known reason always does. A value that required none despite
            # its reasons requires none for a subset of these reasons.
            asks = (bool(now) or not then) if asked else not now <= then
            if asks or (now and value in written):
                found.add(value)
    return found
