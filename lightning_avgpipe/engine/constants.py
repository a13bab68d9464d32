"""Constants: buffers outside of units that a step did not change when it was captured.

Every stage executes the glue that needs nothing but the batch. Where such glue changes a buffer, capture sees it, and
one stage does it. A branch that is taken later (every hundredth batch) would change the buffer once per stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.engine.rewriting import places
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.torch_compat import version_of


@dataclass(frozen=True)
class Constants:
    """The constants of a module, for a stage that is not the last.

    Attributes:
        places: full name -> where it is registered; none on the last stage, which may do what it wants.
        program: of the stage.
    """

    places: dict[str, tuple[dict[str, Any], str]]
    program: StageProgram

    @classmethod
    def of(cls, program: StageProgram, module: nn.Module) -> Constants:
        """Those of a stage."""
        graph, inside = program.graph, tuple(f"{unit}." for unit in program.graph.units)
        buffers = () if program.is_last else (name for name, _ in module.named_buffers())
        names = [name for name in buffers if name not in graph.changed and not name.startswith(inside)]
        return cls(dict(zip(names, places(module, names), strict=True)), program)

    def checked(self) -> AbstractContextManager[None]:
        """Within this context a forward runs.

        Raises:
            StepChangedError: it has changed one. A table that is made anew for another size is none of its results.
        """
        return self._checked() if self.places else nullcontext()

    @contextmanager
    def _checked(self) -> Iterator[None]:
        before = [(name, *self._now(name)) for name in self.places]
        yield
        for name, tensor, version in before:
            now, changes = self._now(name)
            if (now is tensor and changes != version) or (now is not tensor and _is_like(now, tensor)):
                raise StepChangedError(
                    f"{self.program.graph.step} changes the buffer '{name}', which it did not do when it was captured, "
                    f"and each stage would do it (stage {self.program.stage}). Change it in a hook such as "
                    "on_train_batch_end, within a submodule, or with every micro-batch (by nothing, if need be)"
                )

    def _now(self, name: str) -> tuple[Tensor | None, int]:
        register, leaf = self.places[name]
        tensor = register.get(leaf)
        return tensor, version_of(tensor)


def _is_like(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape
