"""Costs of nodes, measured or estimated, and of the units between possible cuts."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np

from lightning_avgpipe.capture.cost_cache import CostCache, fingerprint
from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import Samples, UnmeasurableError, measure
from lightning_avgpipe.capture.wire_format import wire_bytes
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.balance import gaps
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.ranges import uses_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Costing:
    """The settings that say how costs are found.

    Attributes:
        kind: ``"measured"``: seconds on the device; ``"flops"``: counted operations.
        cache: cache of measured costs; None: costs are measured every time.
        samples: measurements on this device for earlier plans, which are reused.
        shows: whether a progress bar may appear.
    """

    kind: Literal["measured", "flops"] = "flops"
    cache: CostCache | None = None
    samples: Samples = field(default_factory=Samples, compare=False)
    shows: bool = field(default=True, compare=False)

    def measured(self, subject: Divisible, step: Step, graph: CallGraph) -> Costs:
        """Return the measured costs of a step's units, from the cache if it has them."""
        key, about = fingerprint(graph, subject.module, subject.place)
        costs = self.cache.load(key, len(graph.nodes)) if self.cache is not None else None
        if costs is None:
            begin = time.perf_counter()
            try:
                costs = measure(graph, step.run, step.args, subject.module, subject.place, self.samples, self.shows)
            except UnmeasurableError as error:
                _log.warning("%s: %s; its operations are counted instead, as with costs='flops'", step.name, error)
                return Costs.from_flops(graph)
            _log.info("measured %d nodes of %s in %.1f s", len(graph.nodes), step.name, time.perf_counter() - begin)
            if self.cache is not None:
                self.cache.save(key, costs, about)
        return costs


@dataclass(frozen=True)
class UnitCosts:
    """The costs of the L units of a model, for one micro-batch on one device.

    Attributes:
        forward_s: seconds of the forward of each unit, shape ``(L,)``.
        backward_s: seconds of the backward of each unit, shape ``(L,)``.
        bytes_forward: bytes of activations from each unit to the next, shape ``(L-1,)``.
        bytes_backward: bytes of gradients to each unit from the next, shape ``(L-1,)``.
        parameter_bytes: bytes of the parameters of each unit, shape ``(L,)``.
    Raises:
        PartitionError: no unit, lengths that do not fit together, or a number that is negative or not finite.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    bytes_forward: tuple[float, ...]
    bytes_backward: tuple[float, ...]
    parameter_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        units = self.num_units
        if units == 0:
            raise PartitionError("forward_s has no entries; give one per unit, at least one")
        between = ("bytes_forward", "bytes_backward")
        for name in ("forward_s", "backward_s", "parameter_bytes", *between):
            numbers, length = getattr(self, name), units - (name in between)
            if len(numbers) != length:
                raise PartitionError(f"{name} has {len(numbers)} entries, but needs {length}: forward_s has {units}")
            if not all(0 <= number < math.inf for number in numbers):
                raise PartitionError(f"{name}={list(numbers)}: numbers must be finite and not negative")

    @property
    def num_units(self) -> int:
        """The number of units L."""
        return len(self.forward_s)

    @cached_property
    def busy_s(self) -> np.ndarray:
        """The seconds of the forwards and backwards of the first l units, shape ``(L+1,)``."""
        return np.concatenate([[0.0], np.cumsum(np.add(self.forward_s, self.backward_s))])

    @cached_property
    def parameters(self) -> np.ndarray:
        """The bytes of the parameters of the first l units, shape ``(L+1,)``."""
        return np.concatenate([[0.0], np.cumsum(self.parameter_bytes)])


def all_reduce_s(nbytes: float, devices: int, bytes_per_s: float) -> float:
    """Return the seconds of a ring all-reduce of ``nbytes`` bytes over links of this bandwidth."""
    return 2 * (devices - 1) / devices * nbytes / bytes_per_s


def units_between(graph: CallGraph, costs: Costs, weights: Mapping[str, int]) -> tuple[UnitCosts, tuple[int, ...]]:
    """Return the costs of units between the legal cuts that do not separate uses of one parameter, and these cuts.

    Args:
        graph: call graph of the step.
        costs: costs of its nodes.
        weights: full name of each parameter -> its bytes.
    """
    uses = uses_of(graph)
    spans = [(min(found), max(found)) for found in uses.values()]
    legal = [gap.position for gap in gaps(graph) if gap.obstacle is None]
    cuts = tuple(p for p in legal if not any(first < p <= last for first, last in spans))
    bounds = list(itertools.pairwise((0, *cuts, len(graph.nodes))))
    size = partial(wire_bytes, wire=costs.planning_format)
    sent = graph.crossing(size)
    gradients = [[graph.values[v] for v in graph.live(p) if graph.values[v].requires_grad] for p in cuts]
    held = [sum(weights.get(n, 0) for n, found in uses.items() if a <= min(found) < b) for a, b in bounds]
    return UnitCosts(
        tuple(sum(costs.forward[a:b]) for a, b in bounds),
        tuple(sum(costs.backward[a:b]) for a, b in bounds),
        tuple(float(sent[p]) for p in cuts),
        tuple(float(sum(size(value) for value in values)) for values in gradients),
        tuple(map(float, held)),
    ), cuts
