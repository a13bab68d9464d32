"""A backward in two halves: the gradients that the stage before waits for, and later those of the weights.

::

    root --- u2 --- u1 --- gate       input half: runs u2, u1 for what leads to gates, and keeps the gradients that
              |      |                            came into them
              W2     W1               weight half: runs u2, u1 once more, for what leads to weights

A node of autograd's graph computes what is asked of it, so nothing is computed twice, and with the same operations as
in a whole backward: as every weight's gradient comes in one piece, weights are equal bit for bit. Some gradients come
in the first half already, where they are summed as always: of a weight that several nodes use (a layer that is called
twice, the recurrent weights of an LSTM). What nothing leads from to a gate, as on the first stage, is left to the
second half.

A graph is not split where a part of it would run, or be looked at, twice: one with functions of Python (a compiled
module, a reentrant checkpoint), hooks on values, or hooks on what is saved (a checkpoint).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from lightning_avgpipe.engine.stash import Stash

_log = logging.getLogger(__name__)
_Gradients = Sequence[Tensor | None]
_TENSORS_ONLY = f"torch {torch.__version__}, whose backwards begin at tensors only"


class WeightHalf:
    """What is left of a backward: for each node that it starts from, what came into it, and the weights behind."""

    def __init__(self) -> None:
        self._left: list[tuple[Node, list[Tensor]]] = []
        self._arrived: dict[Node, _Gradients] = {}
        self._roots: tuple[list[Tensor], list[Tensor | None], list[Tensor]] | None = None

    def run(self) -> None:
        """Accumulate the gradients of the weights. What a node has kept is free when it has run."""
        if self._roots is not None:
            roots, gradients, weights = self._roots
            self._roots = None
            torch.autograd.backward(roots, gradients, inputs=weights)
        self._left.reverse()
        while self._left:
            node, weights = self._left.pop()
            came = [(i, g) for i, g in enumerate(self._arrived.pop(node, ())) if g is not None]
            if came:
                edges = [GradientEdge(node, i) for i, _ in came]
                torch.autograd.backward(edges, [gradient for _, gradient in came], inputs=weights)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Within this context what comes into the nodes is kept."""

        def keep(node: Node, gradients: _Gradients) -> None:
            self._arrived[node] = gradients

        handles = [node.register_prehook(functools.partial(keep, node)) for node, _ in self._left]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def input_half(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], entries: Sequence[Tensor]
) -> WeightHalf | str:
    """Run the half of a backward that gives the gradients of what a stage has received.

    Args:
        roots: from which the backward starts.
        gradients: of the roots; None for a loss.
        entries: leaves that received values are.
    Returns:
        The other half; or why the graph cannot be split: then nothing has run.
    """
    if not _begins_anywhere():
        return _TENSORS_ONLY
    starts, ends = ([get_gradient_edge(tensor).node for tensor in tensors] for tensors in (roots, entries))
    gates = set(ends)
    order, children = _graph(starts)
    if why := _undivided(order, children, gates):
        return why
    leading: set[Node] = set()  # to a gate
    for node in reversed(order):
        if node in gates or any(child in leading for child in children[node]):
            leading.add(node)
    # of every node that leads to weights only: the node that leads to gates too, and alone leads to this one
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
    now += weights.pop("several", [])
    if late := weights.pop("roots", []):
        pairs = [(r, g) for r, g, node in zip(roots, gradients, starts, strict=True) if node not in leading]
        rest._roots = [r for r, _ in pairs], [g for _, g in pairs], late
    rest._left = [(node, weights[node]) for node in order if node in weights]
    if now:
        with rest._watching():
            torch.autograd.backward(list(roots), list(gradients), inputs=now, retain_graph=True)
    return rest


def why_whole(roots: Sequence[Tensor], entries: Sequence[Tensor]) -> str:
    """Why the graph between roots and entries cannot be split, as far as it shows; empty if it can be."""
    if not _begins_anywhere():
        return _TENSORS_ONLY
    return _undivided(
        *_graph([get_gradient_edge(root).node for root in roots]),
        {get_gradient_edge(entry).node for entry in entries},
    )


