"""Doubles: copies of a stage's weights on the next stage, which runs its forwards too, and how both stages run them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.executor import Lane
from lightning_avgpipe.engine.own_module import OwnAttributes
from lightning_avgpipe.engine.pipeline import LoadedStep, StepPart
from lightning_avgpipe.engine.stage import Stage, StagePart
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.systems.broadcast.schedule import DOUBLE_FORWARD, GRAPH
from lightning_avgpipe.utils.names import joined, nearest
from lightning_avgpipe.utils.torch_compat import version_of
from lightning_avgpipe.weights.slots import Slot, slots_for, swapped
from lightning_avgpipe.weights.tied import parameters_of


class Double:
    """A copy of a stage's weights with which the next stage runs its forwards: parameters, and buffers that change.

    The stage sends them before each iteration, and the next stage puts them into the module for one forward at a time.
    Both have the same contents of a buffer after each micro-batch, since both change it once, in the same order.

    Args:
        program: program of the stage.
        module: whole module; tensors that the program uses may be without contents, except where they are sent.
    """

    constant = False  # forwards change buffers within an iteration

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._module = module
        self._parameters = parameters_of(program)
        self._buffers = program.states
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

    def swaps(self, stage: int) -> bool:
        """Return whether other tensors are put into the module for an action of a stage: always."""
        return True

    @contextlib.contextmanager
    def placed(self, stage: int) -> Iterator[dict[int, str]]:
        """Put the weights into the module within this context; yield ``id -> name`` of the parameters."""
        with swapped([(slot, self._held[name]) for slot, name in self._slots]):
            try:
                yield {id(self._held[name]): name for name in self._parameters}
            finally:
                self._held |= {name: self._module.get_buffer(name) for name in self._buffers}

    def clear(self) -> None:
        """Drop the weights, since the next iteration brings new ones."""
        self._held, self._slots = {}, []


def _check_repeatable(program: StageProgram) -> None:
    """Check that the forwards of a stage have no side effect that would happen twice if another process runs them too.

    Raises:
        ConfigurationError: the forwards change more than buffers; the message names one such thing.
    """
    graph, parameters = program.graph, set(parameters_of(program))
    units = program.called
    changed = [f"the parameter '{name}'" for node in program.nodes for name in node.states if name in parameters]
    changed += [
        f"the attribute '{joined(*key)}'"
        for key in (*graph.changed_by_units, *graph.written_tensors)
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


class DoubleForwards(StagePart):
    """The forwards that a stage shares with its neighbour: graphs built late, and forwards of the stage before it.

    Attributes:
        double: the stage before this one, on a copy of its weights, if its forwards run here too.
        weights: this copy.
    """

    double: Stage | None = None
    weights: Double | None = None

    def begin(self, row: object) -> None:
        """Begin an iteration."""
        if self.double is not None:
            self.double.begin(())

    def clear(self) -> None:
        """Drop the weights, and all that is kept for unfinished micro-batches."""
        if self.double is not None and self.weights is not None:
            self.double.clear()
            self.weights.clear()

    def _graph(self, stage: Stage, task: Task, micro_batch: int, message: Message | None) -> None:
        """Run a forward only for this stage's own backward; the next stage has computed the values that it sends."""
        assert message is not None
        versions = tuple(version_of(t) for t in message.tensors)
        stage.forward(task, micro_batch, message)
        stage.check_unchanged(message, versions, "whose tensors other stages may still read")

    def _double_forward(self, stage: Stage, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """Run the forward of the previous stage, and then this stage's."""
        assert message is not None
        return stage.forward(task, micro_batch, self._ahead(task, micro_batch, message))

    def _ahead(self, task: Task, micro_batch: int, message: Message) -> Message:
        """Run a forward of the previous stage that keeps nothing for a backward; return its message.

        It builds a graph nevertheless: this shows which values require a gradient, and without one operations may round
        differently.
        """
        assert self.double is not None
        with self.double.module.placed() as copies:
            _, replayed = self.double.replay(task, micro_batch, message, copies)
            return self.double.message(task, message.micro_batch, replayed)

    handlers = {GRAPH: _graph, DOUBLE_FORWARD: _double_forward}


class Doubles(StepPart):
    """The doubles of a step function, on the stages whose weights they are and on those that run their forwards too.

    Args:
        loaded: step function that is made runnable.
        module: whole module.
        cluster: cluster of the processes.
    Raises:
        ConfigurationError: forwards that would run twice change state that must not be changed twice.
    """

    leaves: dict[int, frozenset[str]]
    own: list[OwnAttributes]

    def __init__(self, loaded: LoadedStep, module: nn.Module, cluster: Cluster) -> None:
        programs = loaded.programs
        for k in loaded.relays:
            _check_repeatable(programs[k])
        self._weights = {k: Double(programs[k], module) for k in loaded.relays}
        self.leaves, self.own = {}, []
        for k in loaded.relays:
            rank = cluster.stage_map.owner(k + 1)
            self.leaves[rank] = self.leaves.get(rank, frozenset()) | programs[k].leaves
        for stage in loaded.stages:
            k = stage.program.stage - 1
            if k in loaded.relays:
                part = stage.parts[DoubleForwards]
                assert isinstance(part, DoubleForwards)
                part.weights = self._weights[k]
                part.double = Stage(
                    programs[k],
                    module,
                    cluster.device,
                    part.weights,
                    stage.execution,  # the same, since compiled code draws other random numbers than uncompiled code
                    is_visible=False,
                    of_units=loaded.of_units,
                )
                self.own.append(part.double.module.attributes)

    def begin(self, lane: Lane, schedule: Schedule) -> None:
        """Send the weights of a stage whose input is relayed, and expect those of the stage before it."""
        number = lane.stage.program.stage
        if lane.relays:
            if lane.place is not None:
                lane.place()
            assert lane.ends.to_next is not None
            lane.ends.to_next.put(self._weights[number].sent())  # before the values, which are relayed at once
        lane.first_message_handler = self._weights[number - 1].take if number - 1 in schedule.relays else None
