"""The plan maker: captures steps and plans their stages, on the process that has the whole module."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import Samples
from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import (
    AvgPipeError,
    CaptureError,
    MicroBatchError,
    PartitionError,
    SkippedStepError,
    described,
)
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Step
from lightning_avgpipe.planning.memory import state_copies
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.training.holdings import Holdings
from lightning_avgpipe.utils.forked import ForkError, in_child, why_no_fork
from lightning_avgpipe.utils.torch_compat import untraced
from lightning_avgpipe.weights.ownership import FEW_BYTES

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Example arguments of a step. The step is captured with the first of them that it does not skip.

    Attributes:
        name: name of the step function.
        run: executes the step function.
        args: arguments of each micro-batch.
        optional: whether batches may stay whole, if the step cannot be captured with a part of one.
    """

    name: str
    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    optional: bool = False

    @property
    def trains(self) -> bool:
        """Whether the step is ``training_step``."""
        return self.name == "training_step"

    def steps(self) -> Iterator[Step]:
        """Yield the step with each of the arguments."""
        return (Step(self.name, self.run, args) for args in self.args)


@dataclass(frozen=True)
class _Failed:
    """An error of user code on rank 0, as it is sent to the other processes."""

    reason: str


@dataclass(eq=False)
class PlanMaker:
    """A maker of plans for the processes of a cluster. Every process calls its methods, and gets the same results.

    Attributes:
        module: module to divide.
        cluster: cluster with open channels.
        planner: planner of the next plan.
        holdings: parameters, buffers and states of each process.
        optimizers: returns the current optimizers of the module.
    """

    module: nn.Module
    cluster: Cluster
    planner: Planner
    holdings: Holdings
    optimizers: Callable[[], Sequence[Optimizer]]

    def change(self, rolling: bool | None = None, **changes: Any) -> None:
        """Change attributes of the planner of the next plan, and whether its pipelines roll."""
        updates = self.planner.updates
        updates = updates if rolling is None else replace(updates, rolling=rolling)
        self.planner = replace(self.planner, updates=updates, **changes)

    def provisional(self, examples: Examples, schedule: Schedule, num_pipelines: int) -> Plan | str | None:
        """Return a plan for which no process gives up weights, or the reason why stages cannot run the step.

        The result is None if the step skips all examples.
        """
        conditions = self._conditions(schedule, num_pipelines)
        return self._on_first(examples, lambda step: self.planner.provisional(step, conditions))  # type: ignore[no-any-return]

    def final(
        self, examples: Examples, schedule: Schedule, num_pipelines: int, before: Plan | None, divided: bool
    ) -> Plan | str | None:
        """Return the plan for training, or the reason why stages cannot run an evaluation step.

        The result is None if the step skips all examples.

        Args:
            examples: example arguments of the step.
            schedule: schedule of the step.
            num_pipelines: number of pipelines, N.
            before: current plan; planning starts from its units, may open them further, and closes units that no cut
                divides.
            divided: whether processes have given up parameters of other stages.
        """
        planner, group = self.planner, self.cluster.group
        with self.holdings.whole_on_rank_zero() if divided else contextlib.nullcontext():
            planner.source.measure(self.cluster, None if divided else partial(self._seconds, examples))
            # rank 0 decides for all, because it measures
            asks = not planner.source.replicates and group.broadcast(planner.measures)
            links = self.cluster.links(self.cluster.stage_map) if asks else ()
            conditions = replace(self._conditions(schedule, num_pipelines), links=links)
            units = () if before is None else before.graph.units
            return self._on_first(examples, lambda step: planner.plan(step, conditions, units))  # type: ignore[no-any-return]

    def graph_like(self, examples: Examples, plan: Plan) -> CallGraph | str | None:
        """Return the graph of another step with the units of a plan, or why stages cannot run an evaluation step.

        The result is None if the step skips all examples.
        """
        with self.holdings.whole_on_rank_zero(FEW_BYTES):  # small weights are fetched faster together than one by one
            return self._on_first(examples, lambda step: self.planner.capture_like(step, plan))  # type: ignore[no-any-return]

    def _conditions(self, schedule: Schedule, num_pipelines: int) -> Conditions:
        teams, copies = self.cluster.stage_map.num_teams, state_copies(self.optimizers())
        shared = self.cluster.group.world_size == 1 and not schedule.turns
        owners = (0,) * schedule.num_stages if shared else ()
        return Conditions(schedule, state_copies=copies, num_pipelines=num_pipelines, num_groups=teams, owners=owners)

    def _on_first(self, examples: Examples, make: Callable[[Step], Any]) -> Any:
        """Return what ``make`` returns on rank 0 for the first example that is not skipped; None if all are.

        For an evaluation step this may be the reason why stages cannot run it.

        Raises:
            MicroBatchError: the user's code failed, and batches may stay whole; raised on every process.
        """
        cause: Exception | None = None

        def attempt(step: Step) -> Any:
            nonlocal cause
            try:
                return self._isolated(make, step)
            except SkippedStepError:
                return None
            except Exception as error:
                if isinstance(error, (CaptureError, PartitionError)) and not examples.trains:
                    return str(error)
                if not examples.optional or isinstance(error, AvgPipeError):
                    raise
                cause = error
                return _Failed(described(error))

        for step in examples.steps():
            made = self.holdings.gather.on_rank_zero(partial(attempt, step))
            if isinstance(made, _Failed):
                raise MicroBatchError(made.reason) from cause
            if made is not None:
                return made
        return None

    def _isolated(self, make: Callable[[Step], Any], step: Step) -> Any:
        """Call ``make`` in a forked child, so that capturing and measuring a step leaves no trace in this process.

        If that is impossible, this process calls it, and restores what has changed.
        """
        with untraced():  # see the parameters as they are: one that is fetched on demand claims to be here
            absent = any(p.is_meta for p in self.module.parameters())
        why = "weights are on other processes" if absent else why_no_fork(self.cluster.device)
        if why is None:
            samples = self.planner.costing.samples

            def work() -> tuple[Any, Samples]:
                return make(step), samples

            try:
                with alone():
                    made, found = in_child(work, f"follows {step.name}")
            except ForkError as error:
                why = str(error)
            else:
                samples.take(found)
                return made
        _log.info("%s is captured in the process that trains: %s", step.name, why)
        with alone():
            return make(step)

    def _seconds(self, examples: Examples) -> float:
        """Return the seconds of the step on this device, with the first example that is not skipped; 0 if all are."""
        for step in examples.steps():
            with contextlib.suppress(SkippedStepError), self.cluster.watch.during("measures its device"):
                return float(self._isolated(self.planner.seconds, step))
        return 0.0
