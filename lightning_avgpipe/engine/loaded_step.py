"""A loaded step: all that one process needs to run its stages of a step function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.engine.attributes import OwnAttributes
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.engine.keeping import Keeping
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.weights.double import Double
from lightning_avgpipe.weights.tied import TiedParameters


@dataclass(frozen=True)
class LoadedStep:
    """A step function that can be run.

    Attributes:
        graph: of the step.
        cuts: K-1 positions.
        stages: of this process.
        copies: the parameters that several stages use.
        leaves: rank -> names of the tensors of a batch that the process needs; empty if that is not known any more.
        freezing: which stages have nothing to train.
        keeping: of the outputs of frozen layers; None: they are not kept.
        doubles: of stages that values pass, on both ends of what goes on.
        of_units: attributes that units of all stages change.
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

    @property
    def own(self) -> list[OwnAttributes]:
        """What each stage here, after those whose forwards run here as well, and then all units make of attributes."""
        doubles = (stage.double.module.attributes for stage in self.stages if stage.double is not None)
        return [*doubles, *(stage.module.attributes for stage in self.stages), self.of_units]
