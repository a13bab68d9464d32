"""Follow which stages have nothing to train, so that they run forwards only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.planning.freezing import num_frozen


class Freezing:
    """A record of the parameters of a step function that are trained now.

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
    def stages(self) -> int:
        """The number of stages, from the first, that have nothing to train now."""
        flags = tuple(parameter.requires_grad for _, parameter in self._parameters)
        if flags != self._flags:
            self._flags, self._stages = flags, num_frozen(self._graph, self._cuts, self.trained)
        return self._stages

    @property
    def trained(self) -> frozenset[str]:
        """The full names of the parameters that the step uses and that are trained now."""
        return frozenset(name for name, parameter in self._parameters if parameter.requires_grad)
