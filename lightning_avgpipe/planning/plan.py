"""The plan of a model: its stages with their units, parameters and boundaries, and a forecast of an iteration."""

from __future__ import annotations

import bisect
import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_avgpipe.capture.costs import Costs, Link
from lightning_avgpipe.capture.graph import CallGraph, Leaf, Value
from lightning_avgpipe.capture.wire_format import Format, wire_bytes
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.planning.memory import Memory, Need, nbytes
from lightning_avgpipe.planning.ranges import Ranges
from lightning_avgpipe.planning.trained import num_frozen
from lightning_avgpipe.schedule import Schedule, StageCosts, forward_only, simulate
from lightning_avgpipe.schedule.builders import without_relays
from lightning_avgpipe.schedule.policies import WeightPolicy
from lightning_avgpipe.schedule.rules import trains
from lightning_avgpipe.utils.names import table

_ITERATIONS = 4  # simulated iterations of rolling models, after which all take equally long


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage.

    Attributes:
        index: k, number of the stage, 0-based.
        units: paths of the units that the stage calls, in order of their first call.
        parameters: full names of the parameters that the stage uses, or may use with another batch. If other stages use
            one too, each has a copy.
        states: full names of the parameters and buffers that the step changes and the stage uses.
        num_parameters: number of elements of all these parameters.
        share: share of the stage in the time of all stages, 0..1.
        forward: time of the forward of one micro-batch, divided by the replicas of the stage; in seconds if costs were
            measured, otherwise in counted operations.
        backward: time of the backward, in the same unit, including a repeated forward.
        memory: estimated bytes that the stage needs.
        sends: values that the stage sends to the next one; empty for the last stage.
        leaves: tensors of the batch that the stage needs.
        wire: format in which values travel to the next stage, and their gradients back; None: uncompressed.
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
    wire: Format | None = None

    @property
    def span(self) -> str:
        """The names of the first and the last unit, for messages."""
        return first_to_last(self.units)

    @property
    def boundary_bytes(self) -> int:
        """The bytes that are sent to the next stage for the micro-batch that was captured."""
        return sum(value.nbytes for value in self.sends)

    @property
    def wire_bytes(self) -> int:
        """The bytes of the sent values in the wire format of the link."""
        return sum(wire_bytes(value, self.wire) for value in self.sends)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that come back, in the wire format of the link."""
        return sum(wire_bytes(value, self.wire) for value in self.sends if value.requires_grad)


@dataclass(frozen=True)
class Forecast:
    """The forecast of an iteration, made by simulating the schedule of a plan.

    Attributes:
        schedule: name of the schedule.
        num_microbatches: M, number of micro-batches of an iteration.
        iteration_s: time of one iteration (a batch for each model) without the optimizer's step, in the unit of costs.
        bubble: share of the time that stages are idle, 0..1.
        num_models: number N of parallel models in the stages.
    """

    schedule: str
    num_microbatches: int
    iteration_s: float
    bubble: float
    num_models: int = 1


@dataclass(frozen=True)
class Plan:
    """A plan that says which stage calls and owns which parts of a model; ``str(plan)`` is a table.

    Notebooks show the table as HTML.

    Attributes:
        stages: plans of the K stages.
        cuts: K-1 positions in the graph.
        graph: call graph of the step that decided the plan.
        measured: whether times are measured seconds, not counted operations.
        forecast: forecast of an iteration; None if no schedule was given.
        links: link of each hop, shape ``(K-1,)``, in the unit of the stages' times.
        note: why the stages are not even; empty if they are.
        kept: number of leading nodes whose outputs are cached instead of computed again.
        devices: ranks of the processes of each stage; empty: those of the stage map.
        remarks: lines on where stages deviate from the schedule.
        units: costs of the units between possible cuts; None if they were not measured.
    """

    stages: tuple[StagePlan, ...]
    cuts: tuple[int, ...]
    graph: CallGraph = field(repr=False)
    measured: bool = False
    forecast: Forecast | None = None
    links: tuple[Link, ...] = ()
    note: str = ""
    kept: int = 0
    devices: tuple[tuple[int, ...], ...] = ()
    remarks: tuple[str, ...] = ()
    units: UnitCosts | None = field(default=None, repr=False)

    @property
    def slowest(self) -> StagePlan:
        """The stage with the largest share of the time."""
        return max(self.stages, key=lambda stage: stage.share)

    @property
    def num_stages(self) -> int:
        """The number of stages K."""
        return len(self.stages)

    @property
    def serial_s(self) -> float | None:
        """The seconds that one device would take for all micro-batches of an iteration; None without measured costs."""
        if not self.measured or self.forecast is None:
            return None
        count = self.forecast.num_microbatches * self.forecast.num_models
        return count * sum(stage.forward + stage.backward for stage in self.stages)

    @property
    def wire_formats(self) -> tuple[Format | None, ...]:
        """The wire format of each link between stages, shape ``(K-1,)``."""
        return tuple(stage.wire for stage in self.stages[:-1])

    @cached_property
    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """The stages of each unit, parameter and buffer, in ascending order; the first one is the owner.

        What no stage uses is missing here, and all stages keep it. So are buffers in units that the step never changes.
        """
        found: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for name in (*stage.units, *stage.parameters, *stage.states):
                found[name] = (*found.get(name, ()), stage.index)
        for name, position in self.graph.buffers_read.items():
            found.setdefault(name, (bisect.bisect_right(self.cuts, position),))
        return {name: tuple(dict.fromkeys(stages)) for name, stages in found.items()}

    @cached_property
    def copied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages use, each stage its own copy, with these stages."""
        names = {name for stage in self.stages for name in stage.parameters}
        return {name: stages for name, stages in self.stages_of.items() if name in names and len(stages) > 1}

    def __str__(self) -> str:
        return "\n".join([*table(self._rows()), *self._notes()])

    def _repr_html_(self) -> str:
        """Return the table as HTML, which notebooks show."""
        head, *stages = ([html.escape(text) for text in row] for row in self._rows())
        rows = [f"<th>{'</th><th>'.join(head)}</th>", *(f"<td>{'</td><td>'.join(row)}</td>" for row in stages)]
        notes = "<br>".join(map(html.escape, self._notes()))
        return f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table><p>{notes}</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the table: a row of headings, then one for each stage."""
        ranks = ("rank",) if self.devices else ()
        heads = ("stage", *ranks, "units", "parameters", "time", "memory", "sends to the next")
        return [heads, *map(self._row, self.stages)]

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        counted = self.num_stages > 1 and not self.measured
        shares = ["times are shares of counted operations, not measured"] if counted else []
        expected = [] if self.forecast is None else [self._expectation(self.forecast)]
        return [*self._copies(), *self._batch(), *self._saved(), *self.remarks, *shares, *expected]

    @property
    def brief(self) -> str:
        """The units of each stage, in one line."""
        ranks = [f" (rank {', '.join(map(str, ranks))})" for ranks in self.devices] or [""] * self.num_stages
        return "; ".join(f"stage {s.index}{ranks[s.index]}: {s.span}" for s in self.stages)

    def _batch(self) -> list[str]:
        parts = [
            f"{', '.join(leaf.name or 'its tensor' for leaf in stage.leaves)} to stage {stage.index} "
            f"({nbytes(sum(leaf.nbytes for leaf in stage.leaves))})"
            for stage in self.stages
            if stage.leaves
        ]
        return [f"each micro-batch sends {'; '.join(parts)}"] if self.graph.leaves else []

    def _saved(self) -> list[str]:
        """Return lines that say how much time on links the wire formats save for a micro-batch, in both directions."""
        found = []
        for stage, link in zip(self.stages, self.links, strict=False) if self.measured else ():
            if stage.wire is not None:
                asked = sum(value.nbytes for value in stage.sends if value.requires_grad)
                before, now = stage.boundary_bytes + asked, stage.wire_bytes + stage.gradient_bytes
                took, takes = format_seconds(link.per_byte * before), format_seconds(link.per_byte * now)
                hop = f"{stage.index} and {stage.index + 1}"
                found.append(f"{stage.wire} between stages {hop}: {takes} on the link instead of {took} a micro-batch")
        return found

    def _copies(self) -> list[str]:
        alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
        for name, stages in self.copied.items():
            alike.setdefault((stages, name in self.graph.trained), []).append(name)
        return [
            f"copied: {first_to_last(names)} on stages {', '.join(map(str, stages))}"
            f"{'; their gradients are summed' if trained else ''}"
            for (stages, trained), names in alike.items()
        ]

    def _row(self, stage: StagePlan) -> tuple[str, ...]:
        values = "value" if len(stage.sends) == 1 else "values"
        sends = f"{len(stage.sends)} {values}, {nbytes(stage.boundary_bytes)} a micro-batch"
        if stage.wire is not None:
            sends += f", {nbytes(stage.wire_bytes)} as {stage.wire}"
        shown = format_seconds(stage.forward + stage.backward)
        ranks = (", ".join(map(str, self.devices[stage.index])),) if self.devices else ()
        return (
            str(stage.index),
            *ranks,
            stage.span,
            _count(stage.num_parameters),
            f"{shown} ({stage.share:.0%})" if self.measured else f"{stage.share:.0%}",
            nbytes(stage.memory.total),
            "-" if stage is self.stages[-1] else sends,
        )

    def _expectation(self, forecast: Forecast) -> str:
        models = f" of {forecast.num_models} models" if forecast.num_models > 1 else ""
        time = f"{format_seconds(forecast.iteration_s)} an iteration{models}, " if self.measured else ""
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
    """Make the plan of the stages between the cuts.

    Args:
        graph: call graph of the step function for which the plan is made, in training ``training_step``.
        cuts: K-1 increasing positions.
        costs: costs of its nodes and hops.
        sizes: full name of each parameter -> number of elements.
        memory: sizes for the estimate of memory.
        replicas: number of replicas of each stage, by which its time is divided; empty: one of each.
    """
    bounds = [0, *cuts, len(graph.nodes)]
    memory = memory or Memory()
    ranges = Ranges.of(graph, costs, bounds, len(bounds) - 1, memory)
    forward = [sum(costs.forward[start:end]) for start, end in itertools.pairwise(bounds)]
    backward = [sum(costs.backward[start:end]) for start, end in itertools.pairwise(bounds)]
    backward = [b + f * memory.flow(k).repeats for k, (f, b) in enumerate(zip(forward, backward, strict=True))]
    for k, count in enumerate(replicas):
        forward[k], backward[k] = forward[k] / count, backward[k] / count
    total = sum(forward) + sum(backward) or 1.0
    slowest = max((f + b for f, b in zip(forward, backward, strict=True)), default=0.0)
    stages: list[StagePlan] = []
    for k, (start, end) in enumerate(itertools.pairwise(bounds)):
        nodes = graph.executed(start, end)
        used = (name for node in nodes for name in node.parameters)
        beside = (name for name, place in graph.position_of_uncalled.items() if start <= place < end and name in sizes)
        parameters = tuple(dict.fromkeys((*used, *beside)))
        sends = tuple(graph.values[v] for v in graph.live(end)) if k < len(cuts) else ()
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
                sends=sends,
                leaves=graph.needed_leaves(start, end),
                wire=costs.chosen(k, sends, slowest) if sends else None,
            )
        )
    links = tuple(costs.link(hop) for hop in range(len(cuts)))
    return Plan(tuple(stages), tuple(cuts), graph, costs.measured, links=links)


def _with_double(need: Need, stage: int, memory: Memory, ranges: Ranges, before: Sequence[StagePlan]) -> Need:
    """Return the need of a stage, which may double the one before it: then it also has its weights and one stash."""
    if stage not in memory.double_stages:
        return need
    held = sum(memory.double_bytes[name] for name in {*before[-1].parameters, *before[-1].states})
    stash = int(ranges.stash[stage] - ranges.stash[stage - 1])
    return replace(need, persistent=need.persistent + held, stash=need.stash + stash)


def stage_costs(plan: Plan, frozen: int = 0) -> StageCosts:
    """Return the costs of the stages for the simulator, in seconds if the plan was measured.

    Args:
        plan: plan of the stages.
        frozen: number of leading stages that run forwards only.
    """
    hops = list(zip(plan.links, plan.stages[:-1], strict=True))
    return StageCosts(
        [stage.forward for stage in plan.stages],
        [stage.backward * (stage.index >= frozen) for stage in plan.stages],
        [link.per_byte * stage.wire_bytes for link, stage in hops],
        [link.per_byte * stage.gradient_bytes for link, stage in hops],
        [link.latency for link, _ in hops],
    )


def forecast_of(
    plan: Plan,
    schedule: Schedule,
    policy: WeightPolicy,
    owners: Sequence[int] = (),
    num_models: int = 1,
    rolling: bool = False,
) -> Forecast:
    """Simulate the schedule with the costs of the stages.

    Args:
        plan: plan of the stages.
        schedule: schedule to simulate.
        policy: weight policy, which says which weights actions use.
        owners: rank of the process of each stage, shape ``(K,)``; empty: one process per stage.
        num_models: number N of parallel models in these stages.
        rolling: whether each model begins its next batch without waiting for the others.
    """
    if not policy.drains and plan.num_stages > 1:
        count = schedule.num_microbatches
        # the costs already include repeated forwards
        timeline = policy.simulate(stage_costs(plan), count, 2 + 4 * plan.num_stages, repeats=False)
        copies = " ".join(map(str, policy.copies(plan.num_stages, count)))
        name = f"1f1b, weight_policy='{policy.name}' with {copies} copies of the weights"
        return Forecast(name, count, timeline.steady_s, max(0.0, timeline.bubble_fraction))
    frozen = num_frozen(plan.graph, plan.cuts, plan.graph.trained) if trains(schedule.rows[-1]) else 0
    schedule = without_relays(schedule) if frozen else schedule
    costs = stage_costs(plan, frozen)
    costs = costs.on(owners) if owners else costs
    iterations = _ITERATIONS if rolling and num_models > 1 else 1
    timeline = simulate([forward_only(schedule, frozen)] * num_models, costs, owners, iterations=iterations)
    idle = max(0.0, timeline.bubble_fraction)
    return Forecast(schedule.name, schedule.num_microbatches, timeline.steady_s, idle, num_models)


def first_to_last(units: Sequence[str]) -> str:
    """Format names of units for messages, such as ``layers.0 .. layers.8 (9)``."""
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
    """Format seconds for messages, such as ``2.0 ms``."""
    if number >= 1:
        return f"{number:.2f} s"
    return f"{number * 1e3:.1f} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"
