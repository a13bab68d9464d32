"""Values that steps keep for the next batch, besides weights and buffers. They do not move between processes."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.utils.names import joined, nearest

Key = tuple[str, str]  # path of a module and name of the attribute; or an empty path and the full name of a variable


def check_movable(before: Plan, after: Plan, old: StageMap, new: StageMap, models: int) -> None:
    """Check that a step reads the same attributes after a relocation as without one.

    The last stage, which never moves, has the right values of attributes that code between units assigns; a process has
    those that its own units assign. With several models each has its own values, which only its stages have.

    Args:
        before: plan that training has run with.
        after: next plan, of the same step.
        old: stage map of the plan before.
        new: stage map of the next plan.
        models: number of models, N.

    Raises:
        ConfigurationError: attributes would have other values; the message names them.
    """
    found = sorted({joined(*key) for key in _staying(before, after, old, new, models)})
    if found:
        raise ConfigurationError(
            f"{before.graph.step} keeps {', '.join(map(repr, found))} for the next batch, which would not move with "
            "its stage to another process or model. Keep it in a buffer (register_buffer), or leave num_stages and "
            "split_points as they are while training runs"
        )


def _staying(before: Plan, after: Plan, old: StageMap, new: StageMap, models: int) -> Iterator[Key]:
    for plan in (before, after):
        graph, last = plan.graph, plan.cuts[-1] if plan.cuts else 0
        early = {key for key, position in graph.reads if models > 1 or (old.group_size > 1 and position <= last)}
        yield from early.intersection((*graph.attributes, *(key for key, _ in graph.holders)))
    for key in {*before.graph.of_units, *before.graph.written}:
        if models > 1 or _ranks(before, key[0], old) != _ranks(after, key[0], new):
            yield key


def _ranks(plan: Plan, path: str, stage_map: StageMap) -> set[int]:
    """Return the ranks that host a module: those of its unit, or of all units in it. An empty path is all units."""
    stages_of = plan.stages_of
    above = nearest(path, stages_of)
    names = [above] if above else [n for n in stages_of if n.startswith(f"{path}.") or not path]
    return {stage_map.owner(stage) for name in names for stage in stages_of[name]}
