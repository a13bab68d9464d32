"""A loaded step: all that one process needs to run its stages of a step function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.engine.attributes import OwnAttributes
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.engine.keeping import Keeping, Samples
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.schedule import Schedule
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

    def read_elsewhere(self) -> list[tuple[str, str]]:
        """Path of a module and name of the attributes that the step reads on other processes than the last."""
        return [key for key, position in self.graph.reads if self.cuts and position <= self.cuts[-1]]

    def known(self, samples: Samples, schedule: Schedule) -> frozenset[int]:
        """The micro-batches of an iteration for which outputs of frozen layers are kept. Every process calls it.

        Args:
            samples: data and number of samples, by micro-batch.
            schedule: of the iteration.
        """
        if self.keeping is None:
            return frozenset()
        # something may have been frozen or unfrozen since the plan was made
        holds = self.freezing.trained <= self.graph.trained
        return self.keeping.known(samples, schedule, holds)

    def share_kept(self) -> None:
        """After an iteration replicas tell each other what they keep now. Every process calls it."""
        if self.keeping is not None:
            self.keeping.share()