def _undivided(order: Sequence[Node], children: Mapping[Node, Sequence[Node]], gates: set[Node]) -> str:
    if any(isinstance(node, BackwardCFunction) and not _enters(children[node], gates) for node in order):
        return "a function of Python (autograd.Function, a compiled module)"
    return ""


def _graph(starts: Sequence[Node]) -> tuple[list[Node], dict[Node, tuple[Node, ...]]]:
    """All nodes, each before those that it leads to, and the nodes that each leads to directly."""
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
    """Whether this version of torch lets a backward begin within a graph."""
    leaf = torch.zeros(1, requires_grad=True)
    with torch.enable_grad(), contextlib.suppress(TypeError, AttributeError, RuntimeError):
        torch.autograd.backward([get_gradient_edge(2 * leaf)], [torch.ones(1)], inputs=[leaf])
    return leaf.grad is not None


def _enters(children: Sequence[Node], gates: set[Node]) -> bool:
    """Whether a node is where a received value enters the step."""
    return len(children) == 1 and children[0] in gates


class Halves:
    """The backwards of one stage, where a schedule wants them in halves.

    Args:
        stage: k.

    Attributes:
        left: micro-batch -> the second half of its backward.
        watch: within which a forward runs; None: backwards run whole.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._said = False  # that they run whole
        self.watch: Watch | None = None
        self.left: dict[int, WeightHalf] = {}

    def begin(self, wanted: bool) -> None:
        """An iteration begins, with such backwards or without."""
        self.watch = Watch() if wanted else None

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Within this context a forward runs; what follows of it within :attr:`watch`, if there is one."""
        self.watch = None if self.watch is None else Watch()
        return self.watch or contextlib.nullcontext()

    def run_first(self, micro_batch: int, stash: Stash, roots: list[Tensor], gradients: list[Tensor | None]) -> bool:
        """The half that the stage before waits for, if there are two: else nothing runs."""
        half = stash.whole or input_half(roots, gradients, [gate.leaf for gate in stash.gates])
        if isinstance(half, WeightHalf):
            self.left[micro_batch] = half
        elif not self._said:
            self._said = True
            _log.warning(
                "stage %d runs backwards whole where the schedule wants their input gradients first: there is %s. The "
                "numbers are the same; what it waits for is as with 1F1B", self._stage, half,
            )  # fmt: skip
        return isinstance(half, WeightHalf)


class Watch:
    """Notes what keeps the graph of a forward from being split; a context, in which the forward runs.

    Attributes:
        found: what it was; empty if there was nothing.
    """

    def __init__(self) -> None:
        self.found = ""

    def __enter__(self) -> None:
        with _lock:
            if not _watching:
                for owner, name, what in _WATCHED:
                    _replaced.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, _noting(getattr(owner, name), what))
            _watching.append((get_ident(), self))

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _watching.remove((get_ident(), self))
            while _replaced and not _watching:
                owner, name, before = _replaced.pop()
                delattr(owner, name) if before is None else setattr(owner, name, before)  # None: it is inherited


_WATCHED = (
    (Tensor, "register_hook", "a hook on a value"),
    (Tensor, "retain_grad", "a value that retains its gradient"),
    # a node does not tell which hooks it has, but whoever puts one on it must have asked for it
    (Tensor, "grad_fn", "a look at the grad_fn of a value, which may have got a hook"),
    (saved_tensors_hooks, "__enter__", "a checkpoint, or other hooks on what is saved for backwards"),
)
_lock = Lock()
_watching: list[tuple[int, Watch]] = []  # by thread
_replaced: list[tuple[type, str, Any]] = []


def _noting(original: Any, what: str) -> Any:
    """In the place of a method, or of a property."""

    def note() -> None:
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
