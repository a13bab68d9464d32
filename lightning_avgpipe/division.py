"""The division of a module among processes: from its first batch until every process holds all of it again."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_avgpipe.checkpoint import (
    drop_foreign_state,
    full_state_dict,
    move_state,
    owners,
    spread_parameters,
)
from lightning_avgpipe.partition import Plan, cut_like
from lightning_avgpipe.runtime.mesh import Mesh
from lightning_avgpipe.runtime.ownership import give_up, take_back
from lightning_avgpipe.runtime.pipeline import Pipeline
from lightning_avgpipe.runtime.planner import Planner

__all__ = ["Division"]


class Division:
    """Plans the stages of a module, and moves parameters and optimizer states to where the plan wants them.

    Args:
        module: to divide; whole on every process at first.
        mesh: with open channels.
        planner: makes plans for the module.
        optimizers: those that step the module, as of when it is called.

    Attributes:
        pipeline: runs the step functions that are prepared.
        plan: None before the first step.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, planner: Planner, optimizers: Callable[[], Sequence[Optimizer]]
    ) -> None:
        self.pipeline = Pipeline(mesh, module)
        self.plan: Plan | None = None
        self._module = module
        self._mesh = mesh
        self._planner = planner
        self._optimizers = optimizers
        self._final = False
        self._owner: dict[str, int] = {}

    def prepare(self, step: str, run: Callable[..., Any], args: Sequence[Any], decides: bool) -> bool:
        """Make a step function runnable, if it is not. Every process calls it.

        Args:
            step: name of the step function.
            run: executes it.
            args: arguments of one micro-batch.
            decides: whether the plan is made for this step. In training ``training_step`` decides; a validation that
                comes before it (a sanity check) runs on a provisional plan, for which nobody gives anything up.
        Returns:
            Whether a plan was made that stays.
        """
        if step in self.pipeline.steps and (self._final or not decides):
            return False
        if self.plan is None or (decides and not self._final):
            self._divide(step, run, args, decides)
            return decides
        units = self.plan.graph.units
        with self._whole_on_rank_zero():
            graph = self._made_on_rank_zero(lambda: self._planner.capture(step, run, args, units))
        self.pipeline.load(graph, cut_like(graph, self.plan.stages_of, self.plan.num_stages))
        return False

    def _divide(self, step: str, run: Callable[..., Any], args: Sequence[Any], final: bool) -> None:
        units = self.plan.graph.units if self.plan is not None else ()
        plan: Plan = self._made_on_rank_zero(lambda: self._planner.plan(step, run, args, units))
        others = [self.pipeline.graph(name) for name in self.pipeline.steps if name != step]
        self.pipeline.unload()
        self.pipeline.load(plan.graph, plan.cuts)
        for graph in others:
            if graph.units == plan.graph.units:  # of others a new capture is made when they are run
                self.pipeline.load(graph, cut_like(graph, plan.stages_of, plan.num_stages))
        self.plan, self._final = plan, final
        self._owner = owners(self._module, self._mesh, plan.stages_of)
        self._settle()

    def _made_on_rank_zero(self, make: Callable[[], Any]) -> Any:
        made = pickle.dumps(make()) if self._mesh.rank == 0 else None
        return pickle.loads(self._mesh.publish(made))

    # -- who holds what ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Bring the own stages to the device; if the plan is final, give the others' parameters up."""
        device, foreign = self._mesh.device, self._foreign()
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
        self.pipeline.copies("training_step").sum_gradients()

    def verify_copies(self) -> None:
        """Check that what several stages use is the same on all of them. Every process calls it."""
        self.pipeline.copies("training_step").verify()

    def restore(self) -> None:
        """Every process holds the whole module again. Every process calls it."""
        self.pipeline.unload()
        if self._mesh.world_size == 1 or self.plan is None:
            return
        spread = spread_parameters(self._module, self._mesh, self._owner)
        take_back(self._module, {name: spread[name] for name, _ in self._module.named_parameters()})
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if self._owner[name] != self._mesh.rank:
                    buffer.copy_(spread[name])

    @contextlib.contextmanager
    def _whole_on_rank_zero(self) -> Iterator[None]:
        """Rank 0 borrows the parameters of the other stages, to follow a step function through all of them."""
        if not self._final or self._mesh.world_size == 1:
            yield
            return
        parameters = {name: p.detach() for name, p in self._module.named_parameters()}
        borrowed = self._mesh.collect(parameters, lambda name: self._owner[name])
        if self._mesh.rank == 0:
            take_back(self._module, borrowed)
        yield
        give_up(self._module, self._foreign())

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 the weights of all stages. Every process calls it."""
        if self._mesh.world_size == 1 or self.plan is None:
            return self._module.state_dict()
        return full_state_dict(self._module, self._mesh, self._owner)
