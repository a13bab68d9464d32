"""The deployment of a module on processes: from the first batch until every process holds the whole module again."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.reads import Key
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.execution import Execution
from lightning_avgpipe.engine.own_module import VersionedWeights
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.engine.stage_step import remarks
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.planning import Plan, cut_like
from lightning_avgpipe.planning.planner import Planner, PlanSource
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.training.group_traffic import traffic_lines
from lightning_avgpipe.training.holdings import Holdings
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.training.plan_maker import Examples, PlanMaker
from lightning_avgpipe.training.replicas import check_shared
from lightning_avgpipe.training.stepping import OptimizerShards
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import joined, listed, nearest
from lightning_avgpipe.utils.placeholder import Absent
from lightning_avgpipe.weights.initialisation import Origin

_log = logging.getLogger(__name__)


class Deployment:
    """A module on the processes of a cluster: it plans the stages, and moves parameters and optimizer states.

    Args:
        module: module to divide; whole on every process, or with parameters on meta, so that no process has all of it.
        cluster: cluster with open channels.
        planner: planner for the module.
        optimizers: returns the current optimizers of the module.
        origin: source of weights that no process has; None if the module is whole.
        averaging: options of the averaging of parallel models.
        observers: modules that only read values (metrics).
        weights: versions of the weights in training; None if there is only one.
        shards: whether replicas divide the states of optimizers among themselves.
        execution: options of the execution of units.

    Attributes:
        weights: as given.
        pipeline: pipeline of the prepared step functions; with parallel models, pipeline 0, which also evaluates.
        plan: current plan; None before the first step.
        is_final: whether the plan is the one that training uses; the plan of a sanity check is provisional.
        parallel: pipelines of the models that train.
        undivided: evaluation steps that the stages of the plan cannot run -> the reason. Rank 0 runs them whole.
        replans: whether the next training step that begins with cleared gradients is to make a new plan.
        holdings: parameters, buffers and states of each process.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        planner: Planner,
        optimizers: Callable[[], Sequence[Optimizer]],
        origin: Origin | None,
        averaging: Averaging,
        observers: Collection[nn.Module],
        weights: VersionedWeights | None,
        shards: bool,
        execution: Execution,
    ) -> None:
        self.weights = weights
        versions = {} if weights is None else {"training_step": weights}
        self.pipeline = Pipeline(cluster, module, execution, weights=versions)
        self._may_repeat = execution.static is not False
        self.plan: Plan | None = None
        self.undivided: dict[str, str] = {}
        self._averaging = averaging
        make = partial(Ensemble, module, optimizers, self._averaging, observers)
        self.parallel = ParallelPipelines(module, cluster, self.pipeline, make, execution)
        self._module, self._cluster = module, cluster
        shared = OptimizerShards(module, cluster) if shards else None
        self.holdings = Holdings(module, cluster, optimizers, origin, shared)
        self._maker = PlanMaker(module, cluster, planner, self.holdings, optimizers)
        self.is_final = False
        self.replans = False
        self._given = self._planned = cluster.stage_map  # stage map before any plan, and that of the current plan
        self._placement = cluster.stage_map.placement  # of several stages on each process, for the next plan
        self._awaits_plan = False  # whether the training step that begins is to make a new plan

    def prepare(self, examples: Examples, decides: bool, schedule: Schedule, num_pipelines: int = 1) -> bool:
        """Make a step function runnable, unless it is already. Every process calls it.

        Args:
            examples: example arguments of the step. If the step skips all of them, nothing changes.
            decides: whether the plan is made for this step. In training, it is made for ``training_step``; a validation
                before that (a sanity check) runs on a provisional plan, for which no process gives up weights.
            schedule: schedule of the step.
            num_pipelines: number of pipelines that will train.

        Returns:
            Whether a new final plan was made.

        Raises:
            MicroBatchError: the step fails on an example, and may be tried again with whole batches. Nothing changed.
        """
        if self._awaits_plan and examples.name == "training_step":
            self._awaits_plan = False
            if self._divide(examples, True, schedule, num_pipelines):
                return True
            self._cluster.rearrange(self._planned)
        if examples.name in self.undivided or (examples.name in self.pipeline.steps and (self.is_final or not decides)):
            return False
        if self.plan is None or (decides and not self.is_final):
            return self._divide(examples, decides, schedule, num_pipelines) and decides
        graph = self._maker.graph_like(examples, self.plan)
        if isinstance(graph, str):
            self.undivided[examples.name] = graph
        elif graph is not None:
            try:
                self._load_like(self.plan, graph, schedule.relays)
            except PartitionError as error:
                if examples.trains:
                    raise
                self.undivided[examples.name] = str(error)
        return False

    def sketches(self, examples: Examples, schedules: Sequence[Schedule], num_pipelines: int) -> list[Plan]:
        """Return the plans that a step would have with these schedules and unlimited memory. Every process calls it.

        It is called before the first plan, and carries none out. If the step skips all examples there is no plan.
        """
        maker, planner, found = self._maker, self._maker.planner, list[Plan]()
        for schedule in schedules:
            maker.change(num_stages=schedule.num_stages, split_points=None, memory_limit=math.inf)
            plan = maker.final(examples, schedule, num_pipelines, found[-1] if found else None, False)
            found += [plan] if isinstance(plan, Plan) else []
        maker.planner = planner
        return found

    def arrange(self, batches: Sequence[Any]) -> bool:
        """Decide whether to make a new plan. Every process calls it.

        It is called when a step of training begins with cleared gradients. If a new plan will be made, the processes
        are arranged for its number of stages.

        Args:
            batches: batches of the step.

        Returns:
            Whether a new plan will be made: one was asked for, and every process has all tensors of the batches, which
            it needs to host any stage.
        """
        if not self.replans:
            return False
        lacks = any(isinstance(leaf, Absent) for batch in batches for leaf in tree.tensors(batch))
        self._awaits_plan = not self._cluster.world.count(lacks)
        if self._awaits_plan:
            if self.parallel.ensemble is not None:
                self.parallel.ensemble.begin_relocation()
            num_stages = self._maker.planner.num_stages
            self._cluster.rearrange(replace(self._given, num_stages=num_stages, placement=self._placement))
        return self._awaits_plan

    def _divide(self, examples: Examples, final: bool, schedule: Schedule, num_pipelines: int) -> bool:
        """Make a plan and carry it out; return whether one could be made."""
        if final:
            plan = self._maker.final(examples, schedule, num_pipelines, self.plan, self.is_final)
        else:
            plan = self._maker.provisional(examples, schedule, num_pipelines)
        if isinstance(plan, Plan) and not examples.trains:
            plan = _why_undivided(plan) or plan
        if isinstance(plan, str):
            self.undivided[examples.name] = plan
            return False
        if plan is None:
            return False
        if final:
            traffic = traffic_lines(plan, self._module, self._cluster, self._averaging)
            followed = remarks(plan.graph, plan.cuts) if self._may_repeat else []
            plan = replace(plan, remarks=(*plan.remarks, *followed, *traffic))
        placed = self._cluster.stage_map.placed(plan.devices) if plan.devices else self._cluster.stage_map
        if self.is_final and self.plan is not None and self.parallel.has_trained:
            models = 1 if self.parallel.ensemble is None else self.parallel.ensemble.models.size
            check_attributes_do_not_move(self.plan, plan, self._planned, placed, models)
        self._planned = placed
        self._cluster.rearrange(placed)
        check_shared(plan.graph, plan.cuts, self._cluster.stage_map)
        others = [self.pipeline.graph(name) for name in self.pipeline.steps if name != examples.name]
        was_provisional = not self.is_final
        self.pipeline.steps.clear()
        self.undivided.clear()
        self.plan, self.is_final, self.replans = plan, final, False
        self.parallel.only_first()
        self._place()
        if was_provisional:
            self.holdings.equalise_start(plan.copied)
        self.pipeline.load(plan.graph, plan.cuts, plan.kept, schedule.relays, plan.wire_formats)
        self._load_others(plan, others)
        return True

    def _load_others(self, plan: Plan, graphs: Sequence[CallGraph]) -> None:
        """Make other steps runnable, with the cuts of the step for which the plan was made."""
        for graph in graphs:
            try:
                self._load_like(plan, graph)
            except PartitionError as error:  # capturing it again may open units further
                _log.debug("%s is captured anew when it runs: %s", graph.step, error)

    def _load_like(self, plan: Plan, graph: CallGraph, relays: Collection[int] = ()) -> None:
        """Make another step runnable on the stages of a plan."""
        cuts = cut_like(graph, plan.stages_of, plan.num_stages)
        check_shared(graph, cuts, self._cluster.stage_map)
        self.pipeline.load(graph, cuts, relays=relays, wire_formats=plan.wire_formats)

    def run_whole(self, run: Callable[[], Any], what: str) -> Any:
        """Run a function on rank 0 of each group, which has all weights while it runs.

        Weights of a module that began on meta are fetched one by one, as they are used. Every process calls it; rank 0
        gets the function's result, and the others None.

        Args:
            run: function, which runs on rank 0 only.
            what: what rank 0 is doing, for messages.
        """

        def on_device() -> Any:
            if self.plan is None:  # the module has not been moved to the device yet
                self._module.to(self._cluster.device)
            return run()

        with self.holdings.whole_on_rank_zero(device=self._cluster.device):
            return self.holdings.gather.run_on_rank_zero(on_device, what)

    def place_parameters(self, plan: Plan) -> dict[str, int]:
        """Divide the module by a plan that only assigns parameters and buffers to stages. Every process calls it.

        Returns:
            The rank of the owner of each parameter and buffer that a stage owns, by full name.
        """
        self.plan, self.is_final = plan, True
        self._place()
        owner_of = self.holdings.owner_of
        return {name: owner_of[name] for name in plan.stages_of if name in owner_of}

    def _place(self) -> None:
        assert self.plan is not None
        self.holdings.place(
            self.plan, self.is_final, [] if self.parallel.ensemble is None else self.parallel.ensemble.movable_data
        )

    @contextlib.contextmanager
    def shared(self) -> Iterator[torch.device]:
        """Give every process all weights of all models within this context, on the host. Every process calls it.

        A module that began on meta is too large for that, so it stays divided.

        Returns:
            A context that yields the device of the weights.
        """
        ensemble = self.parallel.ensemble
        if ensemble is not None:
            ensemble.begin_relocation()
        others = () if ensemble is None else ([ensemble.tensors_of_models], lambda: ensemble.models.other_tensors)
        with self.holdings.shared(*others) as device:
            yield device

    def share(self) -> None:
        """Copy what steps have registered and changed so far to every process. Every process calls it."""
        self.holdings.share({name for step in self.pipeline.steps.values() for name in step.graph.changed})

    def restore(self) -> None:
        """Bring the whole module back to every process, unless it began on meta. Every process calls it.

        A module that began on meta is too large for that: each process keeps its own stages, on the host, and all
        buffers.
        """
        self.parallel.dissolve()
        self.pipeline.steps.clear()
        if self.plan is not None:
            self.holdings.restore()

    def replan(self, placement: Placement | None = None, **changes: Any) -> None:
        """Request a new plan for the next training step that begins with cleared gradients. Every process calls it.

        Weights, optimizer states and parallel models move as the plan requires. The plan may come a step or two later,
        since batches in flight hold only what the current plan needs, and a new plan needs whole batches everywhere.

        Args:
            placement: placement of several stages on each process; None leaves it as it is.
            changes: attributes to change in the planner, or ``rolling``.
        """
        if self.holdings.shards is not None:
            raise ConfigurationError(
                "with shard='optimizer' the stages cannot change while training runs, because optimizer states do not "
                "move between processes; leave shard out, or do not change the stages"
            )
        self._maker.change(**changes)
        self._placement = placement or self._placement
        self.replans = True
        self.pipeline.need_all("training_step")

    @property
    def planner(self) -> Planner:
        """The planner of the next plan."""
        return self._maker.planner

    def plan_by(self, source: PlanSource) -> None:
        """Take later plans from another source. Every process calls it."""
        self._maker.change(source=source)

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """Return the state dict of the module; of parallel models, that of the reference. Every process calls it.

        Args:
            whole: whether rank 0 returns the weights of all stages; otherwise every process returns its own.
        """
        with self.parallel.showing_reference():
            return self.holdings.state_dict() if whole else self.holdings.own_state_dict()


