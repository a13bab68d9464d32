"""Capture steps that leave out submodules at random (LayerDrop), so that all submodules are seen."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError, SkippedStepError
from lightning_avgpipe.utils.names import around
from lightning_avgpipe.utils.random_streams import host_stream, stream

_log = logging.getLogger(__name__)

# The largest number of captures, and of seconds, to find a run that leaves out nothing; and the smallest number of
# captures, which shows whether chance leaves anything out.
_MOST, _LONGEST_S, _FEWEST = 48, 30.0, 6

Run = Callable[..., Any]


class CapturedRun(NamedTuple):
    """A capture of a step that leaves out submodules by chance.

    Attributes:
        graph: call graph of this capture.
        run: executes the step as in this capture.
        missing: paths of submodules that were left out here and called in other captures.
    """

    graph: CallGraph
    run: Run
    missing: frozenset[str] = frozenset()

    def check(self, units: Collection[str]) -> None:
        """Check that missing submodules are inside of units, or beside a called neighbour whose stage is known.

        Raises:
            PartitionError: the stage of a missing submodule is not known.
        """
        free = self.missing - self.graph.position_of_uncalled.keys()
        outside = [path for path in sorted(free) if not any(path.startswith(f"{unit}.") for unit in units)]
        if outside:
            raise PartitionError(
                f"{self.graph.step} leaves out submodules by chance, and no capture of it called all of them, as is "
                f"needed to divide it: {', '.join(outside)} did not run when most did; make it less likely that they "
                "are left out, keep them in one unit with split_points, or train on one stage"
            )


def capture_with_fewest_skips(
    graph: CallGraph, run: Run, module: nn.Module, device: torch.device, follow: Callable[[Run], CallGraph]
) -> CapturedRun:
    """Capture a step repeatedly, and return the capture in which chance left out the fewest submodules.

    The stages are planned from this one capture. A later micro-batch may leave out other calls.

    Args:
        graph: call graph of the step as it ran first.
        run: executes the step.
        module: module whose submodules are called.
        device: device on which it computes.
        follow: captures the call graph of such a function.
    """
    ways, begin = [(graph, run)], time.perf_counter()
    if not skipped_at_random(graph, module):
        return CapturedRun(graph, run)
    for seed in range(_MOST):
        other = partial(_seeded, run, seed, device)
        with contextlib.suppress(SkippedStepError):
            ways.append((follow(other), other))
        always = frozenset.intersection(*(skipped_at_random(way, module) for way, _ in ways))
        best = min(ways, key=lambda way: len(skipped_at_random(way[0], module)))
        found = CapturedRun(*best, skipped_at_random(best[0], module) - always)
        if len(ways) >= _FEWEST and (not found.missing or time.perf_counter() - begin > _LONGEST_S):
            break
    _log.debug("%s was captured %d times, since it leaves out submodules by chance", graph.step, len(ways))
    return found


def skipped_at_random(graph: CallGraph, module: nn.Module) -> frozenset[str]:
    """Return the submodules that chance may have left out.

    These were not called, while a sibling of the same type was, and the code of a module around them draws random
    numbers.
    """
    drawing = graph.drawing | graph.host_drawing
    if "" not in drawing and all(not any(True for _ in module.get_submodule(path).children()) for path in drawing):
        return frozenset()
    kinds = {path: type(inner) for path, inner in module.named_modules()}
    called = {(path.rpartition(".")[0], kind) for path, kind in kinds.items() if path not in graph.uncalled}
    neighbours = (path for path in graph.uncalled if (path.rpartition(".")[0], kinds[path]) in called)
    return frozenset(path for path in neighbours if not drawing.isdisjoint(around(path)))


def may_draw(graph: CallGraph, module: nn.Module) -> frozenset[str]:
    """Return the paths of modules that drew from torch's generators, or may draw when they are not left out."""
    if not skipped_at_random(graph, module):
        return graph.drawing
    return graph.drawing | graph.host_drawing | graph.uncalled


def _seeded(run: Run, seed: int, device: torch.device, *args: Any) -> Any:
    with stream(seed, device), host_stream(seed):
        return run(*args)
