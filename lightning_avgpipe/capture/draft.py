"""The draft of a call graph: what is known of it while its step runs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.known_tensors import KnownTensors
from lightning_avgpipe.capture.questions import Questions
from lightning_avgpipe.capture.values import Values

ANYWHERE = sys.maxsize  # in the place of the last node of a range
Pin = tuple[int, int, str]  # no cut between these nodes, for this reason


class Draft:
    """Nodes and values so far, and where no cut may lie.

    Attributes:
        nodes: in program order.
        values: that flow between them.
        kept: values that are needed at the end of the step.
        resident: units that are nodes whatever they are given.
        readers: units that find values in objects, and in nothing else.
        pinned: where no cut may lie, as of :attr:`CallGraph.pinned`.
        questions: where the step learns numbers of values.
    """

    def __init__(self, known: KnownTensors, readers: Collection[str]) -> None:
        self.nodes: list[Node] = []
        self.values = Values(known)
        self.kept: set[int] = set()
        self.resident, self.readers = set(readers), set(readers)
        self.pinned: list[Pin] = []
        self.questions = Questions()

    def position(self) -> int:
        """How many nodes there are."""
        return len(self.nodes)

    def pin(self, begin: int, end: int, reason: str) -> None:
        """No cut may lie between these nodes."""
        self.pinned.append((begin, end, reason))

    def add(
        self,
        node: Node,
        given: Sequence[Tensor],
        taken: Sequence[Tensor],
        versions: Sequence[int],
        owned: Container[int],
    ) -> None:
        """Note a node that gave these tensors, and may have written into those that it took, of these versions."""
        writes = self.values.written(taken, versions, owned, node.name)
        self.nodes.append(replace(node, outputs=self.values.given(given, taken, node.name), writes=writes))

    def told(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """The step has read a description of tensors, which may tell numbers of values."""
        if self.questions.told(func, self.values.of(tensors)):
            self.nodes[-1] = replace(self.nodes[-1], asks=True)
