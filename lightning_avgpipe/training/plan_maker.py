"""The plan maker: captures steps and plans their stages on the process that has the whole module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.whole_backwards import whole_backwards
from lightning_avgpipe.errors import AvgPipeError, MicroBatchError, SkippedStepError, described
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Step
from lightning_avgpipe.planning.halving import Halving
from lightning_avgpipe.planning.model_memory import state_copies
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.planning.turns import slowness_of
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.training.holdings import Holdings
from lightning_avgpipe.weights.ownership import FEW_BYTES


@dataclass(frozen=True)
class Examples:
    """What a step is called with, of which it is followed on the first that training does not skip.

    Attributes:
        name: of the step function.
        run: executes it.
        args: arguments of micro-batches.
        optional: whether batches may as well stay whole, if it cannot be followed on a part of one.
    """

    name: str
    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    optional: bool = False

    def steps(self) -> Iterator[Step]:
        """The step with each of them."""
        return (Step(self.name, self.run, args) for args in self.args)


@dataclass(frozen=True)
class _Failed:
    """What the user's code raised on rank 0, for the other processes."""

    reason: str


class PlanMaker:
    """Plans a module's stages for the processes of a cluster. Every process calls its methods, and gets the same.

    Args:
        module: that is divided.
        cluster: with open channels.
        planner: of the module.
        holdings: what each process has of it.
        optimizers: those that step the module, as of when it is called.
        bandwidth: of the processes, if stages are to be placed by it. Every process calls it.

    Attributes:
        planner: of the next plan.
        halving: leave to make fewer stages than there are processes; None: no leave.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        planner: Planner,
        holdings: Holdings,
        optimizers: Callable[[], Sequence[Optimizer]],
        bandwidth: Callable[[], Matrix | None],
    ) -> None:
        self.planner = planner
        self.halving: Halving | None = None
        self._module = module
        self._cluster = cluster
        self._holdings = holdings
        self._optimizers = optimizers
        self._bandwidth = bandwidth
        self._slowness: tuple[float, ...] = ()  # of the processes, as they were when each had the whole module

    def change(self, rolling: bool | None = None, **changes: Any) -> None:
        """The planner of the next plan has these attributes; and plans for pipelines that roll, or not."""
        updates = self.planner.updates
        updates = updates if rolling is None else replace(updates, rolling=rolling)
        self.planner = replace(self.planner, updates=updates, **changes)

    def provisional(self, examples: Examples, schedule: Schedule, num_pipelines: int) -> Plan | None:
        """A plan for which nobody gives anything up; None if the step skips all examples."""
        conditions = self._conditions(schedule, num_pipelines)
        return self._on_first(examples, lambda step: self.planner.provisional(step, conditions))

    def final(
        self, examples: Examples, schedule: Schedule, num_pipelines: int, before: Plan | None, divided: bool
    ) -> Plan | None:
        """A plan to train on; None if the step skips all examples.

        Args:
            examples: of the step.
            schedule: that it will run with.
            num_pipelines: N.
            before: the plan that there was, whose units are opened further, and closed where nothing divides them.
            divided: whether processes have given up what is not theirs.
        """
        planner, group = self.planner, self._cluster.group
        with self._holdings.whole_on_rank_zero() if divided else contextlib.nullcontext():
            bandwidth = self._bandwidth()
            if bandwidth is not None and not divided:
                self._slowness = self._measured_slowness(examples)
            # asked on rank 0, which measures
            asks = bandwidth is None and group.broadcast(planner.measures)
            conditions = replace(
                self._conditions(schedule, num_pipelines),
                links=self._cluster.channels.links(self._cluster.stage_map) if asks else (),
                bandwidth=bandwidth,
                slowness=self._slowness,
                halving=self.halving if planner.num_stages == group.world_size else None,
                kept=() if before is None else tuple(node.name for node in before.graph.nodes[: before.frozen]),
            )
            units, device = () if before is None else before.graph.units, self._cluster.device

            def make(step: Step) -> Plan:
                made = planner.plan(step, units, conditions)
                run, args, repeats = step.run, step.args, planner.recompute
                return replace(made, whole=whole_backwards(made, schedule, self._module, run, args, device, repeats))

            return self._on_first(examples, make)

    def graph_like(self, examples: Examples, plan: Plan) -> CallGraph | None:
        """A further step, with units as a plan has them; None if it skips all examples."""
        with self._holdings.whole_on_rank_zero(FEW_BYTES):  # a few weights come faster together than one by one
            return self._on_first(examples, lambda step: self.planner.capture_like(step, plan))

    def _conditions(self, schedule: Schedule, num_pipelines: int) -> Conditions:
        teams, copies = self._cluster.stage_map.num_teams, state_copies(self._optimizers())
        return Conditions(schedule, state_copies=copies, num_pipelines=num_pipelines, num_groups=teams)

    def _on_first(self, examples: Examples, make: Callable[[Step], Any]) -> Any:
        """What is made of the first example that is not skipped; None if all are.

        Raises:
            MicroBatchError: the user's code failed, and there is another way to try; on every process.
        """
        cause: Exception | None = None

        def attempt(step: Step) -> Any:
            nonlocal cause
            try:
                with alone():
                    return make(step)
            except SkippedStepError:
                return None
            except Exception as error:
                if not examples.optional or isinstance(error, AvgPipeError):
                    raise
                cause = error
                return _Failed(described(error))

        for step in examples.steps():
            made = self._holdings.gather.on_rank_zero(partial(attempt, step))
            if isinstance(made, _Failed):
                raise MicroBatchError(made.reason) from cause
            if made is not None:
                return made
        return None

    def _measured_slowness(self, examples: Examples) -> tuple[float, ...]:
        seconds = 0.0
        for step in examples.steps():
            with contextlib.suppress(SkippedStepError), alone():
                with self._cluster.channels.monitor.during("measures its device"):
                    seconds = self.planner.seconds(step)
                break
        return slowness_of(self._cluster.group.exchange_objects(seconds))
