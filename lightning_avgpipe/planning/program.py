"""The program of a stage: the slice of a step's call graph that the stage runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_avgpipe.capture.graph import CallGraph, Node, units_in
from lightning_avgpipe.utils.names import nearest
from lightning_avgpipe.utils.placeholder import Description


@dataclass(frozen=True)
class StageProgram:
    """The program of one stage: the nodes ``start .. end-1`` of a call graph.

    Attributes:
        graph: call graph of the step function.
        stage: k, number of the stage, 0-based.
        num_stages: K, number of stages.
        start: first node of the stage.
        end: node after the last one of the stage.
        receives: values that cross the cut before this stage.
        sends: values that cross the cut after this stage; none for the last stage.
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
        """The nodes that the stage executes."""
        return self.graph.executed(self.start, self.end)

    @cached_property
    def upkeep(self) -> frozenset[int]:
        """The nodes of the stage that are upkeep, which may run at any place of the step."""
        return frozenset(node.index for node in self.nodes if node.index in self.graph.upkeep)

    @cached_property
    def foreign_upkeep(self) -> dict[int, Description]:
        """The upkeep nodes that only other stages execute, with a description of their results."""
        nodes = (self.graph.nodes[index] for index in self.graph.upkeep if index not in self.upkeep)
        return {node.index: node.entry for node in nodes if node.entry is not None}

    @cached_property
    def holders(self) -> tuple[tuple[str, str], ...]:
        """The attributes (module path, name) with objects that code between units changes before this stage ends."""
        return tuple(
            key for key, position in self.graph.mutated_between.items() if position <= self.end or self.is_last
        )

    @cached_property
    def changed_elsewhere(self) -> tuple[tuple[str, str], ...]:
        """The attributes (module path, name) that only units of other stages change, and that are not sent along."""
        here, exporting = self.own, {node.name for node in self.graph.nodes if node.exports}
        units = {key: nearest(key[0], self.graph.called) for key in self.graph.changed_by_units if key[0]}
        return tuple(key for key, unit in units.items() if unit and unit not in here | exporting)

    @cached_property
    def buffers_elsewhere(self) -> frozenset[str]:
        """The full names of the parameters and buffers that only nodes of other stages change."""
        others = (node for node in self.graph.nodes if not self.start <= node.index < self.end)
        changed = frozenset(name for node in others for name in node.changes)
        return changed.difference(self.graph.glue_states, *(node.states for node in self.nodes))

    @cached_property
    def changed_here(self) -> frozenset[str]:
        """The full names of buffers, and of weights that are not trained, that glue changes on this stage alone."""
        here = {node.index for node in self.nodes}
        changed = frozenset(name for node in self.nodes if node.kind == "glue" for name in node.changes)
        others = (node for node in self.graph.nodes if node.index not in here)
        return changed.difference(self.graph.trained, *(node.states for node in others))

    @cached_property
    def called(self) -> frozenset[str]:
        """The names of the units that the stage calls."""
        return units_in(self.nodes)

    @cached_property
    def called_before(self) -> frozenset[str]:
        """The names of the units that earlier stages call."""
        return units_in(self.graph.nodes[: self.start])

    @cached_property
    def called_elsewhere(self) -> frozenset[str]:
        """The names of the units that other stages call."""
        return self.called_before | units_in(self.graph.nodes[self.end :])

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The names of the parameters and buffers that the stage uses or changes as states."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.states))

    @cached_property
    def own(self) -> frozenset[str]:
        """The names of the units and parameters that the stage uses, or may use with another batch."""
        return _names(self.nodes) | self._neighbours(self.start, self.end)

    @cached_property
    def later(self) -> frozenset[str]:
        """The names of the units and parameters that only later stages use, or may use."""
        return self._after - self.own

    @cached_property
    def earlier(self) -> frozenset[str]:
        """The names of the units and parameters that only earlier stages use, or may use."""
        return (_names(self.graph.nodes[: self.start]) | self._neighbours(0, self.start)) - self.own - self._after

    @cached_property
    def _after(self) -> frozenset[str]:
        return _names(self.graph.nodes[self.end :]) | self._neighbours(self.end, len(self.graph.nodes))

    def _neighbours(self, start: int, end: int) -> frozenset[str]:
        return frozenset(name for name, place in self.graph.position_of_uncalled.items() if start <= place < end)

    @cached_property
    def last_node_of(self) -> dict[tuple[str, str], Node]:
        """The last node of the stage for each kind and name."""
        return {(node.kind, node.name): node for node in self.nodes}

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which computes the result of the step."""
        return self.stage == self.num_stages - 1

    def from_position(self, position: int) -> StageProgram:
        """Return the rest of the program from ``position`` on, which receives the values that cross it."""
        return replace(self, start=position, receives=self.graph.live(position))

    @property
    def leaves(self) -> frozenset[str]:
        """The names of the tensors of the batch that the stage needs."""
        return frozenset(leaf.name for leaf in self.graph.needed_leaves(self.start, self.end))


def _names(nodes: Sequence[Node]) -> frozenset[str]:
    return units_in(nodes).union(*(node.parameters for node in nodes))


def stage_programs(graph: CallGraph, cuts: Sequence[int]) -> tuple[StageProgram, ...]:
    """Return one program per stage.

    Args:
        graph: call graph of one step function.
        cuts: K-1 positions that do not decrease.
    """
    bounds = [0, *cuts, len(graph.nodes)]
    num_stages = len(cuts) + 1
    crossing = [(), *(graph.live(cut) for cut in cuts), ()]
    return tuple(
        StageProgram(graph, k, num_stages, bounds[k], bounds[k + 1], crossing[k], crossing[k + 1])
        for k in range(num_stages)
    )
