"""Idle generators: of random numbers, the model's own, from which nothing was drawn when the step was captured."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from torch import nn

from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.objects import Objects, Variable
from lightning_avgpipe.utils.opaque import is_generator


class IdleGenerators:
    """Notices when code between units begins to draw: every stage runs it up to its own end, and would draw for itself.

    What was drawn from when the step was captured is known: no cut lies before the last draw. A unit may begin to draw,
    as it runs on one stage. The last stage runs all of the code; what only that comes to is right.

    Args:
        program: of the stage.
        module: the whole module.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._program = program
        self._held: dict[str, Variable] = {}
        self._idle: dict[str, set[int]] = defaultdict(set)
        for path, name, number in () if program.is_last else program.graph.idle_generators:
            with contextlib.suppress(KeyError):  # what only rank 0 has leads to it, and draws nowhere else
                full = f"{path}.{name}" if path else name
                self._held[full] = variable(module, path, name)
                self._idle[full].add(number)
        self._before = Objects(())

    def begin(self) -> None:
        """A forward begins."""
        if self._held:
            self._before = Objects(self._held.values(), opaque="generators")

    def pass_over(self) -> None:
        """A unit has run."""
        if self._held:
            self._before.follow(self._before.changed())

    def check(self) -> None:
        """A forward has ended.

        Raises:
            StepChangedError: code between units has drawn.
        """
        changed = set(map(id, self._before.changed())) if self._held else set()
        for name, held in self._held.items() if changed else ():
            found = Objects([held], opaque="generators").generators
            if changed.intersection(id(one) for n, one in enumerate(found) if n in self._idle[name]):
                what = f"'{name}'" if is_generator(held.state().get("value")) else f"a generator in '{name}'"
                raise StepChangedError(
                    f"{self._program.graph.step} draws random numbers from {what} between submodules, and did not "
                    f"when it was followed to be divided, so each stage would draw its own (stage "
                    f"{self._program.stage}); draw from it in the first step too, so that no cut lies before the last "
                    "draw, or draw from torch's, Python's or NumPy's common generator, which gives all stages the same"
                )
