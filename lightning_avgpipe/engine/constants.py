"""Check buffers that a step did not change when it was captured.

Every stage executes the glue that needs only the batch. If such glue changes a buffer, capture sees this, and one stage
executes it. But a branch that is taken later (every hundredth batch) would change the buffer once per stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.engine.rewriting import places
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.object_state import ObjectState, Variable, state_of
from lightning_avgpipe.utils.torch_compat import version_of

_WRITES = re.compile(
    r"\w*[a-z0-9]_|__setitem__|data\.__set__|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


@dataclass(frozen=True)
class Constants:
    """The buffers that a stage other than the last must not change.

    Attributes:
        places: full name -> register and name of each such buffer outside of units.
        program: program of the stage.
        module: module that holds the buffers.
        holders: attributes and variables that lead to objects which the step changes.
    """

    places: dict[str, tuple[dict[str, Any], str]]
    program: StageProgram
    module: nn.Module
    holders: tuple[Variable, ...]

    @classmethod
    def of(cls, program: StageProgram, module: nn.Module) -> Constants | None:
        """Return the constants of a stage; None for the last stage, whose changes count."""
        if program.is_last:
            return None
        graph, inside = program.graph, tuple(f"{unit}." for unit in program.graph.units)
        names = [
            name for name, _ in module.named_buffers() if name not in graph.changed and not name.startswith(inside)
        ]
        holders = tuple(variable(module, *key) for key, _ in graph.holders)
        return cls(dict(zip(names, places(module, names), strict=True)), program, module, holders)

    def check_write(self, function: str, tensor: Tensor) -> None:
        """Check that code between units does not write into a buffer by calling this function with this first argument.

        Raises:
            StepChangedError: it does.
        """
        if _WRITES.fullmatch(function) is None:
            return
        for name, buffer in self.module.named_buffers():
            if buffer is tensor:
                raise self._changed(name)

    def held(self) -> list[tuple[Any, ObjectState]]:
        """Return the contents of the objects to which :attr:`holders` lead, without those of objects inside of them.

        When a stage leaves the step, ``finally`` and the like still run and may change these objects again.
        """
        return [(obj, state_of(obj)) for holder in self.holders for obj in holder.state().values()]

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Run a forward within this context, and check that it has changed no constant.

        Raises:
            StepChangedError: it has. A buffer that is replaced by one of another size, such as a larger table, is
                allowed.
        """
        before = [(name, *self._now(name)) for name in self.places]
        yield
        for name, tensor, version in before:
            now, changes = self._now(name)
            if (now is tensor and changes != version) or (now is not tensor and _is_like(now, tensor)):
                raise self._changed(name)

    def _changed(self, name: str) -> StepChangedError:
        return StepChangedError(
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