def _why_undivided(plan: Plan) -> str | None:
    """Return why the stages of a plan may not suit other batches of an evaluation; None if they suit all.

    A loop that decodes token by token calls all units again and again, and how often depends on what it decodes.
    """
    graph = plan.graph
    if not plan.copied or all(graph.data_dependent_modules[cut] is None for cut in plan.cuts):
        return None
    names = listed([repr(name) for name in sorted(plan.copied)])
    return (
        f"{graph.step} reads numbers of values between calls of the same submodules, so that another batch may call "
        f"them more or less often, and several stages need their weights ({names})"
    )


# -- attributes that steps keep for the next batch: unlike weights and buffers, they do not move -----------------------


def check_attributes_do_not_move(before: Plan, after: Plan, old: StageMap, new: StageMap, models: int) -> None:
    """Check that a relocation does not change the values of attributes that a step reads.

    The last stage never moves, and it has the right values of attributes that code between units assigns. Attributes
    that units assign have the right values only on the processes of these units. With several models, each has its own
    values, which only its stages have.

    Args:
        before: plan with which training has run so far.
        after: next plan, of the same step.
        old: stage map of ``before``.
        new: stage map of ``after``.
        models: number of models, N.

    Raises:
        ConfigurationError: attributes would have other values; the message names them.
    """
    found = sorted({joined(*key) for key in _staying(before, after, old, new, models)})
    if found:
        raise ConfigurationError(
            f"{before.graph.step} keeps {', '.join(map(repr, found))} for the next batch, which would not move with "
            "its stage to another process or model. Keep it in a buffer (register_buffer), or leave num_stages and "
            "split_points as they are while training runs"
        )


def _staying(before: Plan, after: Plan, old: StageMap, new: StageMap, models: int) -> Iterator[Key]:
    for plan in (before, after):
        graph, last = plan.graph, plan.cuts[-1] if plan.cuts else 0
        several = old.group_size > 1
        early = {key for key, position in graph.reads.items() if models > 1 or (several and position <= last)}
        yield from early.intersection(graph.changed_between)
    for key in {*before.graph.changed_by_units, *before.graph.written_tensors}:
        if models > 1 or hosts_of(before, key[0], old) != hosts_of(after, key[0], new):
            yield key


def hosts_of(plan: Plan, path: str, stage_map: StageMap) -> set[int]:
    """Return the ranks that host a module: those of the unit it is in, or of all units in it. "" means all units."""
    stages_of = plan.stages_of
    above = nearest(path, stages_of)
    names = [above] if above else [n for n in stages_of if n.startswith(f"{path}.") or not path]
    return {stage_map.owner(stage) for name in names for stage in stages_of[name]}
