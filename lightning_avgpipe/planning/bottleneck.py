"""The dynamic program of SPP: stages whose slowest stage or link has the least to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_avgpipe.planning.problem import Problem, Stage

__all__ = ["least_bottlenecks"]

_ROUNDING = 1e-9


class _Rows(NamedTuple):
    """W of the first l units on the first i devices in s stages, for l in a window; one row per size of the last stage.

    Attributes:
        lowest: l of the first column.
        replicas: of the last stage, shape ``(R,)``.
        seconds: W, infinite above the limit, shape ``(R, columns)``.
        begins: the first unit of the last stage, shape ``(R, columns)``.
        before: replicas of the stage before it, shape ``(R, columns)``.
    """

    lowest: int
    replicas: np.ndarray
    seconds: np.ndarray
    begins: np.ndarray
    before: np.ndarray


def least_bottlenecks(problem: Problem, limit_s: float, most_stages: int) -> dict[int, list[Stage]]:
    """For each number of stages the plan with the least W, where that is at most ``limit_s``.

    ``W(l, s, r, i) = min over l', r' of max(W(l', s-1, r', i-r), M transfer, M work / r + all-reduce)``, of the first l
    units on the first i devices. Only l are looked at whose units the i devices, and the units after them the others,
    can work off within the limit; where the limit is close to evenly shared work, these are few.
    """
    units, devices = problem.costs.num_units, len(problem.network)
    work, limit_s = problem.num_microbatches * problem.costs.busy_s, limit_s * (1 + _ROUNDING)
    windows = [
        np.arange(
            max(1, int(np.searchsorted(work, work[-1] - limit_s * (devices - i)))) if i < devices else units,
            int(np.searchsorted(work, limit_s * i, side="right")),
        )
        for i in range(devices + 1)
    ]
    tables: list[dict[int, _Rows]] = [{}]
    for i in range(1, devices + 1):
        nothing = np.zeros((1, len(windows[i])), int)
        seconds = _work_s(problem, np.zeros(1, int), windows[i], 0, i)
        _keep(tables[0], i, windows[i], [(i, seconds[0], nothing[0], nothing[0])], limit_s)
    for num_stages in range(2, most_stages + 1):
        tables.append({})
        for i in range(num_stages, devices + 1):
            if len(windows[i]):
                sizes = [r for r in range(1, i - num_stages + 2) if i - r in tables[-2]]
                rows = [(r, *_extended(problem, tables[-2][i - r], i - r, i, windows[i], limit_s)) for r in sizes]
                _keep(tables[-1], i, windows[i], rows, limit_s)
    found = {s: _traced_back(problem, tables[:s]) for s in range(1, most_stages + 1)}
    return {s: stages for s, stages in found.items() if stages is not None}


def _keep(
    table: dict[int, _Rows],
    i: int,
    window: np.ndarray,
    rows: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray]],
    limit_s: float,
) -> None:
    rows = [row for row in rows if row[1].min(initial=math.inf) <= limit_s]
    if rows:
        replicas, seconds, begins, before = map(np.array, zip(*rows, strict=True))
        table[i] = _Rows(int(window[0]), replicas, np.where(seconds <= limit_s, seconds, math.inf), begins, before)


def _work_s(problem: Problem, begins: np.ndarray, ends: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Seconds of a stage with the units from each of ``begins`` to each of ``ends``; infinite where it does not fit."""
    costs = problem.costs
    total = problem.num_microbatches * costs.busy_s / (stop - first)
    total = total + problem.reduce_s_per_byte(first, stop) * costs.parameters
    seconds = total[ends] - total[begins][:, None]
    seconds[begins[:, None] >= ends] = math.inf
    if problem.memory_limit is not None:
        seconds[costs.parameters[ends] - costs.parameters[begins][:, None] > problem.memory_limit] = math.inf
    return seconds


def _extended(
    problem: Problem, rows: _Rows, first: int, i: int, window: np.ndarray, limit_s: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plans with one more stage, on the devices ``first .. i-1``: their W, where it begins, replicas before it."""
    network, count = problem.network, problem.num_microbatches
    cuts = slice(rows.lowest - 1, rows.lowest - 1 + rows.seconds.shape[1])
    pairs = rows.replicas * (i - first)
    there, back = problem.costs.messages[:, cuts]
    transfer_s = np.maximum(
        there * (count / (pairs * network.forward[first - rows.replicas, first, i]))[:, None],
        back * (count / (pairs * network.backward[first - rows.replicas, first, i]))[:, None],
    )
    arrivals_s = np.maximum(rows.seconds, transfer_s)
    choice = arrivals_s.argmin(axis=0)
    arrival_s = arrivals_s[choice, np.arange(len(choice))]
    possible = np.flatnonzero(arrival_s <= limit_s)
    if not len(possible):
        return np.full(len(window), math.inf), window, window
    begins = possible + rows.lowest
    seconds = np.maximum(arrival_s[possible][:, None], _work_s(problem, begins, window, first, i))
    best = seconds.argmin(axis=0)
    return seconds[best, np.arange(len(window))], begins[best], rows.replicas[choice[possible[best]]]


def _traced_back(problem: Problem, tables: Sequence[Mapping[int, _Rows]]) -> list[Stage] | None:
    """The stages of the plan with the least W for all units on all devices; None if there is none."""
    end, i = problem.costs.num_units, len(problem.network)
    if i not in tables[-1]:
        return None
    last = tables[-1][i]
    row = int(last.seconds[:, end - last.lowest].argmin())
    stages: list[Stage] = []
    for rows in reversed(tables):
        at = rows[i], end - rows[i].lowest
        replicas, begin = int(at[0].replicas[row]), int(at[0].begins[row, at[1]])
        stages.append(Stage(begin, end, i - replicas, i))
        before, end, i = int(at[0].before[row, at[1]]), begin, i - replicas
        if begin:
            row = int(np.flatnonzero(tables[len(tables) - len(stages) - 1][i].replicas == before)[0])
    return stages[::-1]
