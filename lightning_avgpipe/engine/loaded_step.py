"""Define what one process needs to run its stages of a step function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.own_module import OwnAttributes
from lightning_avgpipe.engine.prefix import Shortcut
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.planning.trained import Freezing
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.weights.tied import TiedParameters

if TYPE_CHECKING:
    from lightning_avgpipe.engine.executor import Lane


class StepPart:
    """A part that a system adds to a step function which a pipeline has loaded; this one does nothing.

    Attributes:
        leaves: rank -> names of the tensors of a batch that the process needs in addition.
        own: own attributes of further stages that run here.
    """

    leaves: Mapping[int, frozenset[str]] = {}
    own: Sequence[OwnAttributes] = ()

    def begin(self, lane: Lane, schedule: Schedule) -> None:
        """Begin an iteration on a lane, before it expects messages."""


# Make the parts of each step, given the step, the whole module and the cluster; registered by packages in ``systems``.
# Each may raise a ConfigurationError.
PARTS: list[Callable[[LoadedStep, nn.Module, Cluster], StepPart]] = []


@dataclass(frozen=True)
class LoadedStep:
    """A step function that can be run by this process.

    Attributes:
        graph: call graph of the step.
        cuts: positions of the K-1 cuts.
        programs: parts of the step function of all stages.
        stages: stages of this process.
        copies: parameters that several stages use.
        leaves: rank -> names of the tensors of a batch that the process needs; empty if unknown.
        freezing: record of the stages that have nothing to train.
        shortcut: kept outputs of the first nodes; None: none are kept.
        of_units: attributes that units of all stages change.
        relays: stages whose input may be relayed, so that their forwards run on the next stage as well.
        wires: formats in which values and gradients travel on each hop, shape ``(K-1,)``; empty: as they are.
        parts: what systems add to the step.
    """

    graph: CallGraph
    cuts: Sequence[int]
    programs: Sequence[StageProgram]
    stages: Sequence[Stage]
    copies: TiedParameters
    leaves: Mapping[int, frozenset[str]]
    freezing: Freezing
    shortcut: Shortcut | None
    of_units: OwnAttributes
    relays: frozenset[int]
    wires: Sequence[Format | None] = ()
    parts: Sequence[StepPart] = ()

    @property
    def own(self) -> list[OwnAttributes]:
        """The own attributes of each stage: of further stages first, then of the stages here, last of all units."""
        further = (own for part in self.parts for own in part.own)
        return [*further, *(stage.module.attributes for stage in self.stages), self.of_units]
