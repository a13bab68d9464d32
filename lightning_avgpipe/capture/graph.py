"""Define the call graph of a step function: nodes in program order, the values between them, and where it may be cut.

Only what depends on the model is recorded. Glue that needs only the batch (masks, positions, shifted labels) is *free*:
every stage executes it for itself, so it is not a node.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import networkx
from torch import Tensor

from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.placeholder import Description


@dataclass(frozen=True)
class Value:
    """A tensor that a node produced or wrote into; one value per tensor object, whatever is written to it later.

    Attributes:
        index: position in :attr:`CallGraph.values`.
        name: the producing unit or operation, for messages.
        shape: shape in the captured micro-batch; later micro-batches may differ.
        dtype: dtype as a string, such as ``torch.float32``.
        nbytes: size in bytes in the captured micro-batch.
        requires_grad: whether a backward returns a gradient for it.
        storage: values with the same number share memory.
        is_strided: whether it is a dense tensor; sparse and nested tensors are not sent between stages.
        has_gaps: whether it is a view with gaps in memory; another process receives it without the gaps.
        is_saved: whether a node saves it, or what it shares memory with, for its backward.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool
    storage: int
    is_strided: bool = True
    has_gaps: bool = False
    is_saved: bool = True


@dataclass(frozen=True)
class Node:
    """A call of a unit, a glue operation on values or parameters, or a region that is checkpointed in one piece.

    Attributes:
        index: position in program order.
        kind: ``"call"`` of a unit, ``"glue"`` between calls, or a checkpointed ``"region"``.
        name: path of the unit, name of the torch function, or paths of the modules in the region.
        source: line of the user's code, as ``file.py:12 in forward``.
        inputs: values that the node reads.
        outputs: one entry per tensor in the result: a value, or ``-1 - i`` if it is the i-th tensor argument itself.
        writes: ``(i, value, base)`` for each tensor argument that the node changes in place: the i-th one, or with
            ``base`` the tensor that the i-th one is a view of.
        parameters: full names of the parameters that the node uses.
        states: full names of the parameters and buffers that the node changes, or that it uses and other nodes change.
        changes: those of ``states`` that the node changes.
        entry: description of the result, if that depends on parameters and buffers alone; else None.
        draws: whether the node draws random numbers.
        drawn: paths of the modules called inside of the node that draw random numbers, one per call.
        flops: forward floating-point operations, an estimate.
        saved_bytes: bytes that the node saves for its backward besides values.
        writes_objects: whether the node writes into objects among its arguments, or returns objects that hold tensors.
            The tensors in these objects then follow the tensors in its arguments, and its outputs are those of a
            :class:`~lightning_avgpipe.state.parcel.Parcel`.
        exports: whether attributes of the unit's modules count as such objects.
        lasting: indices of the objects that the node writes into and that existed before the step.
        generators: indices, among all random generators in the arguments, of those that the step has made; they count
            as such objects.
        reads_numbers: whether Python code reads numbers from the result, which may decide what the step does next.
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
    saved_bytes: int = 0
    writes_objects: bool = False
    exports: bool = False
    lasting: tuple[int, ...] = ()
    generators: tuple[int, ...] = ()
    reads_numbers: bool = False

    def written(self, taken: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """Yield each tensor that the node changes in place, given those that it takes, and its value."""
        for i, value, of_base in self.writes:
            target = taken[i]._base if of_base else taken[i]
            if target is not None:
                yield target, value

    def __str__(self) -> str:
        names = {"call": f"unit '{self.name}'", "glue": f"{self.name}()", "region": f"checkpoint of '{self.name}'"}
        what = names[self.kind]
        return f"{what} at {self.source}"


@dataclass(frozen=True)
class Leaf:
    """A tensor of the batch, and the nodes that need its numbers. Views of the tensor count as the tensor.

    Attributes:
        name: path of the tensor in the batch, such as ``['labels']``.
        nbytes: size in bytes in the captured micro-batch.
        free_use: position of the first free glue that computes with it, on every stage that gets that far; None if
            there is no such use.
        nodes: indices of the nodes that take it.
        needed_by_result: whether the result, ``self.log`` or a metric needs it.
    """

    name: str
    nbytes: int
    free_use: int | None = None
    nodes: tuple[int, ...] = ()
    needed_by_result: bool = False


class GeneratorUse(NamedTuple):
    """The draws from one random generator that the model holds.

    Attributes:
        leads: ``(path, name, number)`` of each attribute that leads to the generator, or with an empty path of a
            variable; ``number`` is the generator's index among those that are reached from there.
        given: paths of the units that got the generator as an argument.
        nodes: indices of the nodes that drew from it.
        between: position of the first draw of code between nodes; None if there was none.
        renewed: whether each step seeds the generator before its first draw, so that all stages that draw get the same
            numbers.
    """

    leads: tuple[tuple[str, str, int], ...]
    given: frozenset[str]
    nodes: tuple[int, ...]
    between: int | None
    renewed: bool


@dataclass(frozen=True)
class FollowedCall:
    """A call of a module that is not a unit and was followed: it executed the nodes ``begin .. end-1``.

    Attributes:
        path: path of the module.
        begin: index of its first node.
        end: index of the node after its last one.
        observes: whether it called ``self.log`` or a metric.
    """

    path: str
    begin: int
    end: int
    observes: bool


@dataclass(frozen=True)
class CallGraph:
    """The record of what one step function does with one micro-batch.

    Attributes:
        step: name of the step function, such as ``training_step``.
        nodes: all nodes, in program order.
        values: everything that flows between nodes.
        observed: values that the result, ``self.log`` or a metric needs; they are sent on to the last stage.
        units: paths of the submodules that are never split, called or not.
        resident: units that run on one stage even when they depend on the batch alone (they own parameters or state, or
            draw random numbers); every other unit that depends on no value is free.
        drawing: paths of the modules that draw from torch's generators themselves, not only through their children; ""
            stands for the step's own code.
        host_drawing: paths of the modules that draw from the generators of Python or NumPy.
        seeding: paths of the modules in units that seed torch's generators themselves, or get or set their state.
        from_entropy: whether one of them may seed with an unpredictable number (``torch.seed``).
        leaves: the tensors of the batch.
        batch_writes: whether the step changes tensors of its batch in place.
        glue_states: full names of the parameters and buffers that the step changes and that glue, or more than one
            unit, uses; operations on them are nodes.
        rewritten: full names of the parameters and buffers that the step changes in place, so that a later backward
            would find changed contents.
        assigned_between: ``(path of the module, name)`` of the attributes that code between units assigns.
        set_back: ``(path, name)`` of the attributes and variables that code between units changes, or whose objects it
            changes, and sets back before the step ends.
        changed_by_units: ``(path, name)`` of the attributes and variables that units assign, or whose objects they
            change -> the last node that does; -1: unknown.
        parts_changed: ``(path, name)`` of those that hold an object of which units change only some attributes -> names
            of these.
        made_by_units: like ``changed_by_units``, for what units assign or change in the first step only.
        written_tensors: ``(path, name)`` of the attributes and variables whose tensors the step writes into.
        carried: full names of the attributes whose tensors go from one micro-batch to the next.
        mutated_between: ``(path, name)`` of the attributes and variables that lead to objects which code between units
            changes in place -> position of the first change.
        reads: ``(path, name)`` of all attributes that the step reads -> position of the first read.
        read_between: ``(path, name)`` of the attributes that code between units reads -> position of the last read.
        buffers_read: full names of the buffers that operations between units take -> position of the first one.
        pinned: ``(first, last, reason)``: no cut at these positions is legal.
        leaking: units that leave tensors where they cannot be followed, such as in a global list. Opening the unit may
            help, for instance if a forward hook of a submodule leaves them.
        followed_calls: calls of modules that hold units, in the order in which they ended.
        trained: full names of the parameters that were trained when the step was captured.
        finite: whether the loss was finite; True if there is none.
        generators: uses of the random generators that outlive the step.
        iterators: ``(path, name)`` of attributes and variables that lead to iterators from which the step took nothing.
        uncalled: paths of the modules that the step did not call.
        neighbours: full names of uncalled modules and of their parameters, each with the path of a called neighbour;
            and of parameters in lists that no operation used, each with the name of a used one.
        inner_flops: paths of the modules within units that were called -> operations.
    """

    step: str
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    observed: frozenset[int]
    units: tuple[str, ...]
    resident: frozenset[str]
    drawing: frozenset[str] = frozenset()
    host_drawing: frozenset[str] = frozenset()
    seeding: frozenset[str] = frozenset()
    from_entropy: bool = False
    leaves: tuple[Leaf, ...] = ()
    batch_writes: bool = False
    glue_states: frozenset[str] = frozenset()
    rewritten: frozenset[str] = frozenset()
    assigned_between: tuple[tuple[str, str], ...] = ()
    set_back: tuple[tuple[str, str], ...] = ()
    changed_by_units: Mapping[tuple[str, str], int] = field(default_factory=dict)
    parts_changed: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    made_by_units: Mapping[tuple[str, str], int] = field(default_factory=dict)
    written_tensors: tuple[tuple[str, str], ...] = ()
    carried: tuple[str, ...] = ()
    mutated_between: Mapping[tuple[str, str], int] = field(default_factory=dict)
    reads: Mapping[tuple[str, str], int] = field(default_factory=dict)
    read_between: Mapping[tuple[str, str], int] = field(default_factory=dict)
    buffers_read: Mapping[str, int] = field(default_factory=dict)
    pinned: tuple[tuple[int, int, str], ...] = ()
    leaking: frozenset[str] = frozenset()
    followed_calls: tuple[FollowedCall, ...] = ()
    trained: frozenset[str] = frozenset()
    finite: bool = True
    generators: tuple[GeneratorUse, ...] = ()
    iterators: tuple[tuple[str, str], ...] = ()
    uncalled: frozenset[str] = frozenset()
    neighbours: tuple[tuple[str, str], ...] = ()
    inner_flops: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def called(self) -> frozenset[str]:
        """The names of the units that the step calls."""
        return units_in(self.nodes)

    @cached_property
    def changed_between(self) -> tuple[tuple[str, str], ...]:
        """The attributes and variables that code between units assigns, or whose objects it changes."""
        return tuple(dict.fromkeys((*self.assigned_between, *self.mutated_between)))

    @cached_property
    def changed(self) -> frozenset[str]:
        """The full names of the parameters and buffers that the step changes."""
        return frozenset(name for node in self.nodes for name in node.states)

    @cached_property
    def number_readers(self) -> frozenset[str]:
        """The paths of the followed modules whose own code reads numbers of values."""
        return frozenset(call.path for _, call in self._questions if call.path)

    @cached_property
    def data_dependent_modules(self) -> tuple[str | None, ...]:
        """For each position 0..len(nodes), the followed module in which numbers of values may decide what runs there.

        It is given by its path, which is empty for the step's own code. None: nothing depends on numbers there.
        """
        found: list[str | None] = [None] * (len(self.nodes) + 1)
        for asked, call in self._questions:
            last = max((n.index for n in self.nodes[asked + 1 : call.end] if n.kind != "glue"), default=asked)
            found[asked + 1 : last + 1] = [call.path] * (last - asked)
        return tuple(found)

    @cached_property
    def _questions(self) -> list[tuple[int, FollowedCall]]:
        """The nodes from which Python code reads numbers of values, each with the innermost followed call around it."""
        step = FollowedCall("", 0, len(self.nodes), False)
        asked = [node.index for node in self.nodes if node.reads_numbers]
        around = [[step, *(call for call in self.followed_calls if call.begin <= index < call.end)] for index in asked]
        return [(i, min(calls, key=lambda call: call.end - call.begin)) for i, calls in zip(asked, around, strict=True)]

    @cached_property
    def position_of_uncalled(self) -> dict[str, int]:
        """The node after which a later batch may call an uncalled module, by name of the module or its parameter.

        It is the last glue node after a called neighbour, since the module may be called instead of the neighbour, or
        after it. A parameter in a list may be used in the place of another one in this list.
        """
        last: dict[str, int] = {}
        calls = [*(node.index for node in self.nodes if node.kind != "glue"), len(self.nodes)]
        for index, following in itertools.pairwise(calls):
            parts = self.nodes[index].name.split(".")
            last |= dict.fromkeys((".".join(parts[: n + 1]) for n in range(len(parts))), following - 1)
        last |= {name: node.index for node in self.nodes if node.kind == "glue" for name in node.parameters}
        used = {name for node in self.nodes for name in (node.name, *node.parameters)}
        return {name: last[path] for name, path in self.neighbours if path in last and name not in used}

    @cached_property
    def born(self) -> tuple[int, ...]:
        """For each value the node that makes it, shape ``(len(values),)``."""
        first = [len(self.nodes)] * len(self.values)
        for node in reversed(self.nodes):
            for value in made_by(node):
                first[value] = node.index
        return tuple(first)

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each value the last node that needs it; ``len(nodes)`` if the result needs it."""
        last = [-1] * len(self.values)
        for node in self.nodes:
            if node.index in self.upkeep:
                continue  # the stage that needs its values executes it
            # a node that returns an object does not thereby use the values of earlier nodes that the object holds
            made = (value for value in made_by(node) if self.born[value] == node.index)
            written = (value for _, value, _ in node.writes)
            for value in (*node.inputs, *written, *made):
                last[value] = node.index
        for value in self.observed:
            last[value] = len(self.nodes)
        return tuple(last)

    def live(self, position: int) -> tuple[int, ...]:
        """Return the values that cross a cut at this position, in order of creation."""
        return tuple(
            value.index for value in self.values if self.born[value.index] < position <= self.last_use[value.index]
        )

    def needed_leaves(self, start: int, end: int) -> tuple[Leaf, ...]:
        """Return the tensors of the batch that a stage with the nodes ``start .. end-1`` needs."""
        last = end == len(self.nodes)

        def needs(leaf: Leaf) -> bool:
            computes = leaf.free_use is not None and leaf.free_use <= end  # the stage executes free glue up to its end
            return computes or (last and leaf.needed_by_result) or any(start <= node < end for node in leaf.nodes)

        return tuple(leaf for leaf in self.leaves if self.batch_writes or needs(leaf))

    @cached_property
    def boundary_bytes(self) -> tuple[int, ...]:
        """The bytes that cross a cut at each position 0..len(nodes), shape ``(len(nodes) + 1,)``."""
        return self.crossing(lambda value: value.nbytes)

    def crossing(self, size: Callable[[Value], int]) -> tuple[int, ...]:
        """Return the total size of the values that cross a cut at each position, shape ``(len(nodes) + 1,)``."""
        change = [0] * (len(self.nodes) + 2)
        for value in self.values:
            born, last = self.born[value.index], self.last_use[value.index]
            if last > born:
                change[born + 1] += size(value)
                change[last + 1] -= size(value)
        return tuple(itertools.accumulate(change[:-1]))

    @cached_property
    def obstacles(self) -> tuple[str | None, ...]:
        """For each position 0..len(nodes) the reason why no cut may lie there, or None where a cut is legal."""
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
    def _spans(self) -> list[PinnedNodes]:
        """The spans of nodes that use what the step changes. (Unchanged parameters may be copied to other stages.)"""
        return spans(self.nodes, self.observed)

    @cached_property
    def upkeep(self) -> dict[int, int]:
        """Node -> the node whose stage executes it, for nodes that are not executed at their place in the program."""
        return {index: span.first for span in self._spans for index in span.upkeep}

    def executed(self, start: int, end: int) -> tuple[Node, ...]:
        """Return the nodes that a stage with ``start .. end-1`` executes: these, with upkeep moved to its stage."""
        sites = self.upkeep
        return tuple(node for node in self.nodes if start <= sites.get(node.index, node.index) < end)

    @cached_property
    def _aliases(self) -> list[tuple[int, ...]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for value in self.values:
            groups[value.storage].append(value.index)
        return [tuple(group) for group in groups.values() if len(group) > 1]


def _instead(first: Node, last: Node) -> str:
    """Return advice for two calls of one unit that must be on one stage; empty for other nodes."""
    if first.kind != "call" or first.name != last.name:
        return ""
    return "; a stage is a stretch of the step, so call each layer for all inputs before the next layer is called"


def changed_in_common(graph: CallGraph) -> str:
    """Return the name of something that a step changes and that parallel models and batches share; "" if nothing."""
    changed = [*graph.assigned_between, *graph.changed_by_units, *graph.mutated_between]
    if changed:
        return f"'{joined(*changed[0])}'"
    return "its batch" if graph.batch_writes else ""


# -- upkeep: glue that computes weights from weights only, such as the update of a momentum encoder --------------------
#
#     program      update teacher | student ............... | teacher ... loss
#     stage 0      (passes by)      student
#     stage 1      update teacher | (skipped)                 teacher ... loss
#
# In program order, upkeep and all nodes up to the use of the changed weights would have to be on one stage. But upkeep
# needs nothing that a stage computes, so the stage that uses the changed weights executes it, wherever it stands.


@dataclass(frozen=True)
class PinnedNodes:
    """A set of nodes that must be on one stage, since they use state that the step changes.

    Attributes:
        name: name of one of the changed parameters and buffers.
        first: the first node, whose stage executes all of them.
        last: the last node.
        upkeep: further nodes that this stage executes wherever they stand; they are not after ``last``.
    """

    name: str
    first: int
    last: int
    upkeep: tuple[int, ...] = ()


def spans(nodes: Sequence[Node], observed: Iterable[int]) -> list[PinnedNodes]:
    """Return the spans of nodes that use what the step changes.

    Args:
        nodes: nodes of the step, in program order.
        observed: values that the result needs.
    """
    changed = {name for node in nodes for name in node.states}
    upkeep = _upkeep(nodes, frozenset(observed))
    links = networkx.Graph()  # upkeep, the changed names that it uses, and the values that it takes or makes
    links.add_nodes_from(sorted(changed))
    users: dict[str, list[int]] = defaultdict(list)  # changed name -> the other nodes that use it
    for node in nodes:
        used = [name for name in (*node.states, *node.parameters) if name in changed]
        if node.index in upkeep:
            values = [("value", value) for value in (*node.inputs, *made_by(node))]
            links.add_edges_from((node.index, other) for other in (*used, *values))
        else:
            for name in used:
                users[name].append(node.index)
    found = []
    for part in networkx.connected_components(links):
        names = sorted(name for name in part if isinstance(name, str))
        free = sorted(index for index in part if isinstance(index, int))
        fixed = sorted(index for name in names for index in users[name])
        if fixed:
            found.append(PinnedNodes(names[0], fixed[0], max([fixed[-1], *free]), tuple(free)))
        elif names:  # unused in this step: the nodes stay where they are
            found.append(PinnedNodes(names[0], free[0], free[-1]))
    return found


def _upkeep(nodes: Sequence[Node], observed: frozenset[int]) -> set[int]:
    """Return the nodes that depend on parameters and buffers alone, and serve only to change some."""
    makers: dict[int, list[int]] = defaultdict(list)
    users: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        for value in made_by(node):
            makers[value].append(node.index)
        for value in node.inputs:
            users[value].append(node.index)
    chosen = {node.index for node in nodes if node.entry is not None}
    while True:
        before = len(chosen)
        for node in nodes:
            if not all(maker in chosen for value in node.inputs for maker in makers[value]):
                chosen.discard(node.index)
        for node in reversed(nodes):
            made = set(made_by(node))
            following = {user for value in made for user in users[value] if user > node.index}
            serves = bool(node.changes or following) and following <= chosen and observed.isdisjoint(made)
            if not serves:
                chosen.discard(node.index)
        if len(chosen) == before:
            return chosen


def units_in(nodes: Iterable[Node]) -> frozenset[str]:
    """Return the names of the units that some nodes call."""
    return frozenset(node.name for node in nodes if node.kind == "call")


def made_by(node: Node) -> Iterable[int]:
    """Return the values that a node returns or writes into."""
    return (*(value for value in node.outputs if value >= 0), *(value for _, value, _ in node.writes))
