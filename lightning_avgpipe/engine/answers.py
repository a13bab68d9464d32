"""Answer the calls of earlier stages' units that the step makes as it did with an earlier micro-batch.

::

    first micro-batch     block0(x)    matched with a node, compared with what its own stage was asked, answered
    later ones            block0(x)    the same unit, value and modes: answered at once

What an answer depends on is kept beside it: the call, its modes, and what the stages before told of it. If any of it
differs, the call is looked at as the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.part import Entry, Part, Path
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.tensors import KnownTensors


def modes_of(module: nn.Module, aside: int = 0) -> tuple[Any, ...]:
    """Return what a call depends on besides its arguments, as far as stages compare it.

    Args:
        aside: number of modes that see operations and are not on the stack now.
    """
    return (
        module.training,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch._C._len_torch_function_stack() + aside,
        torch._C._len_torch_dispatch_stack(),
    )


class Answer(NamedTuple):
    """The answer to one call.

    Attributes:
        module: called module.
        given: values of its arguments; None: the stage, which is not the last one, does not compare them.
        modes: modes in which it was called.
        entry: description of its result.
        value: value that it returned.
        make: make the tensor that stands for this value if it was not received.
        calls: paths of the called modules that may draw random numbers, the unit first.
    """

    module: nn.Module
    given: tuple[int, ...] | None
    modes: tuple[Any, ...]
    entry: TensorMeta
    value: int
    make: Callable[[], Tensor]
    calls: tuple[str, ...]


class Answers:
    """The answers to the calls before a stage.

    Args:
        program: program of the stage.
        device: device of the stage.
    """

    def __init__(self, program: StageProgram, device: torch.device) -> None:
        self._program, self._device = program, device
        self._attested: Any = ()
        self._known: list[Answer | None] = [None] * program.start

    def begin(self, part: Part) -> Sequence[Answer | None]:
        """Return the answers by position; those to other requests than the ones that came with a part are forgotten."""
        detour = isinstance(part.entries, Path) or len(part.entries) < part.program.start
        if detour or part.program is not self._program:
            return ()
        if part.attested != self._attested:
            self._known = [None] * part.program.start
        self._attested = part.attested
        return self._known

    def learn(self, operation: Operation, node: Node, entry: Entry, known: KnownTensors[int]) -> None:
        """Keep the answer to a call that was matched with a node, if it is one that can be repeated.

        Args:
            operation: the call; the tracer of the step, which came to it, is not on the stack of modes now.
            node: node of the call.
            entry: description of its result.
            known: tensors of the step, and their values.
        """
        module = operation.module
        if module is None or module._forward_hooks or not isinstance(entry, TensorMeta):
            return
        if node.writes or node.writes_objects or node.outputs[0] < 0:
            return
        given: tuple[int, ...] | None = None
        if self._program.is_last or node.name not in self._program.graph.resident:
            values = [known.own_value_of(one) for one in operation.args if isinstance(one, Tensor)]
            given = tuple(value for value in values if value is not None)
            if operation.kwargs or not 0 < len(given) == len(operation.args):
                return
        make, calls = Absent.maker(entry, self._device, node.name), (node.name, *node.drawn)
        self._known[node.index] = Answer(module, given, modes_of(module, aside=1), entry, node.outputs[0], make, calls)
