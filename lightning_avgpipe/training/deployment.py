"""The deployment of a module on processes: from its first batch until every process holds all of it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.compiling import Execution
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import ConfigurationError, PartitionError, StepOrderError
from lightning_avgpipe.planning import Plan, cut_like
from lightning_avgpipe.planning.planner import Planner, PlanSource
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.training.arrangement import Arrangement
from lightning_avgpipe.training.holdings import Holdings
from lightning_avgpipe.training.kept import check_movable
from lightning_avgpipe.training.optimizer_shards import OptimizerShards
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.training.plan_maker import Examples, PlanMaker
from lightning_avgpipe.training.replicas import check_shared
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.weights.initialisation import Origin
from lightning_avgpipe.weights.store import WeightStore


class Deployment:
    """A module on the processes of a cluster: it plans the stages, and moves parameters and optimizer states.

    Args:
        module: module to divide; whole on every process, or with parameters on meta that no process ever has all of.
        cluster: cluster with open channels.
        planner: planner for the module.
        optimizers: returns the current optimizers of the module.
        origin: source of contents that no process has; None if the module is whole.
        averaging: options of the averaging of parallel models.
        observers: modules that only read values (metrics).
        weights: versions of the weights in training; None: there is one version.
        shards: whether replicas divide the states of optimizers among them.
        execution: options of the execution of units.

    Attributes:
        weights: as given.
        pipeline: pipeline of the prepared step functions; with parallel models, pipeline 0, which also evaluates.
        plan: current plan; None before the first step.
        models: pipelines of the models that train.
        replans: whether a new plan is to be made with the next step of training that begins with cleared gradients.
        holdings: parameters, buffers and states of each process.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        planner: Planner,
        optimizers: Callable[[], Sequence[Optimizer]],
        origin: Origin | None = None,
        averaging: Averaging | None = None,
        observers: Collection[nn.Module] = (),
        weights: WeightStore | None = None,
        shards: bool = False,
        execution: Execution = Execution(),  # noqa: B008
    ) -> None:
        self.weights = weights
        versions = {} if weights is None else {"training_step": weights}
        self.pipeline = Pipeline(cluster, module, execution, weights=versions)
        self.plan: Plan | None = None
        make = partial(Ensemble, module, optimizers, averaging or Averaging(), observers)
        self.models = ParallelPipelines(module, cluster, self.pipeline, make, execution)
        self._cluster = cluster
        shared = OptimizerShards(module, cluster) if shards else None
        self.holdings = Holdings(module, cluster, optimizers, origin, shared)
        self._maker = PlanMaker(module, cluster, planner, self.holdings, optimizers)
        self._final = False
        self.replans = False
        self._arrangement = Arrangement(cluster)

    def prepare(self, examples: Examples, decides: bool, schedule: Schedule, num_pipelines: int = 1) -> bool:
        """Make a step function runnable, unless it is. Every process calls it.

        Args:
            examples: example arguments of the step. If the step skips all of them, nothing changes.
            decides: whether the plan is made for this step. In training ``training_step`` decides; a validation that
                comes before it (a sanity check) runs on a provisional plan, for which no process gives up weights.
            schedule: schedule of the step.
            num_pipelines: number of pipelines that will train.

        Returns:
            Whether a new final plan was made.

        Raises:
            MicroBatchError: the step fails on an example, and batches may stay whole. Nothing has changed.
        """
        if self._arrangement.awaits_plan and examples.name == "training_step":
            self._arrangement.awaits_plan = False
            if self._divide(examples, True, schedule, num_pipelines):
                return True
            self._arrangement.follow(self._arrangement.planned)
        if examples.name in self.pipeline.steps and (self._final or not decides):
            return False
        if self.plan is None or (decides and not self._final):
            return self._divide(examples, decides, schedule, num_pipelines) and decides
        graph = self._maker.graph_like(examples, self.plan)
        if graph is not None:
            self._load_like(self.plan, graph, schedule.relays)
        return False

    def arrange(self, batches: Sequence[Any]) -> bool:
        """Decide whether to make a new plan. Every process calls it.

        It is called when a step of training begins with cleared gradients. If a new plan will be made, the processes
        are arranged for its number of stages.

        Args:
            batches: batches of the step.

        Returns:
            Whether a new plan will be made: one was asked for, and every process has all tensors of the batches, so
            that it can host any stage.
        """
        if not self.replans:
            return False
        lacks = any(isinstance(leaf, Absent) for batch in batches for leaf in tree.tensors(batch))
        self._arrangement.awaits_plan = not int(self._cluster.world.sum(torch.tensor(int(lacks), device="cpu")))
        if self._arrangement.awaits_plan:
            if self.models.ensemble is not None:
                self.models.ensemble.begin_relocation()
            self._arrangement.begin(self._maker.planner.num_stages)
        return self._arrangement.awaits_plan

    def _divide(self, examples: Examples, final: bool, schedule: Schedule, num_pipelines: int) -> bool:
        """Make a plan and carry it out; return whether there is one."""
        if final:
            plan = self._maker.final(examples, schedule, num_pipelines, self.plan, self._final)
        else:
            plan = self._maker.provisional(examples, schedule, num_pipelines)
        if plan is None:
            return False
        others = [self.pipeline.graph(name) for name in self.pipeline.steps if name != examples.name]
        self._follow(plan, others, final, schedule.relays)
        return True

    def _follow(self, plan: Plan, others: Sequence[CallGraph], final: bool, relays: Collection[int]) -> None:
        """Divide the module by a plan, and make its step and the other steps runnable."""
        self._arrange_for(plan)
        begins_alike = not self._final
        self.pipeline.unload()
        self.plan, self._final, self.replans = plan, final, False
        self.models.only_first()
        self._place()
        if begins_alike:
            self.holdings.begin_alike(plan.copied)
        self.pipeline.load(plan.graph, plan.cuts, plan.kept, relays, plan.wires)
        self._load_others(plan, others)

    def _arrange_for(self, plan: Plan) -> None:
        """Arrange the processes for the stages of a plan, after checking that the step allows it."""
        placed = self._arrangement.placed(plan)
        if self._final and self.plan is not None and self.models.has_trained:
            models = 1 if self.models.ensemble is None else self.models.ensemble.models.size
            check_movable(self.plan, plan, self._arrangement.planned, placed, models)
        self._arrangement.follow(placed)
        check_shared(plan.graph, plan.cuts, self._cluster.stage_map)

    def _load_others(self, plan: Plan, graphs: Sequence[CallGraph]) -> None:
        """Make other steps runnable, cut like the step that the plan was made for."""
        for graph in graphs:
            try:
                self._load_like(plan, graph)
            except StepOrderError:
                if not plan.copied:  # finer units might find an order among copies
                    raise
            except PartitionError:
                pass  # the step needs finer units: it is captured anew when it runs

    def _load_like(self, plan: Plan, graph: CallGraph, relays: Collection[int] = ()) -> None:
        """Make another step runnable on the stages of a plan."""
        cuts = cut_like(graph, plan.stages_of, plan.num_stages)
        check_shared(graph, cuts, self._cluster.stage_map)
        self.pipeline.load(graph, cuts, relays=relays, wires=plan.wires)

    def place_parameters(self, plan: Plan) -> dict[str, int]:
        """Divide the module by a plan that only says which stage owns what. Every process calls it.

        Returns:
            The rank of the owner of each parameter and buffer that a stage owns, by full name.
        """
        self.plan, self._final = plan, True
        self._place()
        answers = self.holdings.answers
        return {name: answers[name] for name in plan.stages_of if name in answers}

    def _place(self) -> None:
        assert self.plan is not None
        self.holdings.place(
            self.plan, self._final, [] if self.models.ensemble is None else self.models.ensemble.belongings
        )

    def abandon(self) -> None:
        """Continue with one model after a failure, without waiting for other processes."""
        self.models.abandon()

    def restore(self) -> None:
        """Bring the whole module back to every process, unless it began on meta. Every process calls it.

        A module that began on meta is too large for that: each process keeps its own stages, on the host, and all
        buffers.
        """
        self.models.dissolve()
        self.pipeline.unload()
        if self.plan is not None:
            self.holdings.restore()

    def replan(self, placement: Placement | None = None, **changes: Any) -> None:
        """Make a new plan with the next step of training that begins with cleared gradients. Every process calls it.

        Weights, optimizer states and parallel models move as the plan requires. This takes a step or two more, until
        the batches arrive that every process has all of: batches in flight hold only what the current plan needs.

        Args:
            placement: placement of several stages on each process; None leaves it as it is.
            changes: attributes to change in the planner, or ``rolling``.
        """
        if self.holdings.shards is not None:
            raise ConfigurationError(
                "shard='optimizer' keeps optimizer states where they are, so stages stay as they are while "
                "training runs; use False, or leave the stages"
            )
        self._maker.change(**changes)
        self._arrangement.placement = placement or self._arrangement.placement
        self.replans = True
        self.pipeline.need_all("training_step")

    @property
    def planner(self) -> Planner:
        """The planner of the next plan."""
        return self._maker.planner

    def plan_by(self, source: PlanSource) -> None:
        """Let later plans come from another source. Every process calls it."""
        self._maker.change(source=source)

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """Return the state dict of the module, for parallel models that of the reference. Every process calls it.

        Args:
            whole: whether rank 0 returns the weights of all stages; otherwise every process returns its own.
        """
        with self.models.showing_reference():
            return self.holdings.state_dict() if whole else self.holdings.own_state_dict()
