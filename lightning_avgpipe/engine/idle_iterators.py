"""Check that a step takes no items from iterators from which it took none when it was captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from lightning_avgpipe.capture.iterators import Iterators
from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram


class IdleIterators:
    """The iterators of a module that must not advance, since each process has a copy and would take other items.

    Args:
        program: program of the stage.
        module: the whole module.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._program = program
        self._module = module
        self._leads = program.graph.iterators

    def untouched(self) -> contextlib.AbstractContextManager[None]:
        """Run a forward within this context, and check that no iterator has advanced.

        Raises:
            StepChangedError: one has.
        """
        return self._untouched() if self._leads else contextlib.nullcontext()

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        held = {}
        for path, name in self._leads:
            with contextlib.suppress(KeyError, AttributeError):  # only rank 0 may have what leads there
                held[path, name] = variable(self._module, path, name)
        iterators = Iterators(held)
        yield
        if taken := iterators.advanced():
            raise StepChangedError(
                f"{self._program.graph.step} takes items from the iterator '{taken}', and did not when it was followed "
                f"to be divided; each stage would take others (stage {self._program.stage}). Make it a part of the "
                "batch (CombinedLoader), or count in an attribute"
            )
