"""Put into the module, while one stage works, the weights that it uses and its own values of attributes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor, nn

from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.engine.attributes import OwnAttributes
from lightning_avgpipe.planning.program import StageProgram


class Weights(Protocol):
    """The weights that the actions of stages use, as far as they are not the module's own."""

    @property
    def constant(self) -> bool:
        """Whether the weights do not change within an iteration."""

    def placed(self, stage: int) -> AbstractContextManager[dict[int, str]]:
        """Put the weights of a stage's action into the module within the context; it gives ``id -> name`` of those."""


class VersionedWeights(Weights, Protocol):
    """Several versions of the weights of a step function, for actions of batches between which nothing drains."""

    def divide(self, names: Mapping[int, Sequence[str]], here: Collection[int]) -> None:
        """Set which parameters the stages use, by their full names, and which stages this process hosts."""


class OwnModule:
    """The module as one stage sees it.

    Args:
        program: program of the stage.
        module: the whole module; parameters of other stages may be absent.
        weights: weights that the stage's actions use.
        of_units: attribute values of the units of its pipeline.
        shown: whether code outside of stages, such as hooks, sees this stage's values of attributes.

    Attributes:
        program: as given.
        module: as given.
        attributes: values of attributes of this stage.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        weights: Weights,
        of_units: OwnAttributes | None,
        shown: bool,
    ) -> None:
        self.program = program
        self.module = module
        self._weights = weights
        self._of_units = of_units or OwnAttributes(module, (), True)
        self.attributes = OwnAttributes(module, (*program.graph.attributes, *program.holders), shown)
        self._passing = [variable(module, *key) for key in program.graph.passing if not program.is_last]

    @contextmanager
    def placed(self) -> Iterator[dict[int, str]]:
        """Put the stage's weights and attributes into the module in this context; yield ``id -> name`` of copies."""
        with self._weights.placed(self.program.stage) as copies, self._of_units.placed(), self.attributes.placed():
            before = [(passing, passing.state()) for passing in self._passing]
            try:
                yield copies
            finally:  # a stage that leaves the step early does not come to the line that sets them back
                for passing, state in before:
                    passing.put(state)

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the stage's forwards change, by name."""
        names = dict.fromkeys(name for node in self.program.nodes for name in node.states)
        return {name: self.module.get_buffer(name) for name in names}

    def end(self) -> None:
        """End an iteration."""
        self.attributes.end()
