"""Handle a micro-batch for which the step does something else than when it was captured.

::

    captured   embed | sdpa                    | block1 | head, loss
    now        embed | expand, reshape, sdpa   | block1 | head, loss
                       ^                         ^
                       here the step leaves      a unit of a later stage: here this stage ends, wherever it ended in
                       the captured path         the capture, and its message describes the nodes that it executed

Every stage executes the same step on the same micro-batch, so later stages come to the nodes that the message
describes. Units must still come in the order of the stages; a stage may execute none. A value keeps the index that it
got on the stage that made it. So a later stage may lack a value, which is an error, but never mistakes one for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from lightning_avgpipe.capture.draft import outputs_of
from lightning_avgpipe.capture.graph import Node, made_by
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.part import OffPathNode, OperationResult, Path, ResultDescription, Runner
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import KnownTensors
from lightning_avgpipe.utils.torch_compat import address, version_of


class Detour:
    """One stage's part of a step that has left the captured path.

    Args:
        program: program of the stage.
        known: tensors of the step, and their values.
        owned: ``id -> full name`` of parameters.
        before: descriptions of what the nodes of earlier stages returned; nodes that were not captured are included.
        shared: values of earlier stages that share memory.

    Attributes:
        sent: tensors that are sent to the next stage.
    """

    def __init__(
        self,
        program: StageProgram,
        known: KnownTensors[int],
        owned: Mapping[int, str],
        before: Sequence[ResultDescription | OffPathNode],
        shared: frozenset[int],
    ) -> None:
        self._program = program
        self._known = known
        self._owned = owned
        self._shared = shared  # values that share memory, here or on an earlier stage
        self._own: list[OffPathNode] = []
        self._ended = False
        self._steps = [entry.node for entry in before if isinstance(entry, OffPathNode)]
        self._numbers = _unused_numbers(len(program.graph.values), self._steps)
        self._values: tuple[int, ...] = ()
        self.sent: tuple[Tensor, ...] = ()

    def is_later(self, names: set[str]) -> bool:
        """Return whether units or parameters of these names belong to a later stage."""
        return not self._program.is_last and not self._is_stateful and not names.isdisjoint(self._program.later)

    def may_run(self, kind: str, names: set[str]) -> bool:
        """Return whether this stage may run a node that uses these names; on the last, they may be of no stage."""
        if self._program.is_last:
            return names.isdisjoint(self._program.earlier)
        return not self._is_stateful and kind != "region" and names <= self._program.own

    @property
    def _is_stateful(self) -> bool:
        """Whether the step changes state between units, so that it is unknown which stage must execute a new node."""
        return bool(self._program.graph.upkeep or self._program.graph.glue_states)

    def path(self, descriptions: tuple[ResultDescription | OffPathNode, ...]) -> Path:
        """Return the path of all stages so far, given the descriptions of captured nodes and of earlier stages."""
        return Path((*descriptions, *self._own), self._values, self._shared, self._ended)

    def _node(self, position: int, kind: Any, name: str) -> Node:
        """Make a node with the properties of a captured one of the same kind and name, if the stage has one."""
        like = self._program.last_node_of.get((kind, name))
        if like is None:
            return Node(position, kind, name, source_line())
        return replace(like, index=position, source=source_line(), inputs=(), outputs=(), writes=())

    def begin(self, node: Node, outcome: OperationResult, tensors: Sequence[Tensor], here: bool) -> None:
        """Begin the detour at a captured node that has returned something else this time.

        Args:
            node: captured node.
            outcome: what the node returned now.
            tensors: tensors that the node took.
            here: whether the node belongs to this stage, and is no upkeep.
        Raises:
            StepChangedError: the step cannot go on from there.
        """
        names = {node.name} if node.kind == "call" else set(node.parameters)
        then, now = len(node.outputs), len(outcome.tensors)
        # a loop over a tensor is as long as the tensor; what units of the last stage return concerns no other stage
        may_vary = node.kind == "glue" or self._program.is_last
        if here and not node.writes and self.may_run(node.kind, names) and (now == then or may_vary):
            self._note(node, outcome, tensors, ())
            return
        remedy = "return the same structure for every batch, with empty tensors where there is nothing to return"
        if node.kind == "glue" and now != then and self._is_stateful:
            remedy = (
                "in a step that changes weights or buffers between submodules, a loop over a tensor must have the same "
                "length for every micro-batch, except on the last stage. Put the loop into the forward of a submodule "
                "that returns one tensor, keep it on the last stage with split_points, loop over x.tolist() if it "
                "needs only numbers, or let all micro-batches have one size (drop_last=True in the dataloader, and a "
                "num_microbatches that divides its batch_size)"
            )
        raise StepChangedError(
            f"{node} returned {then} tensors when {self._program.graph.step} was captured, and returned {now} now"
            f"{', or what it was given only then' if now == then else ''} (stage {self._program.stage}); {remedy}"
        )

    def run(self, operation: Operation, position: int, runner: Runner) -> Any:
        """Execute an operation that was not captured; return its result."""
        node = self._node(position, operation.kind, operation.name)
        tensors, objects = operation.with_objects(node)
        versions = [version_of(tensor) for tensor in tensors]
        outcome = runner.run(operation, node, objects)
        self._note(node, outcome, tensors, self._writes(node, tensors, versions))
        return outcome.result

    def _note(
        self, node: Node, outcome: OperationResult, tensors: Sequence[Tensor], writes: tuple[tuple[int, int, bool], ...]
    ) -> None:
        node = replace(node, outputs=self._outputs(node.kind, outcome.tensors, tensors), writes=writes)
        self._steps.append(node)
        if not self._program.is_last:
            self._own.append(OffPathNode(node, outcome.entry))

    def _outputs(self, kind: str, leaves: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return indices for the tensors that a node returned, see :attr:`Node.outputs`."""
        outputs = outputs_of(leaves, tensors, self._known, self._new)
        weights = {address(t) for t in tensors if kind == "glue" and self._is_kept_from_writes(t)}
        if weights:
            views = zip(outputs, leaves, strict=True)
            self._shared |= {value for value, leaf in views if value >= 0 and address(leaf) in weights}
        return outputs

    def _is_kept_from_writes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight or buffer that nodes off the captured path must not change.

        On the last stage they may change it if the captured step changed it on this stage alone.
        """
        name = self._owned.get(id(tensor))
        return name is not None and not (self._program.is_last and name in self._program.changed_here)

    def _new(self, tensor: Tensor) -> int:
        """Return a new index for the value of this tensor."""
        value = next(self._numbers)
        self._known.learn(tensor, value)
        return value

    def _writes(
        self, node: Node, tensors: Sequence[Tensor], versions: Sequence[int]
    ) -> tuple[tuple[int, int, bool], ...]:
        """Return what a node has written into, see :attr:`Node.writes`."""
        writes = []
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(tensor) == version:
                continue
            value = self._known.value_of(tensor)
            if value is None:
                may_write = self._program.is_last and not self._is_kept_from_writes(tensor)
            else:
                may_write = value not in self._shared
            if not may_write:
                raise StepChangedError(
                    f"{node} writes into a weight, or a tensor that others may share, which it did not do when "
                    f"{self._program.graph.step} was captured (stage {self._program.stage}); compute out of place"
                )
            if value is not None:
                writes.append((i, value, tensor not in self._known))
        return tuple(writes)

    def leave(self, names: set[str], used: Sequence[Tensor], ended: bool = False) -> None:
        """Choose the values to send when the step reaches a node of a later stage, or its end.

        Args:
            names: names that the node uses; empty at the end.
            used: tensors that the node takes, or that the last stage will observe.
            ended: whether the step has returned None.
        """
        self._ended = ended
        needed = [value for t in used if (value := self._known.value_of(t)) is not None]
        alive = self._known.alive()
        wanted = [*needed, *(now for value in self._captured_at(names) for now in self._now(value))]
        self._values = tuple(v for v in dict.fromkeys(wanted) if v in alive and not isinstance(alive[v], Absent))
        self.sent = tuple(alive[value] for value in self._values)
        owners = Counter(map(address, self.sent))
        self._shared |= {v for v, tensor in zip(self._values, self.sent, strict=True) if owners[address(tensor)] > 1}

    def _captured_at(self, names: set[str]) -> tuple[int, ...]:
        """Return the values that crossed the cut after this stage, or one before the reached node, when captured."""
        graph, end = self._program.graph, self._program.end
        reached = next((n.index for n in graph.nodes[end:] if not names.isdisjoint((n.name, *n.parameters))), end)
        return (*graph.live(end), *graph.live(reached))

    def _now(self, value: int) -> Iterator[int]:
        """Yield a captured value, and the values of the last node on this path from the same source line."""
        yield value
        graph = self._program.graph
        made = graph.nodes[graph.born[value]]
        for node in reversed(self._steps):
            if (node.kind, node.name, node.source) == (made.kind, made.name, made.source):
                yield from made_by(node)
                return


def _unused_numbers(begin: int, steps: Sequence[Node]) -> Iterator[int]:
    """Yield indices for new values, beyond the captured ones and without those of these nodes."""
    taken = {value for node in steps for value in made_by(node)}
    return (number for number in count(begin) if number not in taken)
