"""The deployment of a module on processes: from its first batch until every process holds all of it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.mesh import Mesh
from lightning_avgpipe.elastic.averaging import Elasticity
from lightning_avgpipe.elastic.ensemble import Ensemble
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import PartitionError, SkippedStepError, StepOrderError
from lightning_avgpipe.planning import Plan, cut_like
from lightning_avgpipe.planning.model_memory import state_copies
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.training.state import (
    drop_foreign_state,
    full_ensemble_state,
    full_state_dict,
    load_ensemble_state,
    load_present_state,
    move_state,
    own_state_dict,
    owners,
    spread_parameters,
)
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.torch_compat import address
from lightning_avgpipe.weights.initialisation import Origin
from lightning_avgpipe.weights.on_demand import OnDemandGather
from lightning_avgpipe.weights.ownership import give_up, take_back

__all__ = ["Deployment"]


class Deployment:
    """Plans the stages of a module, and moves parameters and optimizer states to where the plan wants them.

    Args:
        module: to divide; whole on every process, or with parameters on meta that are never brought together.
        mesh: with open channels.
        planner: makes plans for the module.
        optimizers: those that step the module, as of when it is called.
        origin: of the contents that no process has; None if the module is whole.
        elasticity: how parallel models are held together.
        observers: modules that only look at values (metrics).

    Attributes:
        pipeline: runs the step functions that are prepared; with parallel models, number 0, and evaluations.
        plan: None before the first step.
        ensemble: the parallel models, from the first step of training on; None if there is one model.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        planner: Planner,
        optimizers: Callable[[], Sequence[Optimizer]],
        origin: Origin | None = None,
        elasticity: Elasticity | None = None,
        observers: Collection[nn.Module] = (),
    ) -> None:
        self.pipeline = Pipeline(mesh, module, planner.recompute)
        self.plan: Plan | None = None
        self.ensemble: Ensemble | None = None
        self._pipelines = [self.pipeline]
        self._elasticity = elasticity or Elasticity()
        self._observers = observers
        self._saved_ensemble: Mapping[str, Any] | None = None
        self._module = module
        self._mesh = mesh
        self._planner = planner
        self._optimizers = optimizers
        self._gather = OnDemandGather(module, mesh, origin)
        self._scattered = origin is not None  # no process may hold the whole module
        self._unloaded: Sequence[Mapping[str, Any]] = ()  # states for optimizers whose parameters have no contents yet
        self._final = False
        self._owner: dict[str, int] = {}

    def needed_elsewhere(self) -> frozenset[tuple[str, str]]:
        """Path of a module and name of the attributes that steps read on other processes, and of buffers there."""
        owned = (name.rpartition(".") for name, rank in self._owner.items() if rank != self._mesh.rank)
        return self.pipeline.read_elsewhere() | {(path, name) for path, _, name in owned}

    def kept_elsewhere(self) -> frozenset[str]:
        """Full names of parameters that other processes hold, alone or as well, and of buffers that they change."""
        assert self.plan is not None
        rank = self._mesh.rank
        used = self.plan.stages_of
        here = dict(self._module.named_parameters())
        others = {name for name in here if any(self._mesh.rank_of(k) != rank for k in used.get(name, ()))}
        changed = frozenset().union(*(self.pipeline.graph(step).changed for step in self.pipeline.steps))
        return changed.difference(here, (n for n in changed if self._owner.get(n, rank) == rank)) | others

    def prepare(
        self,
        step: str,
        run: Callable[..., Any],
        examples: Sequence[Sequence[Any]],
        decides: bool,
        schedule: Schedule,
        num_pipelines: int = 1,
    ) -> bool:
        """Make a step function runnable, if it is not. Every process calls it.

        Args:
            step: name of the step function.
            run: executes it.
            examples: arguments of micro-batches, of which the first is followed that training does not skip. If it
                skips all of them, the step stays as it is.
            decides: whether the plan is made for this step. In training ``training_step`` decides; a validation that
                comes before it (a sanity check) runs on a provisional plan, for which nobody gives anything up.
            schedule: that it will run with.
            num_pipelines: that will train.
        Returns:
            Whether a plan was made that stays.
        """
        if step in self.pipeline.steps and (self._final or not decides):
            return False
        if self.plan is None or (decides and not self._final):
            return self._divide(step, run, examples, decides, schedule, num_pipelines) and decides
        plan = self.plan
        graph = self._on_first(examples, lambda args: self._planner.capture_like(step, run, args, plan))
        if graph is not None:
            self.pipeline.load(graph, cut_like(graph, plan.stages_of, plan.num_stages))
        return False

    def _on_first(self, examples: Sequence[Sequence[Any]], make: Callable[[Sequence[Any]], Any]) -> Any:
        """What is made of the first example that is not skipped; None if all are. Every process calls it."""

        def attempt(args: Sequence[Any]) -> Any:
            try:
                with alone():
                    return make(args)
            except SkippedStepError:
                return None

        for args in examples:
            made = self._gather.on_rank_zero(partial(attempt, args))
            if made is not None:
                return made
        return None

    def _divide(
        self,
        step: str,
        run: Callable[..., Any],
        examples: Sequence[Sequence[Any]],
        final: bool,
        schedule: Schedule,
        num_pipelines: int,
    ) -> bool:
        units = self.plan.graph.units if self.plan is not None else ()
        planner = self._planner
        links = self._mesh.links() if final and planner.measures else ()
        copies, groups = state_copies(self._optimizers()), self._mesh.num_groups
        conditions = Conditions(schedule, links, copies, num_pipelines, groups)
        make = partial(planner.plan, units=units) if final else planner.provisional
        plan: Plan | None = self._on_first(examples, lambda args: make(step, run, args, conditions=conditions))
        if plan is None:
            return False
        others = [self.pipeline.graph(name) for name in self.pipeline.steps if name != step]
        self.pipeline.unload()
        self.plan, self._final = plan, final
        self._owner = owners(self._module, self._mesh, plan.stages_of)
        self._place_parameters()
        self._begin_alike()
        self.pipeline.load(plan.graph, plan.cuts)
        for graph in others:
            try:
                self.pipeline.load(graph, cut_like(graph, plan.stages_of, plan.num_stages))
            except StepOrderError:
                if not plan.copied:  # finer units might find an order among copies
                    raise
            except PartitionError:
                pass  # it needs finer units: a new capture is made when it is run
        return True

    def place_parameters(self, plan: Plan) -> dict[str, int]:
        """Divide the module by a plan of which it is only known who owns what. Every process calls it.

        Returns:
            Full name of each parameter and buffer that one process owns -> its rank.
        """
        self.plan, self._final = plan, True
        self._owner = owners(self._module, self._mesh, plan.stages_of)
        self._place_parameters()
        return {name: self._owner[name] for name in plan.stages_of if name in self._owner}

    def _begin_alike(self) -> None:
        """All groups begin with the weights and buffers of the first."""
        replica_group = self._mesh.replica_group
        if replica_group is not None:
            parameters = [p.detach() for p in self._module.parameters() if not p.is_meta]
            replica_group.copy([*parameters, *self._module.buffers()])

    # -- parallel models ---------------------------------------------------------------------------------------------

    def parallel(self, num_pipelines: int) -> list[Pipeline]:
        """N pipelines for a step of training, which is prepared. Every process calls it."""
        if num_pipelines == self._mesh.num_groups == 1:
            self.dissolve()
            self._saved_ensemble = None
            return self._pipelines
        begins = self.ensemble is None
        if self.ensemble is None:
            assert self.plan is not None
            self.ensemble = Ensemble(
                self._module,
                self._optimizers,
                self._elasticity,
                self._observers,
                self._mesh.replica_group,
                self.plan.graph.changed,
                self._written(),
            )
        ensemble = self.ensemble
        stale = ensemble.follow() | ensemble.resize(num_pipelines)
        self._load_ensemble()
        if stale or begins:
            self._mesh.widen(num_pipelines)
            self.pipeline.place = partial(ensemble.place, 0)
            others = [
                Pipeline(
                    self._mesh,
                    self._module,
                    self._planner.recompute,
                    n,
                    partial(ensemble.place, n),
                    partial(ensemble.foreign_tensors, n),
                )
                for n in range(1, num_pipelines)
            ]
            self._pipelines = [self.pipeline, *others]
            for pipeline in others:
                pipeline.load_like(self.pipeline, "training_step")
            ensemble.place(0)
        return self._pipelines

    def _written(self) -> list[Tensor]:
        """Tensors in attributes and variables that training writes into, beside parameters and buffers."""
        keys = self.pipeline.graph("training_step").written
        found = Objects(variable(self._module, *key) for key in keys).tensors
        named = {address(t) for t in (*self._module.parameters(), *self._module.buffers())}
        return [t for t in found if address(t) not in named and t.is_leaf and not t.requires_grad]

    @property
    def saved_models(self) -> int | None:
        """How many parallel models wait to be loaded; None unless a checkpoint has been loaded since they began."""
        return None if self._saved_ensemble is None else len(self._saved_ensemble.get("models", ()))

    def load_models_later(self, saved: Mapping[str, Any]) -> None:
        """Load parallel models when they begin to train; if it is another number, they start from the reference."""
        self._saved_ensemble = saved

    def _load_ensemble(self) -> None:
        assert self.ensemble is not None
        if self._saved_ensemble is not None and self.saved_models == self.ensemble.total:
            load_ensemble_state(self.ensemble, self._saved_ensemble)
        self._saved_ensemble = None

    def ensemble_state(self) -> dict[str, Any] | None:
        """On rank 0 what parallel models have of their own; None if there is one model. Every process calls it."""
        if self.ensemble is None:
            return None
        return full_ensemble_state(self.ensemble, self._mesh, self._owner)

    def dissolve(self, average: bool = True) -> None:
        """Go on with one model: the reference, after a last averaging if that is wanted. Every process calls it."""
        if self.ensemble is not None:
            self.ensemble.dissolve(average)
        self.ensemble = self.pipeline.place = None
        self._pipelines = [self.pipeline]

    def abandon(self) -> None:
        """Go on with one model after a failure, without waiting for anybody."""
        if self.ensemble is not None:
            self.ensemble.abandon()
        self.dissolve(average=False)

    @contextlib.contextmanager
    def showing_reference(self, reference: bool = True) -> Iterator[None]:
        """Within this context the module has the weights of the reference, or those of pipeline 0."""
        with contextlib.nullcontext() if self.ensemble is None else self.ensemble.showing_reference(reference):
            yield

    def show_reference(self, reference: bool) -> None:
        """From now on the module has the weights of the reference, or those of pipeline 0."""
        if self.ensemble is not None:
            self.ensemble.show_reference(reference)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within this context parallel models come and go on trial; after it saved ones wait to be loaded as before."""
        saved, self._saved_ensemble = self._saved_ensemble, None
        try:
            yield
        finally:
            self.dissolve(average=False)
            self._saved_ensemble = saved

    # -- who holds what ----------------------------------------------------------------------------------------------

    def _place_parameters(self) -> None:
        """Bring the own stages to the device; if the plan is final, give the others' parameters up."""
        device, foreign = self._mesh.device, self._foreign()
        self._gather.bring([name for name, _ in self._module.named_parameters() if name not in foreign])
        for name, parameter in self._module.named_parameters():
            if name not in foreign and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for buffer in self._module.buffers():
            buffer.data = buffer.data.to(device)
        if self._final:
            ids = {id(p) for name, p in self._module.named_parameters() if name in foreign}
            for optimizer in self._optimizers():
                drop_foreign_state(optimizer, ids)
            give_up(self._module, foreign)
            self._load_optimizers()
        for optimizer in self._optimizers():
            move_state(optimizer, device)

    def _foreign(self) -> set[str]:
        """Parameters that only other processes use. What no stage uses is kept by all: nobody else would have it."""
        assert self.plan is not None
        used = self.plan.stages_of
        names = [name for name, _ in self._module.named_parameters() if name in used]
        return {name for name in names if all(self._mesh.rank_of(k) != self._mesh.rank for k in used[name])}

    def sum_copied_gradients(self) -> None:
        """Where several stages use a parameter, each gets the gradient of all. Every process calls it."""
        for pipeline in self._pipelines:
            pipeline.copies("training_step").sum_gradients()

    def verify_copies(self) -> None:
        """Check that what several stages use is the same on all of them. Every process calls it."""
        with self.showing_reference(False):
            for pipeline in self._pipelines:
                pipeline.copies("training_step").verify()

    def load_later(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load optimizer states when the parameters are there that they belong to.

        Args:
            states: one per optimizer, of the whole module; they may be mapped from a file.
        """
        self._unloaded = states

    def _load_optimizers(self) -> None:
        for optimizer, state in zip(self._optimizers(), self._unloaded, strict=False):
            load_present_state(optimizer, state["state"])
        self._unloaded = ()

    def restore(self) -> None:
        """Every process holds the whole module again, unless it began on meta. Every process calls it.

        What began on meta is too large for that: each process keeps its own stages, on the host, and all buffers.
        """
        self.dissolve()
        self.pipeline.unload()
        if self._mesh.world_size == 1 or self.plan is None:
            return
        if self._scattered:
            spread = self._mesh.spread(dict(self._module.named_buffers()), lambda name: self._owner[name])
        else:
            spread = spread_parameters(self._module, self._mesh, self._owner)
            take_back(self._module, {name: spread[name] for name, _ in self._module.named_parameters()})
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if self._owner[name] != self._mesh.rank:
                    buffer.copy_(spread[name])

    def replan(self) -> bool:
        """Let the next step that decides make another plan, if nothing is lost by it. Every process calls it.

        Returns:
            Whether it will: not if optimizers have states, which belong to the parameters of this plan's stages, nor if
            no process can hold the whole module.
        """
        stateful = any(optimizer.state for optimizer in self._optimizers())
        if self._scattered or int(self._mesh.world.sum(torch.tensor(int(stateful)))):
            return False
        self.restore()
        self.plan, self._final, self._owner = None, False, {}
        return True

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """Weights: on rank 0 those of all stages, or if not ``whole`` everywhere one's own. Every process calls it.

        Of parallel models those of the reference.
        """
        with self.showing_reference():
            if not whole:
                return own_state_dict(self._module, self._mesh, self._owner)
            if self._mesh.world_size == 1 or self.plan is None or self._mesh.group_number:
                return self._module.state_dict()
            return full_state_dict(self._module, self._mesh, self._owner)

    def collected(self, copy: nn.Module) -> dict[str, Any]:
        """The state dict of a copy of the module that is divided as the module is; whole on rank 0.

        Every process calls it.
        """
        if self._mesh.world_size == 1 or self.plan is None:
            return copy.state_dict()
        return full_state_dict(copy, self._mesh, self._owner)
