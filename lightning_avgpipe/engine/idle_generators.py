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
    """Notices when stages begin to draw from a generator each for itself, as each has a copy of it.

    What was drawn from when the step was captured is known: no cut lies before the last draw. Code between units runs
    on every stage up to the stage's own end, so it must not begin to draw; on the last stage it may, which comes to all
    of it. A unit runs on one stage and may, unless units of other stages hold the same generator.

    Args:
        program: of the stage.
        module: the whole module.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._program = program
        self._held: dict[str, Variable] = {}
        self._idle: dict[str, set[int]] = defaultdict(set)
        names: dict[int, list[str]] = defaultdict(list)
        stages: dict[int, set[bool]] = defaultdict(set)
        for path, name, number in program.graph.idle_generators:
            with contextlib.suppress(KeyError, IndexError):  # what only rank 0 has leads to it, and draws nowhere else
                full, held = f"{path}.{name}" if path else name, variable(module, path, name)
                one = Objects([held], opaque="generators").generators[number]
                self._held[full] = held
                self._idle[full].add(number)
                unit = next((unit for unit in program.graph.units if f"{path}.".startswith(f"{unit}.")), None)
                if unit is not None:
                    names[id(one)].append(full)
                    stages[id(one)].add(unit in program.own)
        self._shared = {key: names[key] for key, own in stages.items() if len(own) > 1}
        if program.is_last and not self._shared:
            self._held = {}
        self._before = Objects(())

    def begin(self) -> None:
        """A forward begins."""
        if self._held:
            self._before = Objects(self._held.values(), opaque="generators")

    def pass_over(self) -> None:
        """A unit has run.

        Raises:
            StepChangedError: it has drawn, and units of other stages may.
        """
        if not self._held:
            return
        changed = self._before.changed()
        for one in changed:
            if id(one) in self._shared:
                self._refuse(f"a generator that submodules of several stages hold ({_listed(self._shared[id(one)])})")
        self._before.follow(changed)

    def check(self) -> None:
        """A forward has ended.

        Raises:
            StepChangedError: code between units has drawn.
        """
        changed = set(map(id, self._before.changed())) if self._held and not self._program.is_last else set()
        for name, held in self._held.items() if changed else ():
            found = Objects([held], opaque="generators").generators
            if changed.intersection(id(one) for n, one in enumerate(found) if n in self._idle[name]):
                what = f"'{name}'" if is_generator(held.state().get("value")) else f"a generator in '{name}'"
                self._refuse(f"{what} between submodules")

    def _refuse(self, where: str) -> None:
        raise StepChangedError(
            f"{self._program.graph.step} draws random numbers from {where}, and did not when it was followed to be "
            f"divided, so each stage would draw its own (stage {self._program.stage}); draw from it in the first step "
            "too, so that no cut lies before the last draw, or draw from torch's, Python's or NumPy's common "
            "generator, which gives all stages the same"
        )


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (", ..." if len(names) > most else "")
