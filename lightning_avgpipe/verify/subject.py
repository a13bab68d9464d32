"""The subject of a verification: a run of the trainer, and what a verifier has to know about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.loss import LossWeight
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.forked import why_no_fork
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.names import is_within, joined, nearest
from lightning_avgpipe.utils.tensors import tensor_bytes
from lightning_avgpipe.verify.plain import portable
from lightning_avgpipe.verify.state import attributes

_COPIES = 4  # memory of a child that trains, in sizes of the weights: weights, gradients, two optimizer states
_KEPT = 1  # memory of a child that waits: the weights from before the first step


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training run that is verified. Attributes that are functions return the current value.

    Attributes:
        trainer: trainer of the run.
        cluster: the connected processes.
        deployment: deployment of the module on processes.
        step_log: collects the values that steps log, and passes them to its ``listener``.
        seed: seed of the random numbers in units.
        num_pipelines: N, the number of pipelines of each group.
        clears_gradients: whether the training step that runs now begins with cleared gradients.
        loss_is_mean: whether losses are means over the samples of their micro-batch; otherwise they are sums.
        loss_weight: what a micro-batch counts in means over a batch; None: its samples.
        showing: returns a context within which the module shows the model of a pipeline.
        has_hooks_between_steps: whether anything runs between optimizer steps that a plain run does not have, such as
            hooks.
        has_hooks_in_step: whether user code runs within a training step after a forward, such as hooks of optimizers.
        undo_changes: undoes, in a child, the changes to Lightning that a pipeline needs.
        options: options of the strategy.
        verdicts: folder with a file for each training that was found equal; None: there is none.
    """

    trainer: pl.Trainer
    cluster: Cluster
    deployment: Deployment
    step_log: Any
    seed: Callable[[], int]
    num_pipelines: Callable[[], int]
    clears_gradients: Callable[[], bool]
    loss_is_mean: bool
    loss_weight: Callable[[], LossWeight | None]
    showing: Callable[[int], AbstractContextManager[None]]
    has_hooks_between_steps: bool
    has_hooks_in_step: bool
    undo_changes: Callable[[], None]
    options: Mapping[str, Any]
    verdicts: Path | None

    @property
    def module(self) -> pl.LightningModule:
        """The module that is trained."""
        return self.trainer.lightning_module

    @property
    def plan(self) -> Plan | None:
        """The stages; None before the first batch."""
        return self.deployment.plan

    @property
    def num_models(self) -> int:
        """The number of parallel models in all groups."""
        return self.num_pipelines() * self.cluster.stage_map.num_teams

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are sums over replicas, which have batches of their own."""
        return self.cluster.stage_map.replicas > 1

    @property
    def first_pipeline(self) -> int:
        """The number of this group's first pipeline among the pipelines of all groups."""
        return self.cluster.group_number // self.cluster.stage_map.replicas * self.num_pipelines()

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages of a parameter, buffer or attribute of a unit, by full name; empty if none is known."""
        known = {} if self.plan is None else self.plan.stages_of
        return known.get(nearest(_owner(name), known), ())

    def source_of(self, name: str) -> str | None:
        """Return the line of the user's code that first uses a parameter, buffer or attribute of a unit, if known."""
        nodes, owner = () if self.plan is None else self.plan.graph.nodes, _owner(name)
        for node in nodes:  # a logged value may have the name of a function
            if owner in (*node.parameters, *node.states) or (node.kind == "call" and is_within(owner, node.name)):
                return node.source
        return None

    @property
    def rounds(self) -> bool:
        """Whether stages may round differently from a plain run.

        Views with gaps in memory are sent without the gaps, and TorchScript optimises code after its first runs.
        """
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.module.modules()):
            return True
        if self.plan is None or self.cluster.group.world_size == 1:
            return False
        graph = self.plan.graph
        return any(graph.values[value].has_gaps for cut in self.plan.cuts for value in graph.live(cut))

    # -- whether it can be verified ------------------------------------------------------------------------------------

    def why_not(self) -> str | None:
        """Return why a copy of this process could not train the whole model, or None if it could."""
        device = self.cluster.device
        if (why := why_no_fork(device)) is not None:
            return why
        if not self.clears_gradients():
            return "training goes on with gradients of an earlier run"
        if self.num_models > 1 and self.trainer.global_step:
            return "parallel models go on from a checkpoint"
        if self.has_replicas and any(isinstance(part, torch.nn.SyncBatchNorm) for part in self.module.modules()):
            return "its batches are normalised over all replicas"
        if (wire := self.options["wire"]) is not None and self.cluster.group.world_size > 1:
            return f"values travel rounded between stages (links=Links(wire={wire!r})); verify once with wire=None"
        weights = [*self.module.parameters(), *self.module.buffers()]
        if any(tensor.is_meta for tensor in weights):
            return "its weights are not in one process"
        return self._why_no_memory(_COPIES + _KEPT)

    def why_not_again(self) -> str | None:
        """Return why the waiting child could not begin to train now, or None if it could."""
        return self._why_no_memory(_COPIES)

    def could_keep(self, number: int) -> bool:
        """Return whether a child has memory for the activations of this number of micro-batches at once."""
        assert self.plan is not None
        stash = sum(stage.memory.stash for stage in self.plan.stages)  # at least that of one micro-batch
        return number * stash <= port_of(self.cluster.device).free_bytes()

    def _why_no_memory(self, copies: int) -> str | None:
        device = self.cluster.device
        size = sum(map(tensor_bytes, (*self.module.parameters(), *self.module.buffers())))
        needed, free = copies * size, port_of(device).free_bytes()
        if needed <= free:
            return None
        return (
            f"that takes {nbytes(needed)} ({copies} times its {nbytes(size)} of weights), and {nbytes(free)} are free "
            f"on {device}"
        )

    # -- what each process holds --------------------------------------------------------------------------------------

    @property
    def compares(self) -> bool:
        """Whether this process has the children, and compares: rank 0 of all processes."""
        return self.cluster.world.rank == 0

    def model(self, n: int) -> AbstractContextManager[Any]:
        """Return a context within which the module shows the model of a pipeline."""
        return self.showing(n) if self.num_models > 1 else contextlib.nullcontext()

    def held(self, n: int, look: Callable[[pl.LightningModule], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the part of a pipeline's model for which this process is responsible, in a form that can be sent.

        Args:
            n: number of the pipeline.
            look: function of the module that returns its parameters, buffers or attributes by name.
        """
        with self.model(n):
            return portable({k: v for k, v in look(self.module).items() if self.is_mine(k)})

    def changed_on_other_stages(self, n: int) -> dict[str, Any]:
        """Return rank 0's values of attributes of other stages' submodules that code between units changes.

        A stage leaves the step after its last submodule, so the stage of such a submodule may not reach that code. The
        last stage, on rank 0, does.
        """
        if not self.compares or self.plan is None:
            return {}
        changed = {joined(*key) for key in self.plan.graph.changed_between}
        with self.model(n):
            held = attributes(self.module).items()
            return portable({k: v for k, v in held if not self.is_mine(k) and nearest(_owner(k), changed)})

    def is_mine(self, name: str) -> bool:
        """Return whether this process is responsible for a parameter, a buffer or an attribute."""
        stages = self.stages_of(name)
        return (self.cluster.stage_map.owner(stages[0]) if stages else 0) == self.cluster.rank


def _owner(name: str) -> str:
    """Return the name of the container if a name denotes its length or an entry; otherwise the name itself."""
    return name.removeprefix("len(").removesuffix(")").partition("[")[0]
