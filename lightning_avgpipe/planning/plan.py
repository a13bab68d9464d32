"""The plan: stages with their units, parameters and boundaries. Made once, printed once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.capture.graph import CallGraph, Leaf, Value
from lightning_avgpipe.planning.memory import Memory, Need, nbytes
from lightning_avgpipe.planning.ranges import Ranges
from lightning_avgpipe.planning.replicated_costs import SppCosts
from lightning_avgpipe.utils.table import table


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        index: k, 0-based.
        units: paths of the units that it calls, in order of their first call.
        parameters: full names of the parameters that it uses, or may with another batch; of one that other stages use
            too it has a copy.
        states: full names of the buffers that it changes.
        num_parameters: elements of these parameters.
        share: its part of the time of all stages, 0..1.
        forward: time of one micro-batch, divided by the replicas of the stage; seconds if the costs were measured, else
            counted operations.
        backward: the same for the backward, with the forward before it where that is repeated.
        memory: bytes that it needs, estimated.
        sends: values that cross to the next stage; empty for the last.
        leaves: tensors of the batch that it needs.
    """

    index: int
    units: tuple[str, ...]
    parameters: tuple[str, ...]
    states: tuple[str, ...]
    num_parameters: int
    share: float
    forward: float
    backward: float
    memory: Need
    sends: tuple[Value, ...]
    leaves: tuple[Leaf, ...] = ()

    @property
    def boundary_bytes(self) -> int:
        """Bytes that one captured micro-batch sends to the next stage."""
        return sum(value.nbytes for value in self.sends)


@dataclass(frozen=True)
class Forecast:
    """What a simulation of the schedule expects of a plan.

    Attributes:
        schedule: name of the schedule.
        num_microbatches: M.
        iteration_s: time of one batch, without the optimizer's step.
        bubble: the share of all stages' time in which they are idle, 0..1.
    """

    schedule: str
    num_microbatches: int
    iteration_s: float
    bubble: float


