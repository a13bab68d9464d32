"""Find upkeep: glue that computes weights from weights only, such as the update of a momentum encoder.

::

    program      update teacher | student ............... | teacher ... loss
    stage 0      (passes by)      student
    stage 1      update teacher | (skipped)                 teacher ... loss

In program order, upkeep and all nodes up to the use of the changed weights would have to be on one stage. But upkeep
needs nothing that a stage computes, so the stage that uses the changed weights executes it, wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from networkx.utils import UnionFind

if TYPE_CHECKING:
    from lightning_avgpipe.capture.graph import Node


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


def spans(nodes: Sequence[Node], kept: Iterable[int]) -> list[PinnedNodes]:
    """Return the spans of nodes that use what the step changes.

    Args:
        nodes: nodes of the step, in program order.
        kept: values that the result needs.
    """
    changed = {name for node in nodes for name in node.states}
    upkeep = _upkeep(nodes, frozenset(kept))
    sets: Any = UnionFind()  # sets of nodes, names and values that belong together
    for node in nodes:
        used = [name for name in dict.fromkeys((*node.states, *node.parameters)) if name in changed]
        if node.index in upkeep:
            for name in used:
                sets.union(("node", node.index), ("name", name))
            for value in (*node.inputs, *made_by(node)):
                sets.union(("node", node.index), ("value", value))
    users: dict[object, list[int]] = defaultdict(list)
    movable: dict[object, list[int]] = defaultdict(list)
    names: dict[object, str] = {}
    for node in nodes:
        if node.index in upkeep:
            movable[sets["node", node.index]].append(node.index)
            continue
        for name in (*node.states, *node.parameters):
            if name in changed:
                users[sets["name", name]].append(node.index)
    for name in sorted(changed):
        names.setdefault(sets["name", name], name)
    found = []
    for root, name in names.items():
        fixed, free = users[root], movable[root]
        if fixed:
            found.append(PinnedNodes(name, fixed[0], max([fixed[-1], *free]), tuple(free)))
        else:  # unused in this step: the nodes stay where they are
            found.append(PinnedNodes(name, free[0], free[-1]))
    return found


def _upkeep(nodes: Sequence[Node], kept: frozenset[int]) -> set[int]:
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
            serves = bool(node.changes or following) and following <= chosen and kept.isdisjoint(made)
            if not serves:
                chosen.discard(node.index)
        if len(chosen) == before:
            return chosen


def made_by(node: Node) -> Iterable[int]:
    """Return the values that a node returns or writes into."""
    return (*(value for value in node.outputs if value >= 0), *(value for _, value, _ in node.writes))
