"""Stages by size: division of a module by the memory of its parameters, if the order of calls is not known."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.memory import Need, nbytes
from lightning_avgpipe.planning.plan import Plan, StagePlan, first_to_last
from lightning_avgpipe.utils.names import is_within, joined, table

_ABOVE_BEST = 1.2  # largest stage allowed, relative to the smallest possible one, to keep modules in one piece


@dataclass(frozen=True)
class SizePlan(Plan):
    """A plan that only assigns parameters and buffers to stages; the order of calls is not known."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("stage", "units", "parameters", "memory")]
        for stage in self.stages:
            shown = (stage.index, first_to_last(stage.units), stage.num_parameters, nbytes(stage.memory.persistent))
            rows.append(tuple(map(str, shown)))
        return "\n".join(table(rows))


def divide_by_size(
    module: nn.Module,
    num_stages: int,
    held: Mapping[str, int],
    split_points: Sequence[str] | None = None,
    limit: float = math.inf,
    ignore: Collection[nn.Module] = (),
) -> SizePlan:
    """Assign the submodules with parameters to stages, in the order in which they were registered.

    The largest stage is as small as possible, or up to a fifth larger if that keeps larger modules in one piece.
    Modules that share a parameter are on the same stage. If the children of a module are on several stages, no stage
    owns the parameters of the module itself, and all processes keep them.

    Args:
        module: module to divide.
        num_stages: number of stages, K.
        held: bytes of weight, gradient and optimizer state of each parameter, by full name.
        split_points: names of the submodules at which the stages after the first begin; None balances the stages.
        limit: most bytes that a stage may use.
        ignore: modules that only observe (metrics), which no stage owns.
    Raises:
        PartitionError: too few modules have parameters, a split point names no submodule with parameters, or a stage
            exceeds the limit.
    """
    parts = list(_parts(module, ignore))
    names = [path for path, _ in parts]
    if len(parts) < num_stages:
        raise PartitionError(
            f"num_stages={num_stages}, but only {len(parts)} submodules of {type(module).__name__} have parameters: "
            f"{', '.join(names) or 'none'}; use fewer devices"
        )
    canonical = {id(p): name for name, p in module.named_parameters()}
    seen: dict[int, int] = {}
    weights = []
    for number, (_, part) in enumerate(parts):
        new = [p for p in part.parameters(recurse=_is_atom(part)) if seen.setdefault(id(p), number) == number]
        weights.append(sum(held[canonical[id(p)]] for p in new))
    cuts = _cuts_at(names, split_points, num_stages) if split_points is not None else _cuts(names, weights, num_stages)
    bounds = [0, *cuts, len(parts)]
    stage_of = [k for k in range(num_stages) for _ in range(bounds[k], bounds[k + 1])]
    for number, (_, part) in enumerate(parts):  # modules that share a parameter go to the stage of the first one
        shared = [seen[id(p)] for p in part.parameters(recurse=_is_atom(part))]
        stage_of[number] = stage_of[min(shared, default=number)]
    return _plan(module, num_stages, dict(zip(names, stage_of, strict=True)), held, limit)


def _is_atom(part: nn.Module) -> bool:
    """Return whether a module itself uses the parameters of its children, so that it cannot be divided."""
    return isinstance(part, nn.MultiheadAttention)


