"""Decide which micro-batches of a stage run a flat program, and which are followed.

::

    iteration 1          every micro-batch is followed, and written down: do all do the same?
    2, 3, ...            micro-batch 0 is followed and written down, the others run what was written
    every 64th           as the first

If two micro-batches of one form differ, or a step cannot be written down, each one is followed from then on. With a
static step, which only its author can declare, iterations 2, 3, ... follow nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_avgpipe.engine.flat_program import FlatProgram, description
from lightning_avgpipe.engine.program_writer import ProgramWriter
from lightning_avgpipe.engine.templates import VALUES
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils import tree

_TRUSTED_AFTER = 1  # iterations in which all micro-batches are followed and compared
_AUDITED_EVERY = 64  # iterations
_MOST_FORMS = 8  # of micro-batches that get programs in an iteration

_log = logging.getLogger(__name__)


def why_follow(program: StageProgram) -> str | None:
    """Return a property of a step's graph that rules out flat programs; None: there is none."""
    graph = program.graph
    reasons = {
        "it changes its batch": graph.batch_writes,
        "it changes buffers between units": graph.glue_states or program.upkeep or program.elsewhere,
        "it changes attributes or objects": graph.attributes or graph.passing or graph.holders,
        "it writes into tensors of its own": graph.written or graph.carried,
        "it draws from Python's or NumPy's generators": graph.host_drawing,
        "it has generators of its own": graph.generators,
        "it holds iterators": graph.iterators,
        "it decides by numbers": any(node.asks for node in graph.nodes[: program.end]),
    }
    return next((reason for reason, found in reasons.items() if found), None)


@dataclass(frozen=True)
class Form:
    """The properties that micro-batches must share to run one program.

    Attributes:
        tensors: tensors of the batch, then the received ones.
        described: description of the tensors, and all other arguments of the step.
        told: descriptions from earlier stages.
    """

    tensors: tuple[Tensor, ...]
    described: tuple[Any, ...]
    told: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], received: Sequence[Tensor], told: tuple[Any, ...], static: bool) -> Form:
        """Return the form of a micro-batch.

        Args:
            static: whether arguments other than the micro-batch, such as the index of the batch, are ignored.
        """
        found: list[Tensor] = []
        structure = _structure(tuple(args[:1] if static else args), found)
        tensors = (*found, *received)
        return cls(tensors, (description(tensors), structure), told)

    def is_like(self, other: Form) -> bool:
        """Return whether a program that was written for the other form may run with this one."""
        return bool(self.described == other.described and self.told == other.told)


def _structure(item: Any, tensors: list[Tensor]) -> Any:
    """Return a tree without its tensors, which are appended to ``tensors``."""
    kind = type(item)
    if isinstance(item, Tensor):
        tensors.append(item)
        return None
    if kind is tuple or kind is list:
        return kind, [_structure(part, tensors) for part in item]
    if kind is dict:
        return kind, {name: _structure(part, tensors) for name, part in item.items()}
    if kind in VALUES:
        return kind, item
    leaves, spec = tree.flatten(item)
    if len(leaves) == 1 and leaves[0] is item:
        return kind, id(item)  # an object: its == need not return a bool
    return spec, [_structure(leaf, tensors) for leaf in leaves]


class Programs:
    """The flat programs of one stage.

    Args:
        program: program of the stage.
        module: the whole module.
        device: device of the stage.
        static: ``"auto"``: the step's Python is checked for side effects; ``True``: it is declared to have none, and to
            do the same in each iteration; ``False``: each micro-batch is followed.

    Attributes:
        static: whether the step is declared static.
        why_not: reason why there can be no programs; None: none is known.
    """

    def __init__(
        self, program: StageProgram, module: nn.Module, device: torch.device, static: bool | Literal["auto"]
    ) -> None:
        self.static = static is True
        self.why_not: str | None = None
        self._stage = program.stage
        self._module, self._device = module, device
        self._iteration = 0
        self._audits = True
        self._written: list[tuple[Form, FlatProgram]] = []
        if (why := why_follow(program) if static else "static_step=False") is not None:
            self._end(why)

    def begin(self) -> None:
        """Begin an iteration: drop the programs of earlier ones, unless the step is static."""
        self._iteration += 1
        self._audits = self._iteration <= _TRUSTED_AFTER or self._iteration % _AUDITED_EVERY == 0
        if self._audits or not self.static:
            self._written.clear()

    def form(self, args: Sequence[Any], received: Sequence[Tensor], told: tuple[Any, ...]) -> Form:
        """Return the form of a micro-batch, given the descriptions from earlier stages."""
        return Form.of(args, received, told, self.static)

    def find(self, form: Form) -> list[FlatProgram]:
        """Return the programs for this form, one for each set of answers; empty if the micro-batch must be followed."""
        return [] if self._audits else self._of(form)

    def _of(self, form: Form) -> list[FlatProgram]:
        return [program for known, program in self._written if form.is_like(known)]

    def writer(self, form: Form) -> ProgramWriter | None:
        """Return a writer for the micro-batch that is followed now; None if its program would not be used."""
        if self.why_not is not None or len(self._written) >= _MOST_FORMS:
            return None
        return ProgramWriter(self._module, self._device, looks=self._audits and not self.static)

    def keep(self, form: Form, writer: ProgramWriter) -> None:
        """Keep the program that was written, or note why there can be none."""
        program = writer.program
        if program is None:
            self._end(writer.why_not or "it cannot be written down")
            return
        before = next((other for other in self._of(form) if other.answers == program.answers), None)
        if before is None:
            bare = Form((), form.described, form.told)  # keeps no tensor alive
            self._written.append((bare, program))
        elif before.key != program.key:
            self._end("it does something else with each micro-batch")

    def _end(self, why: str) -> None:
        self.why_not = why
        self._written.clear()
        _log.info("stage %d follows the Python of the step for each micro-batch: %s", self._stage, why)
