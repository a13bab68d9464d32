"""The call graph of a step function: nodes in program order, the values between them, and where it may be cut.

Only what depends on the model is recorded. Glue that needs nothing but the batch (masks, positions, shifted labels)
is *free*: every stage executes it for itself, so it is no node.

::

    position   0        1      2        3        4       5
               | embed  | add  | block0 | block1 | head  |  loss (glue)
               call     glue   call     call     call

A cut at position p lies before node p: nodes 0..p-1 run before it, the others after it. What crosses the cut are the
values that exist before p and are needed at p or later (liveness).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from lightning_avgpipe.capture.upkeep import Span, made_by, spans
from lightning_avgpipe.utils.placeholder import Description


@dataclass(frozen=True)
class Value:
    """A tensor that a node produced or wrote into. One per tensor object, whatever is later written into it.

    Attributes:
        index: position in :attr:`CallGraph.values`.
        name: the producing unit or operation, for messages.
        shape: of the captured micro-batch; later micro-batches may differ.
        nbytes: bytes of the captured micro-batch.
        requires_grad: whether a gradient comes back for it.
        storage: values with the same number share memory.
        is_strided: else it is sparse or nested, and does not travel.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    storage: int
    is_strided: bool = True


@dataclass(frozen=True)
class Node:
    """A call of a unit, a glue operation on values or parameters, or a region that is checkpointed in one piece.

    Attributes:
        index: position in program order.
        kind: ``"call"`` of a unit, ``"glue"`` between calls, or a checkpointed ``"region"``.
        name: path of the unit, name of the torch function, or paths of the modules in the region.
        source: line of the user's code, as ``file.py:12 in forward``.
        inputs: values that it reads.
        outputs: one entry per tensor in its result: a value, or ``-1 - i`` if it is the i-th tensor argument itself.
        writes: ``(i, value, base)`` for each tensor argument that it changes in place: the i-th one, or with
            ``base`` the tensor that the i-th one is a view of.
        parameters: full names of the parameters that it uses.
        states: full names of the parameters and buffers that it changes, or that it uses and other nodes change.
        changes: those of them that it changes.
        entry: what its result looks like, if that depends on parameters and buffers alone; else None.
        draws: whether it draws random numbers.
        drawn: calls inside of it of modules that draw, by path.
        flops: forward floating-point operations, an estimate.
        opens: whether it writes into objects among its arguments, or returns objects that hold tensors. Tensors in its
            arguments are then followed by those in objects there, and its outputs are those of a parcel.
        exports: whether attributes of the unit's modules count as such objects.
        lasting: the objects that it writes into and that were there before the step, by their numbers.
        generators: those of random numbers that count as such objects, since the step has made them, by their numbers
            among all in its arguments.
        asks: whether the step learns numbers of values from it, so that what it does next may depend on them.
    """

    index: int
    kind: Literal["call", "glue", "region"]
    name: str
    source: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    writes: tuple[tuple[int, int, bool], ...] = ()
    parameters: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    entry: Description | None = None
    draws: bool = False
    drawn: tuple[str, ...] = ()
    flops: float = 0.0
    opens: bool = False
    exports: bool = False
    lasting: tuple[int, ...] = ()
    generators: tuple[int, ...] = ()
    asks: bool = False

    def __str__(self) -> str:
        names = {"call": f"unit '{self.name}'", "glue": f"{self.name}()", "region": f"checkpoint of '{self.name}'"}
        what = names[self.kind]
        return f"{what} at {self.source}"


@dataclass(frozen=True)
class Leaf:
    """A tensor of the batch, and who needs its numbers. Views of it count as itself.

    Attributes:
        name: as the step reaches it, such as ``['labels']``.
        nbytes: of the captured micro-batch.
        free_use: before which node free glue first computes with it, on every stage that comes so far; None if none
            does.
        nodes: that take it.
        kept: whether the result, ``self.log`` or a metric needs it.
    """

    name: str
    nbytes: int
    free_use: int | None = None
    nodes: tuple[int, ...] = ()
    kept: bool = False