def _parts(module: nn.Module, ignore: Collection[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below the root that have parameters, and no children with parameters."""
    for name, child in module.named_children():
        full = joined(path, name)
        if any(child is other for other in ignore):
            continue
        below = list(_parts(child, ignore, full)) if not _is_atom(child) else []
        if below:
            yield from below
        elif any(True for _ in child.parameters()):
            yield full, child


def _cuts(names: Sequence[str], weights: Sequence[int], num_stages: int) -> list[int]:
    """Return the cuts between stages that divide the fewest modules while the largest stage is near its optimum."""
    count = len(names)
    sums = [0, *itertools.accumulate(weights)]
    limit = _smallest_limit(weights, num_stages) * _ABOVE_BEST
    depths = [0, *(_common(a, b) for a, b in itertools.pairwise(names)), 0]
    # for each possible end of a stage: the least sum of the depths of cuts so far, and where that stage begins
    best: list[list[tuple[float, int]]] = [[(0.0 if j == 0 else math.inf, 0) for j in range(count + 1)]]
    for _ in range(num_stages):
        before = best[-1]
        best.append(
            [
                min(
                    ((before[i][0] + depths[j], i) for i in range(bisect_left(sums, sums[j] - limit), j)),
                    default=(math.inf, 0),
                )
                for j in range(count + 1)
            ]
        )
    cuts, end = [], count
    for row in reversed(best[2:]):
        end = row[end][1]
        cuts.append(end)
    return cuts[::-1]


def _smallest_limit(weights: Sequence[int], num_stages: int) -> int:
    """Return the smallest size that the largest stage can have."""

    def suffices(limit: int) -> bool:
        stages, size = 1, 0
        for weight in weights:
            if size + weight > limit:
                stages, size = stages + 1, 0
            size += weight
        return stages <= num_stages

    return max(weights) + bisect_left(range(max(weights), sum(weights)), True, key=suffices)


def _common(one: str, other: str) -> int:
    """Return how many ancestors two modules have in common, by their names."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _cuts_at(names: Sequence[str], split_points: Sequence[str], num_stages: int) -> list[int]:
    cuts = []
    for point in split_points:
        found = next((i for i, name in enumerate(names) if is_within(name, point)), None)
        if found is None:
            raise PartitionError(
                f"split point {point!r} is not a submodule with parameters; there are {', '.join(names)}"
            )
        cuts.append(found)
    if len(cuts) != num_stages - 1 or sorted({0, *cuts}) != [0, *cuts]:
        raise PartitionError(
            f"split_points={list(split_points)} must name {num_stages - 1} submodules in the order in which they are "
            f"registered, and not the first: {', '.join(names)}"
        )
    return cuts


def _plan(
    module: nn.Module, num_stages: int, stage_of: Mapping[str, int], held: Mapping[str, int], limit: float
) -> SizePlan:
    """Make the plan. A module whose parts are all on one stage belongs to it as a whole."""
    canonical = {id(p): name for name, p in module.named_parameters()}
    buffers = {id(b): name for name, b in module.named_buffers()}
    owner: dict[str, int] = {}
    units: list[list[str]] = [[] for _ in range(num_stages)]
    visited: set[str] = set()
    for path, part in module.named_modules():
        if not path or any(path.startswith(f"{above}.") for above in visited):
            continue
        stages = {stage for name, stage in stage_of.items() if is_within(name, path)}
        if len(stages) != 1:
            continue
        visited.add(path)
        stage = stages.pop()
        units[stage].append(path)
        owner |= {canonical[id(p)]: owner.get(canonical[id(p)], stage) for p in part.parameters()}
        owner |= {buffers[id(b)]: owner.get(buffers[id(b)], stage) for b in part.buffers() if id(b) in buffers}
    parameters = [[name for name in canonical.values() if owner.get(name) == k] for k in range(num_stages)]
    states = [[name for name in buffers.values() if owner.get(name) == k] for k in range(num_stages)]
    needs = [sum(held[name] for name in names) for names in parameters]
    total = sum(needs) or 1
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    for k, need in enumerate(needs):
        if need > limit:
            raise PartitionError(
                f"stage {k} needs {nbytes(need)} for weights, gradients and optimizer state, more than memory_limit "
                f"({nbytes(limit)}); use more devices"
            )
    stages_ = tuple(
        StagePlan(
            k, tuple(units[k]), tuple(parameters[k]), tuple(states[k]), sum(sizes[name] for name in parameters[k]),
            needs[k] / total, 0.0, 0.0, Need(needs[k], 0, 0), (),
        )
        for k in range(num_stages)
    )  # fmt: skip
    everything = tuple(path for paths in units for path in paths)
    return SizePlan(stages_, (0,) * (num_stages - 1), CallGraph("", (), (), frozenset(), everything, frozenset()))
