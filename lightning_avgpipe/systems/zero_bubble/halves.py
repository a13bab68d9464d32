"""Split a backward in two: the gradients that the previous stage waits for, and later those of the weights.

::

    root --- u2 --- u1 --- gate       input half: runs u2, u1 for what leads to gates, and keeps the gradients that
              |      |                            came into them
              W2     W1               weight half: runs u2, u1 once more, for what leads to weights

A node of autograd's graph computes only the gradients that are needed. So nothing is computed twice, and the operations
are those of a whole backward. As every weight's gradient is computed in one piece, weights are equal bit for bit. The
gradient of a weight that several nodes use (a layer that is called twice, the recurrent weights of an LSTM) is computed
in the first half, which sums it as usual. Parts of the graph that do not lead to a gate, as on the first stage, are
left to the second half. Micro-batches may use a weight differently (an expert). If a first half would add to its
gradient before an earlier micro-batch has, the second halves that are left run first.

A graph is not split if a part of it would run, or be observed, twice: one with Python functions (a compiled module, a
reentrant checkpoint), hooks on values, or hooks on saved tensors (a checkpoint).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.stage import Stage, StagePart
from lightning_avgpipe.engine.task import Inputs, ReceivedLeaf, Task
from lightning_avgpipe.schedule import FORWARD, Action
from lightning_avgpipe.systems.zero_bubble.schedules import INPUT_GRADIENT, WEIGHT_GRADIENT
from lightning_avgpipe.utils.source import PACKAGE

_log = logging.getLogger(__name__)
_Gradients = Sequence[Tensor | None]
_TENSORS_ONLY = f"torch {torch.__version__}, whose backwards begin at tensors only"


class WeightHalf:
    """The second half of a backward: the nodes from which it starts, their incoming gradients, and their weights."""

    def __init__(self) -> None:
        self._left: list[tuple[Node, list[Tensor]]] = []
        self._arrived: dict[Node, _Gradients] = {}
        self._roots: tuple[list[Tensor], list[Tensor | None], list[Tensor]] | None = None

    def run(self) -> None:
        """Accumulate the gradients of the weights; each node frees its saved tensors when it has run."""
        if self._roots is not None:
            roots, gradients, weights = self._roots
            self._roots = None
            torch.autograd.backward(roots, gradients, inputs=weights)
        self._left.reverse()
        run = torch.autograd.Variable._execution_engine.run_backward
        while self._left:
            node, weights = self._left.pop()
            came = [(i, g) for i, g in enumerate(self._arrived.pop(node, ())) if g is not None]
            if came:
                edges = tuple(GradientEdge(node, i) for i, _ in came)
                # torch.autograd.backward's checks take as long as a small layer
                run(edges, tuple(g for _, g in came), False, False, tuple(weights), True, accumulate_grad=True)

    def waits_for(self, weights: Sequence[Tensor]) -> bool:
        """Return whether it will accumulate the gradient of one of these weights."""
        left = [*(self._roots[2] if self._roots is not None else ()), *(w for _, own in self._left for w in own)]
        return not set(map(id, left)).isdisjoint(map(id, weights))

    def _catch(self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], entries: Sequence[Tensor]) -> None:
        """Run the first half for entries only; the same call, without hooks, returns the nodes' incoming gradients."""
        into = [GradientEdge(node, i) for node, _ in self._left for i in range(len(node._input_metadata))]  # type: ignore[attr-defined]
        wanted: Any = [*entries, *into]
        found = torch.autograd.grad(list(roots), wanted, list(gradients), retain_graph=True, allow_unused=True)
        for entry, gradient in zip(entries, found, strict=False):
            entry.grad = gradient
        for edge, gradient in zip(into, found[len(entries) :], strict=True):
            self._arrived[edge.node] = (*self._arrived.get(edge.node, ()), gradient)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Keep the incoming gradients of the nodes within this context."""

        def keep(node: Node, gradients: _Gradients) -> None:
            self._arrived[node] = gradients

        handles = [node.register_prehook(functools.partial(keep, node)) for node, _ in self._left]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def input_half(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    entries: Sequence[Tensor],
    earlier: Collection[WeightHalf] = (),
) -> WeightHalf | str:
    """Run the half of a backward that computes the gradients of the received values.

    Args:
        roots: tensors from which the backward starts.
        gradients: gradients of the roots; None for a loss.
        entries: leaves that hold the received values.
        earlier: second halves of earlier micro-batches, in their order; they run now if this one would overtake them.
    Returns:
        The second half; or the reason why the graph cannot be split, in which case nothing has run.
    """
    if not _begins_anywhere():
        return _TENSORS_ONLY
    starts, ends = ([get_gradient_edge(tensor).node for tensor in tensors] for tensors in (roots, entries))
    gates = set(ends)
    order, children = _graph(starts)
    functions = (children[node] for node in order if isinstance(node, BackwardCFunction))
    if any(len(after) != 1 or after[0] not in gates for after in functions):  # gates are entered by such a function
        return "a function of Python (autograd.Function, a compiled module)"
    leading: set[Node] = set()  # nodes that lead to a gate
    for node in reversed(order):
        if node in gates or any(child in leading for child in children[node]):
            leading.add(node)
    # node that leads to weights only -> the only node that leads to it and also to a gate, "roots", or "several"
    only: dict[Node, Node | str] = {node: "roots" for node in starts if node not in leading}
    for node in order:
        source: Node | str = node if node in leading else only[node]
        for child in children[node]:
            if child not in leading:
                only[child] = source if only.get(child, source) is source else "several"
    weights: dict[Node | str, list[Tensor]] = {}
    for node, source in only.items():
        if (weight := getattr(node, "variable", None)) is not None:
            weights.setdefault(source, []).append(weight)
    rest, now = WeightHalf(), [entry for entry, node in zip(entries, ends, strict=True) if node in leading]
    shared = weights.pop("several", [])
    if late := weights.pop("roots", []):
        pairs = [(r, g) for r, g, node in zip(roots, gradients, starts, strict=True) if node not in leading]
        rest._roots = [r for r, _ in pairs], [g for _, g in pairs], late
    rest._left = [(node, weights[node]) for node in order if node in weights]
    if shared:
        if any(half.waits_for(shared) for half in earlier):
            _run(earlier)
        with rest._watching():
            torch.autograd.backward(list(roots), list(gradients), inputs=[*now, *shared], retain_graph=True)
    elif now:
        rest._catch(roots, gradients, now)
    return rest


def _run(halves: Iterable[WeightHalf]) -> None:
    for half in halves:
        half.run()


def _graph(starts: Sequence[Node]) -> tuple[list[Node], dict[Node, tuple[Node, ...]]]:
    """Return all nodes in topological order, each before those that it leads to, and the direct children of each."""
    children: dict[Node, tuple[Node, ...]] = {}
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in children:
            children[node] = tuple(child for child, _ in node.next_functions if child is not None)
            stack.append((node, True))
            stack += [(child, False) for child in children[node] if child not in children]
    order.reverse()
    return order, children


@functools.cache
def _begins_anywhere() -> bool:
    """Return whether this version of torch lets a backward begin within a graph."""
    leaf = torch.zeros(1, requires_grad=True, device="cpu")
    with torch.enable_grad(), contextlib.suppress(TypeError, AttributeError, RuntimeError):
        torch.autograd.backward([get_gradient_edge(2 * leaf)], [torch.ones(1, device="cpu")], inputs=[leaf])
    return leaf.grad is not None


class Halves(StagePart):
    """The split backwards of a stage."""

    def __init__(self) -> None:
        self._has_warned = False  # whether the warning about whole backwards was given
        self._splits = False  # whether the backwards of this iteration are split
        self._found: dict[int, str] = {}  # micro-batch -> why its backward cannot be split, as far as its forward shows
        self._left: dict[int, WeightHalf] = {}

    def begin(self, row: Sequence[Action]) -> None:
        """Begin an iteration with this row, which may have split backwards."""
        self._splits = any(action.kind is INPUT_GRADIENT for action in row)

    def clear(self) -> None:
        """Forget everything about unfinished micro-batches."""
        self._left.clear()
        self._found.clear()

    def _forward(self, stage: Stage, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """Run a forward, and note what keeps its graph from being split if its backward is to be."""
        if not self._splits:
            return stage.forward(task, micro_batch, message)
        with GraphWatch() as watch:
            sent = stage.forward(task, micro_batch, message)
        self._found[micro_batch] = watch.found
        return sent

    def _input_gradient(self, stage: Stage, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """Run the half of a backward that the previous stage waits for, or all of it if it cannot be split."""
        whole = self._found.pop(micro_batch, "")
        if isinstance(stage.stash[micro_batch], Inputs):
            whole = "recompute, which would keep all that it repeats until then"

        def run(gates: Sequence[ReceivedLeaf], roots: list[Tensor], gradients: list[Tensor | None]) -> None:
            half = whole or input_half(roots, gradients, [gate.leaf for gate in gates], self._left.values())
            if isinstance(half, WeightHalf):
                self._left[micro_batch] = half
                return
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "stage %d runs backwards whole where the schedule wants their input gradients first: there is %s. "
                    "The numbers are the same; what it waits for is as with 1F1B", stage.program.stage, half,
                )  # fmt: skip
            _run(self._left.values())  # each weight gets the gradients of micro-batches in their order
            torch.autograd.backward(roots, gradients)

        return stage.backward(task, micro_batch, message, run)

    def _weight_gradient(self, stage: Stage, task: Task, micro_batch: int, message: Message | None) -> None:
        """Run the other half of a backward; do nothing if it has run, or had nothing to start from."""
        if (half := self._left.pop(micro_batch, None)) is not None:
            with stage.in_backward(micro_batch):
                half.run()

    handlers = {FORWARD: _forward, INPUT_GRADIENT: _input_gradient, WEIGHT_GRADIENT: _weight_gradient}


class GraphWatch:
    """A context in which a forward runs, and which notes what keeps its graph from being split.

    Attributes:
        found: reason why the graph cannot be split; "" if none was found.
    """

    def __init__(self) -> None:
        self.found = ""

    def __enter__(self) -> GraphWatch:
        with _lock:
            if not _watching:
                for owner, name, what in _WATCHED:
                    _replaced.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, _noting(getattr(owner, name), what))
            _watching.append((get_ident(), self))
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _watching.remove((get_ident(), self))
            while _replaced and not _watching:
                owner, name, before = _replaced.pop()
                delattr(owner, name) if before is None else setattr(owner, name, before)  # None: it is inherited


_WATCHED = (
    (Tensor, "register_hook", "a hook on a value"),
    (Tensor, "retain_grad", "a value that retains its gradient"),
    # the hooks of a node cannot be listed, but code that adds one must read grad_fn
    (Tensor, "grad_fn", "a look at the grad_fn of a value, which may have got a hook"),
    (saved_tensors_hooks, "__enter__", "a checkpoint, or other hooks on what is saved for backwards"),
)
_lock = Lock()
_watching: list[tuple[int, GraphWatch]] = []  # by thread
_replaced: list[tuple[type, str, Any]] = []


def _noting(original: Any, what: str) -> Any:
    """Return a method or property that replaces the original and notes each use but those of this package."""

    def note() -> None:
        if sys._getframe(2).f_code.co_filename.startswith(PACKAGE):
            return
        for thread, watch in _watching:
            if thread == get_ident():
                watch.found = watch.found or what

    def get(owner: Any) -> Any:
        note()
        return original.__get__(owner)

    def noting(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    return functools.wraps(original)(noting) if callable(original) else property(get)
