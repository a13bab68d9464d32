"""The plan maker: captures steps and plans their stages on the process that has the whole module."""

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
from lightning_avgpipe.capture.node_trial import Samples
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
from lightning_avgpipe.utils.forked import ForkError, in_child, why_no_fork
from lightning_avgpipe.utils.torch_compat import untraced
from lightning_avgpipe.weights.ownership import FEW_BYTES

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Example arguments of a step. The step is followed with the first of them that training does not skip.

    Attributes:
        name: name of the step function.
        run: executes the step function.
        args: arguments of each micro-batch.
        optional: whether batches may stay whole, if the step cannot be followed on a part of one.
    """

    name: str
    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    optional: bool = False

    def steps(self) -> Iterator[Step]:
        """Yield the step with each of the arguments."""
        return (Step(self.name, self.run, args) for args in self.args)


@dataclass(frozen=True)
class _Failed:
    """The error that user code raised on rank 0, as the other processes get it."""

    reason: str


class PlanMaker:
    """A maker of plans for the processes of a cluster. Every process calls its methods, and gets the same results.

    Args:
        module: module to divide.
        cluster: cluster with open channels.
        planner: planner for the module.
        holdings: parameters, buffers and states of each process.
        optimizers: returns the current optimizers of the module.
        bandwidth: returns the bandwidth between processes, if stages are to be placed by it, else None. Every process
            calls it.

    Attributes:
        planner: planner of the next plan.
        halving: conditions for fewer stages than processes; None: there must be as many.
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
        self._slowness: tuple[float, ...] = ()  # of each process, measured while it had the whole module

    def change(self, rolling: bool | None = None, **changes: Any) -> None:
        """Change attributes of the planner of the next plan, and whether its pipelines roll."""
        updates = self.planner.updates
        updates = updates if rolling is None else replace(updates, rolling=rolling)
        self.planner = replace(self.planner, updates=updates, **changes)

    def provisional(self, examples: Examples, schedule: Schedule, num_pipelines: int) -> Plan | None:
        """Return a plan for which no process gives up weights; None if the step skips all examples."""
        conditions = self._conditions(schedule, num_pipelines)
        return self._on_first(examples, lambda step: self.planner.provisional(step, conditions))

    def final(
        self, examples: Examples, schedule: Schedule, num_pipelines: int, before: Plan | None, divided: bool
    ) -> Plan | None:
        """Return a plan to train on; None if the step skips all examples.

        Args:
            examples: example arguments of the step.
            schedule: schedule of the step.
            num_pipelines: number of pipelines, N.
            before: current plan, whose units are opened further, and closed where nothing divides them.
            divided: whether processes have given up parameters of other stages.
        """
        planner, group = self.planner, self._cluster.group
        with self._holdings.whole_on_rank_zero() if divided else contextlib.nullcontext():
            bandwidth = self._bandwidth()
            if bandwidth is not None and not divided:
                self._slowness = self._measured_slowness(examples)
            # rank 0 decides, because it measures
            asks = bandwidth is None and group.broadcast(planner.measures)
            conditions = replace(
                self._conditions(schedule, num_pipelines),
                links=self._cluster.channels.links(self._cluster.stage_map) if asks else (),
                bandwidth=bandwidth,
                slowness=self._slowness,
                halving=self.halving if planner.num_stages == group.world_size else None,
            )
            units, device = () if before is None else before.graph.units, self._cluster.device

            def make(step: Step) -> Plan:
                made = planner.plan(step, units, conditions)
                run, args, repeats = step.run, step.args, planner.recompute
                return replace(made, whole=whole_backwards(made, schedule, self._module, run, args, device, repeats))

            return self._on_first(examples, make)

    def graph_like(self, examples: Examples, plan: Plan) -> CallGraph | None:
        """Return the graph of a further step, with the units of a plan; None if the step skips all examples."""
        with self._holdings.whole_on_rank_zero(FEW_BYTES):  # a few weights come faster together than one by one
            return self._on_first(examples, lambda step: self.planner.capture_like(step, plan))

    def _conditions(self, schedule: Schedule, num_pipelines: int) -> Conditions:
        teams, copies = self._cluster.stage_map.num_teams, state_copies(self._optimizers())
        shared = self._cluster.group.world_size == 1 and not schedule.turns
        owners = (0,) * schedule.num_stages if shared else ()
        return Conditions(schedule, state_copies=copies, num_pipelines=num_pipelines, num_groups=teams, owners=owners)

    def _on_first(self, examples: Examples, make: Callable[[Step], Any]) -> Any:
        """Return what ``make`` returns for the first example that is not skipped; None if all are.

        Raises:
            MicroBatchError: the user's code failed, and there is another way to try; raised on every process.
        """
        cause: Exception | None = None

        def attempt(step: Step) -> Any:
            nonlocal cause
            try:
                return self._isolated(make, step)
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

    def _isolated(self, make: Callable[[Step], Any], step: Step) -> Any:
        """Call ``make`` in a forked child, so that following and measuring a step leaves nothing behind.

        If that is impossible, this process calls it, and restores what has changed.
        """
        with untraced():  # a parameter that is lent says that it is here
            absent = any(p.is_meta for p in self._module.parameters())
        why = "weights are on other processes" if absent else why_no_fork(self._cluster.device)
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
        _log.info("%s is followed in the process that trains: %s", step.name, why)
        with alone():
            return make(step)

    def _measured_slowness(self, examples: Examples) -> tuple[float, ...]:
        seconds = 0.0
        for step in examples.steps():
            with contextlib.suppress(SkippedStepError), self._cluster.channels.monitor.during("measures its device"):
                seconds = self._isolated(self.planner.seconds, step)
                break
        return slowness_of(self._cluster.group.exchange_objects(seconds))
