"""Doubles: a stage's weights on the next stage, which runs its forwards as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.names import nearest
from lightning_avgpipe.weights.slots import Slot, slots_for, swapped
from lightning_avgpipe.weights.tied import parameters_of


class Double:
    """The weights of a stage that the next stage uses to run its forwards: parameters, and buffers that they change.

    The stage sends them before each iteration, and the next stage puts them into the module for one forward at a time.
    Both have the same contents of a buffer after each micro-batch, since both change it once, in the same order.

    Args:
        program: program of the stage.
        module: whole module; tensors that the program uses may be without contents, except where they are sent.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._module = module
        self._parameters = parameters_of(program)
        self._buffers = tuple(dict.fromkeys(name for node in program.nodes for name in node.states))
        self._held: dict[str, Tensor] = {}
        self._slots: list[tuple[Slot, str]] = []

    def sent(self) -> Message:
        """Return a message with the current weights. Buffers are copied, as forwards may change them meanwhile."""
        parameters = [self._module.get_parameter(name) for name in self._parameters]
        buffers = [self._module.get_buffer(name).detach().clone() for name in self._buffers]
        flags = tuple(parameter.requires_grad for parameter in parameters)
        return Message(0, (*(parameter.detach() for parameter in parameters), *buffers), flags)

    def take(self, message: Message) -> None:
        """Use the received weights from this call on."""
        named = zip((*self._parameters, *self._buffers), message.tensors, strict=True)
        self._held = {name: tensor for name, tensor in named if tensor is not None}
        for name, trains in zip(self._parameters, message.requires_grad, strict=True):
            self._held[name] = nn.Parameter(self._held[name], requires_grad=trains)
        own: dict[str, Tensor] = {name: self._module.get_parameter(name) for name in self._parameters}
        own |= {name: self._module.get_buffer(name) for name in self._buffers}
        places = slots_for(self._module, own.values())
        self._slots = [(slot, name) for name, tensor in own.items() for slot in places[id(tensor)]]

    @contextlib.contextmanager
    def placed(self, stage: int) -> Iterator[dict[int, str]]:
        """Put the weights into the module within this context; yields ``id -> name`` of the parameters."""
        with swapped([(slot, self._held[name]) for slot, name in self._slots]):
            try:
                yield {id(self._held[name]): name for name in self._parameters}
            finally:
                self._held |= {name: self._module.get_buffer(name) for name in self._buffers}

    def clear(self) -> None:
        """Drop the weights: the next iteration brings new ones."""
        self._held, self._slots = {}, []


def check_repeatable(program: StageProgram) -> None:
    """Check that another process can run the forwards of a stage as well, without anything happening twice.

    Raises:
        ConfigurationError: the forwards change more than buffers; the message names one such thing.
    """
    graph, parameters = program.graph, set(parameters_of(program))
    units = {node.name for node in program.nodes if node.kind == "call"}
    changed = [f"the parameter '{name}'" for node in program.nodes for name in node.states if name in parameters]
    changed += [
        f"the attribute '{'.'.join(filter(None, key))}'"
        for key in (*graph.of_units, *graph.written)
        if (unit := nearest(key[0], graph.units)) in units or not unit
    ]
    changed += [f"objects that outlive the step ({node})" for node in program.nodes if node.lasting]
    changed += [f"what is outside of the module (unit '{unit}')" for unit in sorted(units & graph.leaking)]
    if changed:
        raise ConfigurationError(
            f"with broadcast forward stage {program.stage + 1} runs the forwards of stage {program.stage} as well, and "
            f"these change {changed[0]}, which would happen twice: only buffers may change there. Keep it in a buffer "
            "(register_buffer), move it to another stage with split_points, or use schedule='1f1b'"
        )
