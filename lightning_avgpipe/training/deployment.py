"""The deployment of a module on processes: from its first batch until every process holds all of it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.elastic.averaging import Elasticity
from lightning_avgpipe.elastic.ensemble import Ensemble
from lightning_avgpipe.engine.compiling import Compiler, Execution
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import ConfigurationError, PartitionError, StepOrderError
from lightning_avgpipe.planning import Plan, cut_like, scattered
from lightning_avgpipe.planning.halving import Halving, processes_of
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.planning.planner import Planner
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
    """Plans the stages of a module, and moves parameters and optimizer states to where the plan wants them.

    Args:
        module: to divide; whole on every process, or with parameters on meta that are never brought together.
        cluster: with open channels.
        planner: makes plans for the module.
        optimizers: those that step the module, as of when it is called.
        origin: of the contents that no process has; None if the module is whole.
        elasticity: how parallel models are held together.
        observers: modules that only look at values (metrics).
        weights: versions of them that training uses; None: there is one.
        bandwidth: of the processes, if stages are to be placed by it. Every process calls it.
        shards: whether replicas divide the states of optimizers among them.

    Attributes:
        weights: as given.
        pipeline: runs the step functions that are prepared; with parallel models, number 0, and evaluations.
        plan: None before the first step.
        models: that train, each with a pipeline.
        replans: whether the next step of training that begins with cleared gradients may make another plan.
        holdings: what each process has.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        planner: Planner,
        optimizers: Callable[[], Sequence[Optimizer]],
        origin: Origin | None = None,
        elasticity: Elasticity | None = None,
        observers: Collection[nn.Module] = (),
        weights: WeightStore | None = None,
        bandwidth: Callable[[], Matrix | None] = lambda: None,
        shards: bool = False,
        compiler: Compiler | None = None,
        streams: bool = False,
    ) -> None:
        self.weights = weights
        versions = {} if weights is None else {"training_step": weights}
        execution = Execution(planner.recompute, compiler, streams)
        self.pipeline = Pipeline(cluster, module, execution, weights=versions)
        self.plan: Plan | None = None
        make = partial(Ensemble, module, optimizers, elasticity or Elasticity(), observers)
        self.models = ParallelPipelines(module, cluster, self.pipeline, make, execution)
        self._cluster = cluster
        shared = OptimizerShards(module, cluster) if shards else None
        self.holdings = Holdings(module, cluster, optimizers, origin, shared)
        self._maker = PlanMaker(module, cluster, planner, self.holdings, optimizers, bandwidth)
        self._final = False
        self.replans = False
        self._arrangement = Arrangement(cluster)

    def prepare(self, examples: Examples, decides: bool, schedule: Schedule, num_pipelines: int = 1) -> bool:
        """Make a step function runnable, if it is not. Every process calls it.

        Args:
            examples: of the step. If it skips all of them, it stays as it is.
            decides: whether the plan is made for this step. In training ``training_step`` decides; a validation that
                comes before it (a sanity check) runs on a provisional plan, for which nobody gives anything up.
            schedule: that it will run with.
            num_pipelines: that will train.
        Returns:
            Whether a plan was made that stays.
        Raises:
            MicroBatchError: it fails on an example, and batches may stay whole. Nothing has changed.
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
        """A step of training begins with cleared gradients. Every process calls it.

        Args:
            batches: of the step.
        Returns:
            Whether another plan will be made for it, as somebody has wanted: every process has all of the batches, and
            may be given any stage. From now on there are as many stages as that plan has.
        """
        if not self.replans:
            return False
        lacks = any(isinstance(leaf, Absent) for batch in batches for leaf in tree.tensors(batch))
        self._arrangement.awaits_plan = not int(self._cluster.world.sum(torch.tensor(int(lacks))))
        if self._arrangement.awaits_plan:
            if self.models.ensemble is not None:
                self.models.ensemble.begin_relocation()
            self._arrangement.begin(self._maker.planner.num_stages)
        return self._arrangement.awaits_plan

    def _divide(self, examples: Examples, final: bool, schedule: Schedule, num_pipelines: int) -> bool:
        """Make a plan and follow it; returns whether there is one."""
        if final:
            plan = self._maker.final(examples, schedule, num_pipelines, self.plan, self._final)
        else:
            plan = self._maker.provisional(examples, schedule, num_pipelines)
        if plan is None:
            return False
        self._follow(plan, [graph for graph in self.graphs if graph.step != examples.name], final, schedule.relays)
        return True

    @property
    def graphs(self) -> list[CallGraph]:
        """Of the step functions that can be run."""
        return [self.pipeline.graph(name) for name in self.pipeline.steps]

    def why_not_given(self) -> str:
        """Why other processes could not go on from :attr:`plan` and :attr:`graphs`; empty if they could."""
        if self.plan is None or not self._final or "training_step" not in self.pipeline.steps:
            return "no step of training has been followed yet"
        if self.replans or self._arrangement.has_changed:
            return "the stages have changed since training began, or are about to"
        if self.pipeline.kept is not None:
            return "outputs of frozen layers are kept"
        kept = [name for graph in self.graphs for name in graph.carried]
        kept += [f"{path}.{name}".lstrip(".") for graph in self.graphs for path, name in graph.written]
        if kept:
            return f"steps keep '{kept[0]}' for the next time, which is not given along"
        copies = any(copy() is not None for copy in self.holdings.copies)
        return "weights are averaged in a copy of the module" if copies else ""

    def adopt(self, plan: Plan, graphs: Sequence[CallGraph]) -> None:
        """Before the first step: divide the module as other groups have theirs. Every process of the group calls it.

        Args:
            plan: theirs.
            graphs: of the steps that they run.
        """
        self._follow(plan, [graph for graph in graphs if graph.step != plan.graph.step], True)

    def _follow(self, plan: Plan, others: Sequence[CallGraph], final: bool, relays: Collection[int] = ()) -> None:
        """Divide the module by a plan, and make its step runnable, and others."""
        self._arrange_for(plan)
        begins_alike = not self._final
        self.pipeline.unload()
        self.plan, self._final, self.replans = plan, final, False
        self.models.only_first()
        self._place()
        if begins_alike:
            self.holdings.begin_alike(plan.copied)
        self.pipeline.load(plan.graph, plan.cuts, plan.frozen, relays)
        if not plan.frozen:
            self._forget_kept()
        self._load_others(plan, others)

    def _arrange_for(self, plan: Plan) -> None:
        """The processes get the stages that a plan gives them."""
        placed = self._arrangement.placed(plan)
        if self._final and self.plan is not None and self.models.has_trained:
            models = 1 if self.models.ensemble is None else self.models.ensemble.models.size
            check_movable(self.plan, plan, self._arrangement.planned, placed, models)
        self._arrangement.follow(placed)
        check_shared(plan.graph, plan.cuts, self._cluster.stage_map)

    def _load_others(self, plan: Plan, graphs: Sequence[CallGraph]) -> None:
        """Further steps are cut like the one that the plan was made for."""
        for graph in graphs:
            try:
                self._load_like(plan, graph)
            except StepOrderError:
                if not plan.copied:  # finer units might find an order among copies
                    raise
            except PartitionError:
                pass  # it needs finer units: a new capture is made when it is run

    def _load_like(self, plan: Plan, graph: CallGraph, relays: Collection[int] = ()) -> None:
        """Make another step runnable on the stages of a plan."""
        cuts = cut_like(graph, plan.stages_of, plan.num_stages)
        check_shared(graph, cuts, self._cluster.stage_map)
        self.pipeline.load(graph, cuts, relays=relays)

    def place_parameters(self, plan: Plan) -> dict[str, int]:
        """Divide the module by a plan of which it is only known who owns what. Every process calls it.

        Returns:
            Full name of each parameter and buffer that one process owns -> its rank.
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
        """Go on with one model after a failure, without waiting for anybody."""
        self._forget_kept()
        self.models.abandon()

    def restore(self) -> None:
        """Every process holds the whole module again, unless it began on meta. Every process calls it.

        What began on meta is too large for that: each process keeps its own stages, on the host, and all buffers.
        """
        self.models.dissolve()
        self.pipeline.unload()
        self._forget_kept()
        if self.plan is not None:
            self.holdings.restore()

    def halve(self, leave: Halving) -> None:
        """From the next plan on there is leave to make fewer stages, where fewer are faster. Every process calls it."""
        if not leave.as_groups:
            leave = replace(leave, check=partial(self._check_halved, leave.check))
        self._maker.halving = leave

    def _check_halved(self, check: Callable[[Plan, Sequence[int]], None], plan: Plan, counts: Sequence[int]) -> None:
        """Raise a PartitionError if so many processes cannot share the stages of a plan, for any step."""
        check(plan, counts)
        shared = self._cluster.stage_map.placed(processes_of(counts))
        check_shared(plan.graph, plan.cuts, shared)
        for graph in (self.pipeline.graph(step) for step in self.pipeline.steps if step != plan.graph.step):
            wide = scattered(graph, plan.stages_of)
            if wide and all(map(self._maker.planner.subject.opens, wide)):
                # they are opened when the step runs next; until then any stage might have all of it
                cuts: Sequence[int] = (len(graph.nodes),) * (plan.num_stages - 1)
            else:
                cuts = cut_like(graph, plan.stages_of, plan.num_stages)
            check_shared(graph, cuts, shared)

    def replan(self, placement: Placement | None = None, **changes: Any) -> None:
        """Make another plan with the next step of training that begins with cleared gradients. Every process calls it.

        Weights, optimizer states and parallel models move to where it wants them. It takes one more step, or two, until
        the batches are there that every process has all of: those that are under way hold what the old plan needs.

        Args:
            placement: of several stages on each process; None: as it is.
            changes: attributes that the planner is to have, or ``rolling``.
        """
        if self.holdings.shards is not None:
            raise ConfigurationError(
                "shard_optimizer_states=True keeps optimizer states where they are, so stages stay as they are while "
                "training runs; use False, or leave the stages"
            )
        self._maker.change(**changes)
        self._arrangement.placement = placement or self._arrangement.placement
        self.replans = True
        self.pipeline.need_all("training_step")

    def keep_frozen(self, limit: float, folder: str | None) -> None:
        """Keep the outputs of frozen layers, with the next plan. Every process calls it.

        Args:
            limit: bytes on the host, of each process; what is beyond goes into files.
            folder: for these files; None: where temporary files go.
        """
        self.pipeline.kept = FrozenOutputs(limit, folder)
        self._maker.change(keeps=True)

    def _forget_kept(self) -> None:
        if self.pipeline.kept is not None:
            self.pipeline.kept.stop()

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """Weights: on rank 0 those of all stages, or if not ``whole`` everywhere one's own. Every process calls it.

        Of parallel models those of the reference.
        """
        with self.models.showing_reference():
            return self.holdings.state_dict() if whole else self.holdings.own_state_dict()