def _instead(first: Node, last: Node) -> str:
    """What to do where calls of one unit must be on one stage."""
    if first.kind != "call" or first.name != last.name:
        return ""
    return "; a stage is a stretch of the step, so call each layer for all inputs before the next layer is called"


class GeneratorUse(NamedTuple):
    """Who draws from a generator of random numbers of the model's own.

    Attributes:
        leads: path of a module and name of an attribute, or nothing and the name of a variable, that lead to it; and
            which of the generators that they lead to it is.
        given: paths of the units to which the step gave it.
        nodes: that drew from it.
        between: before which node code between them first drew from it; None: it did not.
        renewed: whether each step seeds it before it draws, so that it is the same on every stage that comes so far.
    """

    leads: tuple[tuple[str, str, int], ...]
    given: frozenset[str]
    nodes: tuple[int, ...]
    between: int | None
    renewed: bool


@dataclass(frozen=True)
class Opened:
    """A call of a module that is no unit, because it was opened: what it did are the nodes ``begin .. end-1``.

    Attributes:
        path: of the module.
        begin: its first node.
        end: the node after its last one.
        observes: whether it called ``self.log`` or a metric.
    """

    path: str
    begin: int
    end: int
    observes: bool


@dataclass(frozen=True)
class CallGraph:
    """What one step function does with one micro-batch.

    Attributes:
        step: name of the step function, such as ``training_step``.
        nodes: in program order.
        values: everything that flows between nodes.
        kept: values that the result, ``self.log`` or a metric needs: they go on to the last stage.
        units: paths of the submodules that are never split, whether they are called or not.
        resident: units that run on one stage even when they depend on the batch alone (they own parameters or
            state, or draw random numbers); every other unit without dependence on a value is free.
        drawing: paths of the modules that draw random numbers themselves, not only through their children; "" is the
            step's own code.
        host_drawing: the same for the generators of Python and NumPy.
        leaves: the tensors of the batch.
        batch_writes: whether the step changes tensors of its batch in place.
        glue_states: full names of the parameters and buffers that the step changes and that glue uses, or several
            units; operations on them are nodes.
        rewritten: those of all that it changes which operations write into, so that backwards would find it changed.
        attributes: path of a module and name, of those that code between units assigns.
        of_units: the same of attributes that units assign, or that lead to objects which they change.
        written: the same of attributes and variables that lead to tensors which the step writes into.
        carried: full names of those of them whose tensors go from one micro-batch to the next.
        holders: the same of those that lead to objects which that code changes in place, and before which node it first
            does.
        reads: the same of all that the step reads, and before which node it first does.
        pinned: ``(first, last, reason)``: no cut at these positions is legal.
        leaving: units that leave tensors where they cannot be followed, say in a global list; what is followed when
            they are opened, such as forward hooks, is no obstacle.
        opened: calls of modules that hold units, in the order in which they ended.
        trained: full names of the parameters that were trained when the step was captured.
        finite: whether its loss was, if it has one.
        generators: who draws from the generators of random numbers that outlive the step.
        iterators: path of a module and name, of what leads to iterators from which the step took nothing.
        uncalled: paths of the modules that the step did not call.
        beside: full names of such modules and of their parameters, each with the path of a neighbour that it called.
    """

    step: str
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    kept: frozenset[int]
    units: tuple[str, ...]
    resident: frozenset[str]
    drawing: frozenset[str] = frozenset()
    host_drawing: frozenset[str] = frozenset()
    leaves: tuple[Leaf, ...] = ()
    batch_writes: bool = False
    glue_states: frozenset[str] = frozenset()
    rewritten: frozenset[str] = frozenset()
    attributes: tuple[tuple[str, str], ...] = ()
    of_units: tuple[tuple[str, str], ...] = ()
    written: tuple[tuple[str, str], ...] = ()
    carried: tuple[str, ...] = ()
    holders: tuple[tuple[tuple[str, str], int], ...] = ()
    reads: tuple[tuple[tuple[str, str], int], ...] = ()
    pinned: tuple[tuple[int, int, str], ...] = ()
    leaving: frozenset[str] = frozenset()
    opened: tuple[Opened, ...] = ()
    trained: frozenset[str] = frozenset()
    finite: bool = True
    generators: tuple[GeneratorUse, ...] = ()
    iterators: tuple[tuple[str, str], ...] = ()
    uncalled: frozenset[str] = frozenset()
    beside: tuple[tuple[str, str], ...] = ()

    @cached_property
    def changed(self) -> frozenset[str]:
        """Full names of the parameters and buffers that the step changes."""
        return frozenset(name for node in self.nodes for name in node.states)

    @cached_property
    def asking(self) -> frozenset[str]:
        """Paths of the opened modules whose own code learns numbers of values."""
        return frozenset(call.path for _, call in self._questions if call.path)

    @cached_property
    def deciding(self) -> tuple[str | None, ...]:
        """For each position 0..len(nodes) whose code may go on there in a way that depends on numbers of values.

        A path of a module, which is empty for the step's own code; None where all is certain.
        """
        found: list[str | None] = [None] * (len(self.nodes) + 1)
        for asked, call in self._questions:
            last = max((n.index for n in self.nodes[asked + 1 : call.end] if n.kind != "glue"), default=asked)
            found[asked + 1 : last + 1] = [call.path] * (last - asked)
        return tuple(found)

    @cached_property
    def _questions(self) -> list[tuple[int, Opened]]:
        """The nodes from which numbers of values are learnt, and the innermost opened call around each."""
        step = Opened("", 0, len(self.nodes), False)
        asked = [node.index for node in self.nodes if node.asks]
        around = [[step, *(call for call in self.opened if call.begin <= index < call.end)] for index in asked]
        return [(i, min(calls, key=lambda call: call.end - call.begin)) for i, calls in zip(asked, around, strict=True)]

    @cached_property
    def places(self) -> dict[str, int]:
        """Of modules that were not called, and their parameters: the node behind which a later batch may call them.

        That is the last one of the glue behind a neighbour, since they may be called in its place, or next.
        """
        last: dict[str, int] = {}
        calls = [*(node.index for node in self.nodes if node.kind != "glue"), len(self.nodes)]
        for index, following in itertools.pairwise(calls):
            parts = self.nodes[index].name.split(".")
            last |= dict.fromkeys((".".join(parts[: n + 1]) for n in range(len(parts))), following - 1)
        used = {name for node in self.nodes for name in (node.name, *node.parameters)}
        return {name: last[path] for name, path in self.beside if path in last and name not in used}

    @cached_property
    def born(self) -> tuple[int, ...]:
        """For each value the node that makes it a value, shape ``(len(values),)``."""
        first = [len(self.nodes)] * len(self.values)
        for node in reversed(self.nodes):
            for value in made_by(node):
                first[value] = node.index
        return tuple(first)

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each value the last node that needs it; ``len(nodes)`` if the result does."""
        last = [-1] * len(self.values)
        for node in self.nodes:
            if node.index in self.upkeep:
                continue  # who needs its values makes them
            # an object may hold values of earlier nodes, which nobody needs for that
            made = (value for value in made_by(node) if self.born[value] == node.index)
            written = (value for _, value, _ in node.writes)
            for value in (*node.inputs, *written, *made):
                last[value] = node.index
        for value in self.kept:
            last[value] = len(self.nodes)
        return tuple(last)

    def live(self, position: int) -> tuple[int, ...]:
        """Values that cross a cut at this position, in order of their birth."""
        return tuple(
            value.index for value in self.values if self.born[value.index] < position <= self.last_use[value.index]
        )

    def needed_leaves(self, start: int, end: int) -> tuple[Leaf, ...]:
        """Tensors of the batch that a stage with the nodes ``start .. end-1`` needs."""
        last = end == len(self.nodes)

        def needs(leaf: Leaf) -> bool:
            computes = leaf.free_use is not None and leaf.free_use <= end  # up to where the stage leaves the step
            return computes or (last and leaf.kept) or any(start <= node < end for node in leaf.nodes)

        return tuple(leaf for leaf in self.leaves if self.batch_writes or needs(leaf))

    @cached_property
    def boundary_bytes(self) -> tuple[int, ...]:
        """Bytes that cross a cut at each position 0..len(nodes), shape ``(len(nodes) + 1,)``."""
        change = [0] * (len(self.nodes) + 2)
        for value in self.values:
            born, last = self.born[value.index], self.last_use[value.index]
            if last > born:
                change[born + 1] += value.nbytes
                change[last + 1] -= value.nbytes
        totals, total = [], 0
        for position in range(len(self.nodes) + 1):
            total += change[position]
            totals.append(total)
        return tuple(totals)

    @cached_property
    def obstacles(self) -> tuple[str | None, ...]:
        """For each position 0..len(nodes) why no cut may lie there, or None where one may."""
        reasons: list[str | None] = [None] * (len(self.nodes) + 1)

        def forbid(positions: Iterable[int], reason: str) -> None:
            for position in positions:
                if reasons[position] is None:
                    reasons[position] = reason

        for begin, end, reason in self.pinned:
            forbid(range(begin, min(end, len(self.nodes)) + 1), reason)
        for value in self.values:
            if not value.is_strided:
                made, used = self.born[value.index], [node.index for node in self.nodes if value.index in node.inputs]
                alive = range(self.upkeep.get(made, made) + 1, max([self.last_use[value.index], *used]) + 1)
                forbid(alive, f"'{value.name}' is a sparse or nested tensor, which does not travel between stages")
        for span in self._spans:
            first, last = self.nodes[span.first], self.nodes[span.last]
            what = f"'{span.name}', which the step changes, is used by {first} and by {last}, which a cut here would "
            forbid(range(span.first + 1, span.last + 1), f"{what}put on two stages{_instead(first, last)}")
        for group in self._aliases:
            written = [n.index for n in self.nodes for _, v, _ in n.writes if v in group]
            if not written:
                continue
            for position in range(min(self.born[v] for v in group) + 1, max(written) + 1):
                living = [v for v in group if self.born[v] < position <= self.last_use[v]]
                if len(living) > 1:
                    one, other = (f"'{self.values[v].name}'" for v in living[:2])
                    forbid(
                        [position],
                        f"the results of {one} and {other} share memory, which {self.nodes[max(written)]} changes in "
                        "place; clone one of them, or compute out of place",
                    )
        return tuple(reasons)

    @cached_property
    def _spans(self) -> list[Span]:
        """Uses of what the step changes. (Another parameter may be used on two stages: it is copied.)"""
        return spans(self.nodes, self.kept)

    @cached_property
    def upkeep(self) -> dict[int, int]:
        """Nodes that are executed on the stage of another node, wherever they stand -> that node."""
        return {index: span.first for span in self._spans for index in span.upkeep}

    def executed(self, start: int, end: int) -> tuple[Node, ...]:
        """What a stage with the nodes ``start .. end-1`` executes: these, and upkeep."""
        sites = self.upkeep
        return tuple(node for node in self.nodes if start <= sites.get(node.index, node.index) < end)

    @cached_property
    def _aliases(self) -> list[tuple[int, ...]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for value in self.values:
            groups[value.storage].append(value.index)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    def __str__(self) -> str:
        lines = [f"{self.step}: {len(self.nodes)} nodes, {len(self.values)} values"]
        for node in self.nodes:
            reads = ",".join(str(v) for v in node.inputs)
            gives = ",".join(str(v) for v in node.outputs)
            lines.append(f"  {node.index:4d} {node.kind:5s} {node.name:40s} ({reads}) -> ({gives})  {node.source}")
        return "\n".join(lines)


def changed_in_common(graph: CallGraph) -> str:
    """What a step changes that is the same for all parallel models, or batches: one such thing; nothing: ""."""
    changed = [*graph.attributes, *graph.of_units, *(key for key, _ in graph.holders)]
    if changed:
        return f"'{'.'.join(part for part in changed[0] if part)}'"
    return "its batch" if graph.batch_writes else ""
