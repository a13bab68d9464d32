"""Define what one process needs to run its stages of a step function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.engine.frozen_outputs import Keeping
from lightning_avgpipe.engine.own_module import OwnAttributes
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.weights.double import Double
from lightning_avgpipe.weights.tied import TiedParameters


@dataclass(frozen=True)
class LoadedStep:
    """A step function that can be run by this process.

    Attributes:
        graph: call graph of the step.
        cuts: positions of the K-1 cuts.
        stages: stages of this process.
        copies: parameters that several stages use.
        leaves: rank -> names of the tensors of a batch that the process needs; empty if unknown.
        freezing: record of the stages that have nothing to train.
        keeping: decides which kept outputs of frozen layers are used; None: none are kept.
        doubles: stages whose input values are forwarded to the next stage -> their weights, on both processes.
        of_units: attributes that units of all stages change.
        wires: in which formats values and gradients travel on each hop, shape ``(K-1,)``; none: as they are.
    """

    graph: CallGraph
    cuts: Sequence[int]
    stages: Sequence[Stage]
    copies: TiedParameters
    leaves: Mapping[int, frozenset[str]]
    freezing: Freezing
    keeping: Keeping | None
    doubles: Mapping[int, Double]
    of_units: OwnAttributes
    wires: Sequence[Format | None] = ()

    @property
    def own(self) -> list[OwnAttributes]:
        """The own attributes of each stage: of doubles first, then of the stages here, last of all units."""
        doubles = (stage.double.module.attributes for stage in self.stages if stage.double is not None)
        return [*doubles, *(stage.module.attributes for stage in self.stages), self.of_units]
