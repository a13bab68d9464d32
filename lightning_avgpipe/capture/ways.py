"""Ways: what a step calls where chance leaves out some of its submodules (LayerDrop)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError, SkippedStepError
from lightning_avgpipe.utils.random_streams import host_stream, stream

_log = logging.getLogger(__name__)

# So often a step is followed to find one way that all others are parts of, and so often to see whether it is chance.
_MOST, _FEWEST = 48, 6

Run = Callable[..., Any]


def fullest(
    graph: CallGraph, run: Run, module: nn.Module, device: torch.device, follow: Callable[[Run], CallGraph]
) -> tuple[CallGraph, Run]:
    """The call graph of the way on which chance leaves out least, and what executes the step that way.

    Stages are those of one way. A micro-batch may take another that leaves out some of its calls.

    Args:
        graph: of the step as it ran.
        run: executes the step.
        module: whose submodules are called.
        device: where it computes.
        follow: captures the call graph of such a function.
    Raises:
        PartitionError: some submodules were called at times, but never all of them at once.
    """
    ways = [(graph, run)]
    if not _left_out(graph, module):
        return graph, run
    for seed in range(_MOST):
        other = partial(_seeded, run, seed, device)
        with contextlib.suppress(SkippedStepError):
            ways.append((follow(other), other))
        always = frozenset.intersection(*(_left_out(way, module) for way, _ in ways))
        best = min(ways, key=lambda way: len(_left_out(way[0], module)))
        missing = _left_out(best[0], module) - always
        if len(ways) >= _FEWEST and not missing:
            _log.debug("%s was followed on %d ways", graph.step, len(ways))
            return best
    raise PartitionError(
        f"{graph.step} leaves out submodules by chance, and none of the {len(ways)} times that it was followed did it "
        f"call all of them at once, as is needed to divide it: {', '.join(sorted(missing))} did not run when most did; "
        "make it less likely that they are left out, or train on one stage"
    )


def _left_out(graph: CallGraph, module: nn.Module) -> frozenset[str]:
    """The submodules that were not called where a neighbour of the same kind was, if the step draws random numbers."""
    if not _is_chance(graph, module):
        return frozenset()
    kinds = {path: type(inner) for path, inner in module.named_modules()}
    called = {(path.rpartition(".")[0], kind) for path, kind in kinds.items() if path not in graph.uncalled}
    return frozenset(path for path in graph.uncalled if (path.rpartition(".")[0], kinds[path]) in called)


def may_draw(graph: CallGraph, module: nn.Module) -> frozenset[str]:
    """Paths of the modules that drew from torch's generators, or may have if chance had not left them out."""
    if not _is_chance(graph, module) or not graph.uncalled:
        return graph.drawing
    return graph.drawing | graph.host_drawing | graph.uncalled


def _is_chance(graph: CallGraph, module: nn.Module) -> bool:
    """Whether chance may choose what is called: code that calls submodules draws random numbers."""
    drawing = graph.drawing | graph.host_drawing
    return any(not path or any(True for _ in module.get_submodule(path).children()) for path in drawing)


def _seeded(run: Run, seed: int, device: torch.device, *args: Any) -> Any:
    with _streams(seed, device):
        return run(*args)


@contextlib.contextmanager
def _streams(seed: int, device: torch.device) -> Iterator[None]:
    with stream(seed, device), host_stream(seed):
        yield
