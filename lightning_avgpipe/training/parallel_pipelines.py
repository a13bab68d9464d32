"""Parallel pipelines: one for each model that trains, and the ensemble of these models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.capture.graph import changed_in_common
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.engine.execution import Execution, OwnStream
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.state.outside import variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.training.holdings import full_ensemble_state, load_ensemble_state
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.lightning import rank_zero_info
from lightning_avgpipe.utils.torch_compat import address
from lightning_avgpipe.weights.tied import GradientSum


class ParallelPipelines:
    """The pipelines that train the models of a group of processes; a single pipeline if there is one model.

    Args:
        module: module to train.
        cluster: cluster with open channels.
        first: pipeline 0, which also evaluates.
        make: makes an ensemble from the averaging group, the names of the parameters and buffers that steps change, and
            other tensors into which steps write.
        execution: options of the execution of units.

    Attributes:
        averaging_group: processes of all groups that hold the same stages; None if there is one group.
        ensemble: the parallel models, from the first training step on; None if there is one model.
        pipelines: pipelines by the number of their model.
        has_trained: whether a training step has begun.
        saved: the models' state from a checkpoint, which is still to be loaded; None if there is none. It is loaded if
            the same number of models begins to train; otherwise all of them start from the reference.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        first: Pipeline,
        make: Callable[[TensorCollectives | None, Collection[str], Sequence[Tensor]], Ensemble],
        execution: Execution,
    ) -> None:
        self.averaging_group = cluster.averaging_group
        self.ensemble: Ensemble | None = None
        self.pipelines = [first]
        self.has_trained = False
        self._module = module
        self._cluster = cluster
        self._first = first
        self._make = make
        self._execution = execution
        self.saved: Mapping[str, Any] | None = None
        self._await_streams = False  # whether the pipelines are to get streams in the next step

    def train(self, num_pipelines: int) -> list[Pipeline]:
        """Return N pipelines for a training step, which must be prepared. Every process calls it."""
        self.has_trained = True
        if num_pipelines == 1 and self.averaging_group is None:
            self.dissolve()
            self.saved = None
            return self.pipelines
        begins = self.ensemble is None
        if self.ensemble is None:
            changed = self._first.graph("training_step").changed
            self.ensemble = self._make(self.averaging_group, changed, self._written())
        ensemble = self.ensemble
        stale = ensemble.follow(num_pipelines)
        if self.saved is not None and self.num_saved == ensemble.models.total:
            load_ensemble_state(ensemble, self.saved)
        self.saved = None
        if stale or begins or len(self.pipelines) < num_pipelines:
            self._cluster.transport.widen(num_pipelines)
            self._first.place = partial(ensemble.place, 0)
            others = [
                Pipeline(
                    self._cluster,
                    self._module,
                    self._execution,
                    n,
                    partial(ensemble.place, n),
                    partial(ensemble.models.foreign_tensors, n),
                )
                for n in range(1, num_pipelines)
            ]
            self.pipelines = [self._first, *others]
            for pipeline in others:
                pipeline.load_like(self._first, "training_step")
            ensemble.place(0)
            self._begin_streams()
            if begins and self.averaging_group is not None:
                self.averaging_group.begin(ensemble)
        elif self._await_streams:
            self._await_streams = False
            for pipeline in self.pipelines:
                pipeline.stream = OwnStream(port_of(self._cluster.device))
        return self.pipelines

    @property
    def num_saved(self) -> int | None:
        """The number of models in the checkpoint state that is still to be loaded; None if there is none."""
        return None if self.saved is None else len(self.saved.get("models", ()))

    # -- streams ------------------------------------------------------------------------------------------------------

    @property
    def have_streams(self) -> bool:
        """Whether several pipelines have a stream each: the options, the device and the step must allow it."""
        return self._may_have_streams and not self._changed_in_common

    @property
    def _may_have_streams(self) -> bool:
        return self._execution.streams and port_of(self._cluster.device).runs_ahead

    @property
    def _changed_in_common(self) -> str:
        """What the step changes that all pipelines share, so that they cannot run at the same time; or empty."""
        return changed_in_common(self._first.graph("training_step"))

    def _begin_streams(self) -> None:
        """Make new pipelines share one stream in their first step, which may create objects that later steps share."""
        several = len(self.pipelines) > 1
        self._first.stream, self._await_streams = None, several and self.have_streams
        if several and self._may_have_streams and not self._await_streams:
            changed = self._changed_in_common
            rank_zero_info(f"Averaging(streams=True): pipelines take turns, since training_step changes {changed}")

    def only_first(self) -> None:
        """Drop all pipelines but the first, for a new plan. The others are made anew when they train next."""
        self.pipelines = [self._first]
        self._first.stream = None

    def _written(self) -> list[Tensor]:
        """Return the tensors in attributes and variables into which training writes, except parameters and buffers."""
        keys = self._first.graph("training_step").written_tensors
        found = Snapshot(variables(self._module, keys).values()).tensors
        named = {address(t) for t in (*self._module.parameters(), *self._module.buffers())}
        return [t for t in found if address(t) not in named and t.is_leaf and not t.requires_grad]

    def changed_by_steps(self, number: int) -> list[Tensor]:
        """Return this process's buffers and parameters of one model that training steps themselves change.

        Args:
            number: number n of the model.
        """
        changed = sorted(self._first.graph("training_step").changed)
        if self.ensemble is not None:
            named = self.ensemble.tensors(number)
        else:
            named = {name: t.detach() for name, t in (*self._module.named_parameters(), *self._module.named_buffers())}
        return [named[name] for name in changed if name in named and not named[name].is_meta]

    # -- copies of parameters -----------------------------------------------------------------------------------------

    def sum_copied_gradients(self) -> None:
        """Sum the gradients of all copies of each parameter that several stages use. Every process calls it."""
        for number in range(len(self.pipelines)):
            self.begin_sum(number).finish()

    def begin_sum(self, number: int, replicas: bool = False) -> GradientSum:
        """Start to sum the gradients of copies in one model; see :meth:`TiedParameters.begin_sum`."""
        return self.pipelines[number].steps["training_step"].copies.begin_sum(replicas)

    def count_copied_gradients_once(self) -> None:
        """Keep each sum of copies' gradients in one copy only, before further batches add to it."""
        for pipeline in self.pipelines:
            pipeline.steps["training_step"].copies.count_once()

    @property
    def summed_with_copies(self) -> Collection[str]:
        """The names of parameters whose sum over copies already includes those of all replicas of their stages."""
        return self._first.steps["training_step"].copies.names if self._cluster.stage_map.stage_replicas else ()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, answers: Mapping[str, int]) -> Mapping[str, Any] | None:
        """Return the state of each parallel model on rank 0; None if there is one model. Every process calls it.

        Before the first step, this is the state that is still to be loaded.

        Args:
            answers: rank that answers for each parameter and buffer, by full name.
        """
        return self.saved if self.ensemble is None else full_ensemble_state(self.ensemble, self._cluster, answers)

    def dissolve(self, average: bool = True) -> None:
        """Drop the ensemble, and continue with one model, the reference. Every process calls it.

        Args:
            average: whether the models are averaged first.
        """
        if self.ensemble is not None:
            self.ensemble.dissolve(average)
        self.ensemble = self._first.place = None
        self.only_first()

    def abandon(self) -> None:
        """Continue with one model after a failure, without waiting for other processes."""
        if self.ensemble is not None:
            self.ensemble.averager.abandon()
        self.dissolve(average=False)

    def showing_reference(self, reference: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the module has the weights of the reference, or those of pipeline 0."""
        return contextlib.nullcontext() if self.ensemble is None else self.ensemble.showing_reference(reference)

    def show_reference(self, reference: bool) -> None:
        """Give the module the weights of the reference, or those of pipeline 0, until the next call."""
        if self.ensemble is not None:
            self.ensemble.show_reference(reference)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within this context, allow a trial with parallel models; drop them afterwards, and restore ``saved``."""
        before = self.saved, self.has_trained
        self.saved = None
        try:
            yield
        finally:
            self.dissolve(average=False)
            self.saved, self.has_trained = before
