"""The deployment of a module on processes: from its first batch until every process holds all of it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.units import divisible
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.elastic.averaging import Elasticity
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import ConfigurationError, PartitionError, StepOrderError
from lightning_avgpipe.planning import Plan, cut_like, scattered
from lightning_avgpipe.planning.halving import Halving, processes_of
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.training.holdings import Holdings
from lightning_avgpipe.training.kept import check_movable
from lightning_avgpipe.training.optimizer_shards import OptimizerShards
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.training.plan_maker import Examples, PlanMaker
from lightning_avgpipe.training.replicas import check_shared
from lightning_avgpipe.training.state import (
    own_state_dict,
)
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
        shards: which replica steps which parameters; None: each steps all.
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
    ) -> None:
        self.weights = weights
        versions = {} if weights is None else {"training_step": weights}
        self.pipeline = Pipeline(cluster, module, planner.recompute, weights=versions)
        self.plan: Plan | None = None
        self.models = ParallelPipelines(
            module, cluster, self.pipeline, optimizers, elasticity or Elasticity(), observers, planner.recompute
        )
        self._module = module
        self._cluster = cluster
        self.shards = OptimizerShards(module, cluster) if shards else None
        self.holdings = Holdings(module, cluster, optimizers, origin, self.shards)
        self._maker = PlanMaker(module, cluster, planner, self.holdings, optimizers, bandwidth)
        self._final = False
        self.replans = False
        self._given = cluster.stage_map  # before any plan
        self._arranged = cluster.stage_map  # as of the plan
        self._placement = cluster.stage_map.placement
        self._due = False  # a plan is made with the step that begins

    def needed_elsewhere(self) -> frozenset[tuple[str, str]]:
        """Path of a module and name of the attributes that steps read on other processes, and of buffers there."""
        owned = (name.rpartition(".") for name in self.holdings.answers if self.holdings.answered_elsewhere(name))
        return self.pipeline.read_elsewhere() | {(path, name) for path, _, name in owned}

    def kept_elsewhere(self) -> frozenset[str]:
        """Full names of parameters that other processes hold, alone or as well, and of buffers that they change."""
        assert self.plan is not None
        rank = self._cluster.rank
        used = self.plan.stages_of
        here = dict(self._module.named_parameters())
        others = {name for name in here if any(self._cluster.stage_map.ranks(k) != (rank,) for k in used.get(name, ()))}
        changed = frozenset().union(*(self.pipeline.graph(step).changed for step in self.pipeline.steps))
        return frozenset(filter(self.holdings.answered_elsewhere, changed - here.keys())) | others

    def prepare(
        self,
        step: str,
        run: Callable[..., Any],
        examples: Examples,
        decides: bool,
        schedule: Schedule,
        num_pipelines: int = 1,
    ) -> bool:
        """Make a step function runnable, if it is not. Every process calls it.

        Args:
            step: name of the step function.
            run: executes it.
            examples: what it is called with, of which the first is followed that training does not skip. If it skips
                all of them, the step stays as it is.
            decides: whether the plan is made for this step. In training ``training_step`` decides; a validation that
                comes before it (a sanity check) runs on a provisional plan, for which nobody gives anything up.
            schedule: that it will run with.
            num_pipelines: that will train.
        Returns:
            Whether a plan was made that stays.
        Raises:
            MicroBatchError: it fails on an example, and batches may stay whole. Nothing has changed.
        """
        if self._due and step == "training_step":
            self._due = False
            if self._divide(step, run, examples, True, schedule, num_pipelines):
                return True
            self._cluster.rearrange(self._arranged)
        if step in self.pipeline.steps and (self._final or not decides):
            return False
        if self.plan is None or (decides and not self._final):
            return self._divide(step, run, examples, decides, schedule, num_pipelines) and decides
        plan = self.plan
        graph = self._maker.graph_like(step, run, examples, plan)
        if graph is not None:
            self._load_like(plan, graph, schedule.relays)
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
        self._due = not int(self._cluster.world.sum(torch.tensor(int(lacks))))
        if self._due:
            if self.models.ensemble is not None:
                self.models.ensemble.begin_relocation()
            wanted = replace(self._given, num_stages=self._maker.planner.num_stages, placement=self._placement)
            self._cluster.rearrange(wanted)
        return self._due

    def _divide(
        self,
        step: str,
        run: Callable[..., Any],
        examples: Examples,
        final: bool,
        schedule: Schedule,
        num_pipelines: int,
    ) -> bool:
        """Make a plan and follow it; returns whether there is one."""
        if final:
            plan = self._maker.final(step, run, examples, schedule, num_pipelines, self.plan, self._final)
        else:
            plan = self._maker.provisional(step, run, examples, schedule, num_pipelines)
        if plan is None:
            return False
        self._follow(plan, [graph for graph in self.graphs if graph.step != step], final, schedule.relays)
        return True

    @property
    def graphs(self) -> list[CallGraph]:
        """Of the step functions that can be run."""
        return [self.pipeline.graph(name) for name in self.pipeline.steps]

    def why_not_given(self) -> str:
        """Why other processes could not go on from :attr:`plan` and :attr:`graphs`; empty if they could."""
        if self.plan is None or not self._final or "training_step" not in self.pipeline.steps:
            return "no step of training has been followed yet"
        if self.replans or self._due or self._arranged != replace(self._given, layout=self._arranged.layout):
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
        self._arranged = self._cluster.stage_map
        self._place()
        if begins_alike:
            self.holdings.begin_alike(plan.copied)
        self.pipeline.load(plan.graph, plan.cuts, plan.frozen, relays)
        if not plan.frozen:
            self._forget_kept()
        self._load_others(plan, others)

    def _arrange_for(self, plan: Plan) -> None:
        """The processes get the stages that a plan gives them."""
        placed = self._cluster.stage_map.placed(plan.devices) if plan.devices else self._cluster.stage_map
        if self._final and self.plan is not None and self.models.has_trained:
            models = 1 if self.models.ensemble is None else self.models.ensemble.models.size
            check_movable(self.plan, plan, self._arranged, placed, models)
        self._cluster.rearrange(placed)
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

    def halve(self, memory_limit: float, check: Callable[[Plan, Sequence[int]], None]) -> None:
        """From the next plan on processes may share stages, where fewer of them are faster. Every process calls it.

        Args:
            memory_limit: bytes that each of fewer stages may use.
            check: raises a PartitionError if so many processes cannot share the stages of a plan.
        """

        def check_all(plan: Plan, counts: Sequence[int]) -> None:
            check(plan, counts)
            shared = self._cluster.stage_map.placed(processes_of(counts))
            check_shared(plan.graph, plan.cuts, shared)
            for graph in (self.pipeline.graph(step) for step in self.pipeline.steps if step != plan.graph.step):
                wide = scattered(graph, plan.stages_of)
                if wide and all(divisible(self._module, unit, self._maker.planner.observers) for unit in wide):
                    # they are opened when the step runs next; until then any stage might have all of it
                    cuts: Sequence[int] = (len(graph.nodes),) * (plan.num_stages - 1)
                else:
                    cuts = cut_like(graph, plan.stages_of, plan.num_stages)
                check_shared(graph, cuts, shared)

        self._maker.halving = Halving(memory_limit, check_all)

    def advise(self, memory_limit: float) -> None:
        """From the next plan on, each says how many stages there were best in more groups. Every process calls it.

        Args:
            memory_limit: bytes that each of them may use.
        """
        self._maker.halving = Halving(memory_limit, as_groups=True)

    def replan(self, placement: Placement | None = None, **changes: Any) -> None:
        """Make another plan with the next step of training that begins with cleared gradients. Every process calls it.

        Weights, optimizer states and parallel models move to where it wants them. It takes one more step, or two, until
        the batches are there that every process has all of: those that are under way hold what the old plan needs.

        Args:
            placement: of several stages on each process; None: as it is.
            changes: attributes that the planner is to have.
        """
        if self.shards is not None:
            raise ConfigurationError(
                "shard_optimizer_states=True keeps optimizer states where they are, so stages stay as they are while "
                "training runs; use False, or leave the stages"
            )
        self._maker.change(**changes)
        self._placement = placement or self._placement
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
            if not whole:
                return own_state_dict(self._module, self._cluster, self.holdings.answers)
            return self.holdings.state_dict(self._module) if self._cluster.gathers else self._module.state_dict()
