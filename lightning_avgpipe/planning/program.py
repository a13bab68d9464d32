"""What one stage has to do of a step function: a slice of its call graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.utils.placeholder import Description


@dataclass(frozen=True)
class StageProgram:
    """The nodes ``start .. end-1`` of a call graph.

    Attributes:
        stage: k, 0-based.
        num_stages: K.
        receives: values that cross the cut before this stage.
        sends: values that cross the cut after it; none for the last stage.
    """

    graph: CallGraph
    stage: int
    num_stages: int
    start: int
    end: int
    receives: tuple[int, ...]
    sends: tuple[int, ...]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What the stage executes."""
        return self.graph.executed(self.start, self.end)

    @cached_property
    def upkeep(self) -> frozenset[int]:
        """What of it may stand anywhere."""
        return frozenset(node.index for node in self.nodes if node.index in self.graph.upkeep)

    @cached_property
    def elsewhere(self) -> dict[int, Description]:
        """What other stages execute although it may stand here, and what it looks like."""
        nodes = (self.graph.nodes[index] for index in self.graph.upkeep if index not in self.upkeep)
        return {node.index: node.entry for node in nodes if node.entry is not None}

    @cached_property
    def holders(self) -> tuple[tuple[str, str], ...]:
        """Path of a module and name of attributes that lead to objects which the step changes where it comes to."""
        return tuple(key for key, position in self.graph.holders if position <= self.end or self.is_last)

    @cached_property
    def own(self) -> frozenset[str]:
        """Names of the units and parameters that the stage uses, or may with another batch."""
        return _names(self.nodes) | self._beside(self.start, self.end)

    @cached_property
    def later(self) -> frozenset[str]:
        """Names of the units and parameters that only later stages use, or may."""
        return self._after - self.own

    @cached_property
    def earlier(self) -> frozenset[str]:
        """Names of the units and parameters that only earlier stages use, or may."""
        return (_names(self.graph.nodes[: self.start]) | self._beside(0, self.start)) - self.own - self._after

    @cached_property
    def _after(self) -> frozenset[str]:
        return _names(self.graph.nodes[self.end :]) | self._beside(self.end, len(self.graph.nodes))

    def _beside(self, start: int, end: int) -> frozenset[str]:
        return frozenset(name for name, place in self.graph.places.items() if start <= place < end)

    @cached_property
    def alike(self) -> dict[tuple[str, str], Node]:
        """Kind and name -> the last node of the stage that has them."""
        return {(node.kind, node.name): node for node in self.nodes}

    @property
    def is_last(self) -> bool:
        """Whether the result of the step is computed here."""
        return self.stage == self.num_stages - 1

    def behind(self, position: int) -> StageProgram:
        """What is left of it if all before this position is there."""
        return replace(self, start=position, receives=self.graph.live(position))

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the tensors of the batch that are needed here."""
        return frozenset(leaf.name for leaf in self.graph.needed_leaves(self.start, self.end))


def _names(nodes: Sequence[Node]) -> frozenset[str]:
    called = (node.name for node in nodes if node.kind == "call")
    return frozenset((*called, *(name for node in nodes for name in node.parameters)))


def stage_programs(graph: CallGraph, cuts: Sequence[int]) -> tuple[StageProgram, ...]:
    """One program per stage.

    Args:
        graph: of one step function.
        cuts: K-1 positions that do not decrease.
    """
    bounds = [0, *cuts, len(graph.nodes)]
    num_stages = len(cuts) + 1
    crossing = [(), *(graph.live(cut) for cut in cuts), ()]
    return tuple(
        StageProgram(graph, k, num_stages, bounds[k], bounds[k + 1], crossing[k], crossing[k + 1])
        for k in range(num_stages)
    )
