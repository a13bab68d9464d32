"""A pipeline in this process: the stages it hosts, wired to their neighbours, for every step function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_avgpipe.capture.batch import leaf_names
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.runtime.channel import LocalChannel
from lightning_avgpipe.runtime.copies import Copies, copied_parameters
from lightning_avgpipe.runtime.executor import Lane, execute
from lightning_avgpipe.runtime.mesh import Mesh
from lightning_avgpipe.runtime.program import stage_programs
from lightning_avgpipe.runtime.recompute import Recompute
from lightning_avgpipe.runtime.stage import Stage, Task
from lightning_avgpipe.schedule import Schedule

__all__ = ["Pipeline"]


class Pipeline:
    """The lanes of one pipeline that this process runs.

    Args:
        mesh: who hosts what; its channels are open.
        module: the whole module.
        recompute: what stages repeat.
    """

    def __init__(self, mesh: Mesh, module: nn.Module, recompute: Recompute = Recompute()) -> None:  # noqa: B008
        self._mesh = mesh
        self._module = module
        self._recompute = recompute
        self._stages: dict[str, list[Stage]] = {}
        self._graphs: dict[str, CallGraph] = {}
        self._copies: dict[str, Copies] = {}
        self._leaves: dict[str, dict[int, frozenset[str]]] = {}

    @property
    def steps(self) -> tuple[str, ...]:
        """Step functions that can be run."""
        return tuple(self._stages)

    def graph(self, step: str) -> CallGraph:
        """The call graph of a step function."""
        return self._graphs[step]

    def load(self, graph: CallGraph, cuts: Sequence[int]) -> None:
        """Make a step function runnable.

        Args:
            graph: of the step.
            cuts: K-1 positions.
        """
        self._recompute.check(graph)
        programs = stage_programs(graph, cuts)
        copies = Copies(self._module, self._mesh, copied_parameters(programs))
        self._graphs[graph.step] = graph
        self._leaves[graph.step] = {
            rank: frozenset().union(*(programs[k].leaves for k in self._mesh.stages_of(rank)))
            for rank in range(self._mesh.world_size)
        }
        self._copies[graph.step] = copies
        self._stages[graph.step] = [
            Stage(programs[k], self._module, self._mesh.device, copies, self._recompute) for k in self._mesh.stages
        ]

    def unload(self) -> None:
        """Forget all step functions."""
        self._stages.clear()
        self._graphs.clear()
        self._copies.clear()
        self._leaves.clear()

    def leaves(self, step: str, rank: int, batch: Any) -> frozenset[str] | None:
        """Names of the tensors of a batch that a process needs for a step; None if that is not known: all of them."""
        graph = self._graphs.get(step)
        if graph is None or leaf_names(batch) != tuple(leaf.name for leaf in graph.leaves):
            return None
        return self._leaves[step][rank]

    def copies(self, step: str) -> Copies:
        """The parameters that several stages use in a step function."""
        return self._copies[step]

    def run(self, step: str, schedule: Schedule, task: Task) -> list[Any] | None:
        """Run one iteration.

        Args:
            step: name of a loaded step function.
            schedule: rows for all K stages.
            task: the micro-batches, and what to do with them.
        Returns:
            On the process of the last stage what the step returned for each micro-batch; None elsewhere.
        """
        mesh = self._mesh
        lanes = []
        for stage in self._stages[step]:
            wiring = mesh.wiring[stage.program.stage]
            lane = Lane(stage, wiring.values, wiring.to_next, wiring.gradients, wiring.to_previous)
            lane.begin(schedule.rows[stage.program.stage])
            stage.begin(schedule.rows[stage.program.stage])
            lanes.append(lane)
        try:
            with intercepting():
                execute(
                    lanes,
                    task,
                    mesh.arrivals,
                    mesh.timeout.total_seconds(),
                    mesh.rank,
                    mesh.watch,
                    mesh.recorder,
                    mesh.meter,
                )
            last = self._stages[step][-1]
            if not last.program.is_last:
                return None
            return [last.results[i] for i in range(schedule.num_microbatches)]
        finally:
            for lane in lanes:
                lane.stage.clear()
                for end in (lane.values, lane.gradients):
                    if isinstance(end, LocalChannel):
                        end.clear()