@dataclass(frozen=True)
class Plan:
    """Which stage calls and owns what; ``str(plan)`` is a table.

    Attributes:
        stages: K of them.
        cuts: K-1 positions in the graph.
        graph: of the step that decided.
        measured: whether times are measured seconds, not counted operations.
        forecast: None if no schedule was given.
        links: of the hops, shape ``(K-1,)``, in the unit of the stages' times.
        note: why the stages are not even; empty if they are.
        frozen: nodes, from the first, whose outputs are kept from epoch to epoch; their forwards take no time.
        devices: ranks of the processes of each stage; empty: those of the stage map.
        whole: stage -> why it runs its backwards whole, although the schedule splits them.
        units: what the units cost between which it could be cut, if they were measured.
        advised: stages of each of more groups, which would train more batches in the same time; None: there are none.
    """

    stages: tuple[StagePlan, ...]
    cuts: tuple[int, ...]
    graph: CallGraph = field(repr=False)
    measured: bool = False
    forecast: Forecast | None = None
    links: tuple[Link, ...] = ()
    note: str = ""
    frozen: int = 0
    devices: tuple[tuple[int, ...], ...] = ()
    whole: Mapping[int, str] = field(default_factory=dict)
    units: SppCosts | None = field(default=None, repr=False)
    advised: int | None = None

    @property
    def slowest(self) -> StagePlan:
        """The stage that takes the largest part of the time."""
        return max(self.stages, key=lambda stage: stage.share)

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.stages)

    @cached_property
    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """Unit, parameter or changed buffer -> its stages, ascending; the first one is the owner.

        What is missing is used by no stage, and kept by all.
        """
        found: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for name in (*stage.units, *stage.parameters, *stage.states):
                found[name] = (*found.get(name, ()), stage.index)
        return found

    @cached_property
    def copied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages use, each on a copy of its own -> these stages."""
        names = {name for stage in self.stages for name in stage.parameters}
        return {name: stages for name, stages in self.stages_of.items() if name in names and len(stages) > 1}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("stage", "units", "parameters", "time", "memory", "sends to the next")]
        rows += [self._row(stage) for stage in self.stages]
        if self.devices:
            placed = ["ranks", *(", ".join(map(str, ranks)) for ranks in self.devices)]
            rows = [(*row, ranks) for row, ranks in zip(rows, placed, strict=True)]
        shown = [i for i in range(len(rows[0])) if i != 4 or self.measured]  # the counted one leaves too much out
        lines = [*table([[row[i] for i in shown] for row in rows]), *self._copies(), *self._batch()]
        lines += [f"stage {k} runs its backwards whole: there is {why}" for k, why in self.whole.items()]
        if self.forecast is not None:
            lines.append(self._expectation(self.forecast))
        return "\n".join(lines)

    def _batch(self) -> list[str]:
        parts = [
            f"{', '.join(leaf.name for leaf in stage.leaves) or 'nothing'} "
            f"({nbytes(sum(leaf.nbytes for leaf in stage.leaves))}) for stage {stage.index}"
            for stage in self.stages
        ]
        return [f"of each micro-batch: {'; '.join(parts)}"] if self.graph.leaves else []

    def _copies(self) -> list[str]:
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.copied.items():
            by_stages.setdefault(stages, []).append(name)
        return [
            f"copied: {first_to_last(names)} on stages {', '.join(map(str, stages))}; their gradients are summed"
            for stages, names in by_stages.items()
        ]

    def _row(self, stage: StagePlan) -> tuple[str, ...]:
        values = "value" if len(stage.sends) == 1 else "values"
        sends = f"{len(stage.sends)} {values}, {nbytes(stage.boundary_bytes)} a micro-batch"
        shown = format_seconds(stage.forward + stage.backward)
        return (
            str(stage.index),
            first_to_last(stage.units),
            _count(stage.num_parameters),
            f"{shown} ({stage.share:.0%})" if self.measured else f"{stage.share:.0%}",
            nbytes(stage.memory.total),
            "-" if stage is self.stages[-1] else sends,
        )

    def _expectation(self, forecast: Forecast) -> str:
        time = f"{format_seconds(forecast.iteration_s)} an iteration, " if self.measured else ""
        count = forecast.num_microbatches
        batches = f"{count} micro-batch" + ("es" if count > 1 else "")
        return f"expected: {time}{forecast.bubble:.0%} idle ({forecast.schedule}, {batches})"


def make_plan(
    graph: CallGraph,
    cuts: Sequence[int],
    costs: Costs,
    sizes: Mapping[str, int],
    memory: Memory | None = None,
    replicas: Sequence[int] = (),
) -> Plan:
    """Describe the stages between the cuts.

    Args:
        graph: of the step function that decides, in training ``training_step``.
        cuts: K-1 increasing positions.
        costs: for the time shares.
        sizes: full name of each parameter -> number of elements.
        memory: for what the stages need of it.
        replicas: of each stage, over which its time is divided; empty: one of each.
    """
    bounds = [0, *cuts, len(graph.nodes)]
    memory = memory or Memory()
    ranges = Ranges.of(graph, costs, bounds, len(bounds) - 1, memory)
    forward = [sum(costs.forward[start:end]) for start, end in itertools.pairwise(bounds)]
    backward = [sum(costs.backward[start:end]) for start, end in itertools.pairwise(bounds)]
    backward = [b + f * memory.is_repeated(k) for k, (f, b) in enumerate(zip(forward, backward, strict=True))]
    for k, count in enumerate(replicas):
        forward[k], backward[k] = forward[k] / count, backward[k] / count
    total = sum(forward) + sum(backward) or 1.0
    stages: list[StagePlan] = []
    for k, (start, end) in enumerate(itertools.pairwise(bounds)):
        nodes = graph.executed(start, end)
        used = (name for node in nodes for name in node.parameters)
        beside = (name for name, place in graph.places.items() if start <= place < end and name in sizes)
        parameters = tuple(dict.fromkeys((*used, *beside)))
        stages.append(
            StagePlan(
                index=k,
                units=tuple(dict.fromkeys(node.name for node in nodes if node.kind != "glue")),
                parameters=parameters,
                states=tuple(dict.fromkeys(name for node in nodes for name in node.states)),
                num_parameters=sum(sizes[name] for name in parameters),
                share=(forward[k] + backward[k]) / total,
                forward=forward[k],
                backward=backward[k],
                memory=_with_double(ranges.need(k, k, k + 1), k, memory, ranges, stages),
                sends=tuple(graph.values[v] for v in graph.live(end)) if k < len(cuts) else (),
                leaves=graph.needed_leaves(start, end),
            )
        )
    links = tuple(costs.link(hop) for hop in range(len(cuts)))
    return Plan(tuple(stages), tuple(cuts), graph, costs.measured, links=links)


def _with_double(need: Need, stage: int, memory: Memory, ranges: Ranges, before: Sequence[StagePlan]) -> Need:
    """The same with the weights of the stage before and, while one of its forwards runs, what that computes."""
    if stage not in memory.doubles:
        return need
    held = sum(memory.doubled[name] for name in {*before[-1].parameters, *before[-1].states})
    stash = int(ranges.stash[stage] - ranges.stash[stage - 1])
    return replace(need, held=need.held + held, stash=need.stash + stash)


def first_to_last(units: Sequence[str]) -> str:
    """Names of units for people: ``layers.0 .. layers.8 (9)``."""
    if len(units) <= 2:
        return ", ".join(units)
    return f"{units[0]} .. {units[-1]} ({len(units)})"


def _count(number: float) -> str:
    for suffix in ("", " K", " M", " G"):
        if number < 1000:
            return f"{number:.0f}{suffix}" if not suffix else f"{number:.1f}{suffix}"
        number /= 1000
    return f"{number:.1f} T"


def format_seconds(number: float) -> str:
    """Seconds for people: ``2.0 ms``."""
    if number >= 1:
        return f"{number:.2f} s"
    return f"{number * 1e3:.1f} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"
