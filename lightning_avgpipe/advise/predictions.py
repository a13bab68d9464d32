"""Predictions of the time of a batch with ddp, one pipeline and parallel models, and of the memory of stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.costs import UnitCosts, all_reduce_s
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.planning.ranges import evenest, least_bottleneck
from lightning_avgpipe.schedule import StageCosts, build, simulate
from lightning_avgpipe.tuning.search import samples_at
from lightning_avgpipe.utils.names import table

MEMORY_SCHEDULE = "1f1b"
"""The schedule for which memory is predicted. Advance forward propagation needs as much, plus what an advance adds."""

_BYTES_PER_S = 1e6 / 8  # of a megabit per second
_SETTINGS = (("1f1b", 0), ("advance_forward", 1), ("advance_forward", 2), ("advance_forward", 3))  # and their advance
_MODELS = (2, 4)
_ITERATIONS = 8  # iterations that are simulated if models roll


@dataclass(frozen=True)
class Alternative:
    """One way to train on some devices.

    Attributes:
        batch_s: seconds per batch, times the factor by which parallel models need more samples.
        strategy: strategy as code for a Trainer: ``"ddp"`` or ``AvgPipeStrategy(...)``.
    """

    batch_s: float
    strategy: str


def alternatives(units: UnitCosts, num_microbatches: int, devices: int, megabits: float) -> list[Alternative]:
    """Return all considered ways to train, the fastest first.

    ddp splits a batch over all devices, and overlaps its all-reduce with the backward. A pipeline has K stages and a
    replica for each K devices; replicas all-reduce when they have drained. The links between any two devices have the
    same rate in both directions. Memory and the time of optimizers are ignored.

    Args:
        units: costs of the units for one micro-batch, see :attr:`lightning_avgpipe.planning.plan.Plan.units`.
        num_microbatches: M, number of micro-batches of a batch.
        devices: D, number of devices.
        megabits: rate of a link in megabits per second.
    """
    rate = megabits * _BYTES_PER_S
    found = [Alternative(_ddp_s(units, num_microbatches, devices, rate), '"ddp"')]
    for stages in range(2, min(devices, units.num_units) + 1):
        copies = devices // stages
        if devices % stages == 0 and num_microbatches % copies == 0:
            found += _pipelines(units, num_microbatches // copies, stages, copies, rate)
    return sorted(found, key=lambda way: way.batch_s)


def _ddp_s(units: UnitCosts, num_microbatches: int, devices: int, rate: float) -> float:
    part = num_microbatches / devices
    reduce_s = all_reduce_s(float(units.parameters[-1]), devices, rate)
    return part * float(units.busy_s[-1]) + max(0.0, reduce_s - part * sum(units.backward_s))


def _pipelines(units: UnitCosts, num_microbatches: int, stages: int, copies: int, rate: float) -> Iterator[Alternative]:
    bounds = _even(units, stages)
    costs = _stage_costs(units, bounds, rate)
    heaviest = max(sum(units.parameter_bytes[a:b]) for a, b in bounds)
    reduce_s = all_reduce_s(heaviest, copies, rate)
    options = f"num_stages={stages}" + (f", replicas={copies}" if copies > 1 else "")
    for models, (name, h) in itertools.product((1, *_MODELS), _SETTINGS):
        chosen = f'schedule="{name}"' + (f", advance={h}" if h else "")
        several = f", num_pipelines={models}" if models > 1 else ""
        timeline = simulate([build(name, stages, num_microbatches, h)] * models, costs)
        seconds = (timeline.iteration_s / models + reduce_s) * samples_at(None, models)
        yield Alternative(seconds, f"AvgPipeStrategy({options}{several}, {chosen})")
        part = num_microbatches // models
        if models > 1 and copies == 1 and num_microbatches % models == 0:  # they may also divide each batch, and roll
            timeline = simulate([build(name, stages, part, h)] * models, costs, iterations=_ITERATIONS)
            seconds = timeline.steady_s * samples_at(None, models, rolling=True, split=True)
            how = f"averaging=Averaging(rolling=True, split_batches=True), num_microbatches={part}"
            yield Alternative(seconds, f"AvgPipeStrategy({options}{several}, {how}, {chosen})")


def _even(units: UnitCosts, stages: int) -> list[tuple[int, int]]:
    """Return the units of each stage, ``a .. b-1``, for stages of about equal time."""
    points = np.arange(units.num_units + 1)
    work = np.where(points[:, None] < points, units.busy_s[None, :] - units.busy_s[:, None], np.inf)
    each, free = [work] * stages, np.zeros((stages - 1, len(points)))
    return list(itertools.pairwise((0, *evenest(each, free, least_bottleneck(each, free)), units.num_units)))


def _stage_costs(units: UnitCosts, bounds: Sequence[tuple[int, int]], rate: float) -> StageCosts:
    return StageCosts(
        [sum(units.forward_s[a:b]) for a, b in bounds],
        [sum(units.backward_s[a:b]) for a, b in bounds],
        [units.bytes_forward[b - 1] / rate for _, b in bounds[:-1]],
        [units.bytes_backward[b - 1] / rate for _, b in bounds[:-1]],
        [0.0] * (len(bounds) - 1),
    )


def advice(units: UnitCosts, num_microbatches: int, devices: Sequence[int], megabits: Sequence[float]) -> str:
    """Return a table with ddp, the best pipeline and the best parallel models for each number of devices and rate."""
    lines = [f"{'devices':>7} {'Mbit/s':>8}  {'batch':>9} {'ddp / it':>8}  strategy"]
    for count in devices:
        for rate in megabits:
            best: dict[str, Alternative] = {}  # of each kind, the fastest first
            for way in alternatives(units, num_microbatches, count, rate):
                best.setdefault(_kind(way), way)
            ddp_s = best["ddp"].batch_s
            for way in best.values():
                lines.append(
                    f"{count:7d} {rate:8g}  {way.batch_s * 1e3:6.1f} ms {ddp_s / way.batch_s:7.2f}x  {way.strategy}"
                )
    if units.num_units == 1:
        lines.append(
            "pipelines are not predicted: no cut leaves all uses of each parameter on one side, as with tied "
            "embeddings; train with stages, whose plan says what is idle"
        )
    return "\n".join(lines)


def _kind(way: Alternative) -> str:
    return "ddp" if way.strategy == '"ddp"' else "models" if "num_pipelines" in way.strategy else "pipeline"


def memory_table(plans: Sequence[Plan], num_microbatches: int, samples: int, models: int) -> str:
    """Return a table with the memory of each stage.

    Args:
        plans: plans for several numbers of stages, one on each device.
        num_microbatches: M, number of micro-batches of a batch.
        samples: number of samples of a micro-batch.
        models: N, number of parallel models.
    """
    rows = [("devices", "stage", "units", "weights, gradients, states", "activations", "together")]
    for plan in plans:
        for stage in plan.stages:
            need = stage.memory
            rows.append((
                str(plan.num_stages) if not stage.index else "", str(stage.index), stage.span, nbytes(need.persistent),
                nbytes(need.stash + need.boundary), nbytes(need.total),
            ))  # fmt: skip
    several = f" of each of {models} models" if models > 1 else ""
    size = f"{samples} sample" + "s" * (samples > 1)
    return "\n".join((
        f"memory of each device, for {num_microbatches} micro-batches of {size}{several} (1F1B):",
        *table(rows),
        "A device also needs what one operation or one recomputed layer takes for a moment, and what its driver takes.",
    ))  # fmt: skip
