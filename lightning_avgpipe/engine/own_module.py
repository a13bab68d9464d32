"""The module while one stage works: with the weights that it uses, and its own values of attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_avgpipe.engine.attributes import OwnAttributes
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.weights.double import Double
from lightning_avgpipe.weights.store import WeightStore
from lightning_avgpipe.weights.tied import TiedParameters


class OwnModule:
    """What a stage makes of the module.

    Args:
        program: of the stage.
        module: the whole module; parameters of other stages may be absent.
        weights: parameters that other stages use as well, or several versions of the weights; or those of a stage
            whose forwards run here too.
        of_units: what the units of its pipeline make of attributes.
        shown: whether hooks on this process see what it made of its own.

    Attributes:
        program: as given.
        module: as given.
        attributes: its own.
    """

    def __init__(
        self,
        program: StageProgram,
        module: nn.Module,
        weights: TiedParameters | WeightStore | Double,
        of_units: OwnAttributes | None,
        shown: bool,
    ) -> None:
        self.program = program
        self.module = module
        self._weights = weights
        self._of_units = of_units or OwnAttributes(module, (), True)
        self.attributes = OwnAttributes(module, (*program.graph.attributes, *program.holders), shown)

    @contextmanager
    def placed(self) -> Iterator[dict[int, str]]:
        """Within this context it is as the stage has it; gives ``id -> name`` of what stands for parameters."""
        with self._weights.placed(self.program.stage) as copies, self._of_units.placed(), self.attributes.placed():
            yield copies

    def changed_buffers(self) -> dict[str, Tensor]:
        """Those that the stage's forwards change, by name."""
        names = dict.fromkeys(name for node in self.program.nodes for name in node.states)
        return {name: self.module.get_buffer(name) for name in names}

    def end(self) -> None:
        """An iteration has ended."""
        self.attributes.end()
        if isinstance(self._weights, Double):
            self._weights.clear()
