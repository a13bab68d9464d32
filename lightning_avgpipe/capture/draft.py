"""Collect the nodes and values of a call graph while its step runs."""

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

ANYWHERE = sys.maxsize  # stands for the last node of a range
Pin = tuple[int, int, str]  # first and last position where no cut may lie, and the reason


class Draft:
    """A call graph under construction.

    Attributes:
        nodes: nodes so far, in program order.
        values: values that flow between the nodes.
        kept: values that are needed at the end of the step.
        resident: units that are nodes whatever their arguments are.
        readers: units that find values in objects only, not in their arguments.
        pinned: ranges where no cut may lie, see :attr:`CallGraph.pinned`.
        questions: record of where the step learns numbers of values.
    """

    def __init__(self, known: KnownTensors, readers: Collection[str]) -> None:
        self.nodes: list[Node] = []
        self.values = Values(known)
        self.kept: set[int] = set()
        self.resident, self.readers = set(readers), set(readers)
        self.pinned: list[Pin] = []
        self.questions = Questions()

    def position(self) -> int:
        """Return the number of nodes so far."""
        return len(self.nodes)

    def pin(self, begin: int, end: int, reason: str) -> None:
        """Forbid cuts at the positions ``begin .. end``."""
        self.pinned.append((begin, end, reason))

    def add(
        self,
        node: Node,
        given: Sequence[Tensor],
        taken: Sequence[Tensor],
        versions: Sequence[int],
        owned: Container[int],
    ) -> None:
        """Add a node that returned ``given`` and may have written into the tensors ``taken`` of these ``versions``."""
        writes = self.values.written(taken, versions, owned, node.name)
        self.nodes.append(replace(node, outputs=self.values.given(given, taken, node.name), writes=writes))

    def told(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Note that the step has read a description of tensors, which may depend on numbers of values."""
        if self.questions.told(func, self.values.of(tensors)):
            self.nodes[-1] = replace(self.nodes[-1], asks=True)
