"""Parallel pipelines: one for each model that trains, and the ensemble that holds the models together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.outside import variable
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.ensemble import Ensemble
from lightning_avgpipe.engine.compiling import Execution
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.training.pipeline_streams import PipelineStreams
from lightning_avgpipe.training.state import full_ensemble_state, load_ensemble_state
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.torch_compat import address


class ParallelPipelines:
    """The pipelines that train the models of one process group; one, if there is one model.

    Args:
        module: that is trained.
        cluster: with open channels.
        first: pipeline number 0, which also evaluates.
        make: makes an ensemble of the replica group, names of what steps change, and further tensors that they change.
        execution: of their units.

    Attributes:
        ensemble: the parallel models, from the first step of training on; None if there is one model.
        pipelines: by number of their models.
        has_trained: whether a step of training has begun.
        saved: models of a checkpoint.
        streams: of the pipelines.
    """

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        first: Pipeline,
        make: Callable[[ReplicaGroup | None, Collection[str], Sequence[Tensor]], Ensemble],
        execution: Execution,
    ) -> None:
        self.ensemble: Ensemble | None = None
        self.pipelines = [first]
        self.has_trained = False
        self._module = module
        self._cluster = cluster
        self._first = first
        self._make = make
        self._execution = execution
        self.streams = PipelineStreams(port_of(cluster.device), execution.streams)
        self.saved = SavedModels()

    def train(self, num_pipelines: int) -> list[Pipeline]:
        """N pipelines for a step of training, which is prepared. Every process calls it."""
        self.has_trained = True
        if num_pipelines == self._cluster.stage_map.num_teams == 1:
            self.dissolve()
            self.saved = SavedModels()
            return self.pipelines
        begins = self.ensemble is None
        if self.ensemble is None:
            changed = self._first.graph("training_step").changed
            self.ensemble = self._make(self._cluster.replica_group, changed, self._written())
        ensemble = self.ensemble
        stale = ensemble.follow(num_pipelines)
        self.saved.load(ensemble)
        if stale or begins or len(self.pipelines) < num_pipelines:
            self._cluster.channels.transport.widen(num_pipelines)
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
            self.streams.wait(self.pipelines)
        else:
            self.streams.give(self.pipelines)
        return self.pipelines

    def only_first(self) -> None:
        """The plan is another: the other pipelines are made when they train next."""
        self.pipelines = [self._first]
        self._first.stream = None

    def _written(self) -> list[Tensor]:
        """Tensors in attributes and variables that training writes into, beside parameters and buffers."""
        keys = self._first.graph("training_step").written
        found = Objects(variable(self._module, *key) for key in keys).tensors
        named = {address(t) for t in (*self._module.parameters(), *self._module.buffers())}
        return [t for t in found if address(t) not in named and t.is_leaf and not t.requires_grad]

    def changed_by_steps(self, number: int) -> list[Tensor]:
        """What steps of training themselves change in one model: buffers, and parameters, as far as they are here."""
        changed = sorted(self._first.graph("training_step").changed)
        if self.ensemble is not None:
            named = self.ensemble.tensors(number)
        else:
            named = {name: t.detach() for name, t in (*self._module.named_parameters(), *self._module.named_buffers())}
        return [named[name] for name in changed if name in named and not named[name].is_meta]

    # -- copies of parameters -----------------------------------------------------------------------------------------

    def sum_copied_gradients(self, number: int | None = None) -> None:
        """Where several stages use a parameter, each gets the gradient of all. Every process calls it.

        Args:
            number: of one pipeline; None: all.
        """
        for pipeline in self.pipelines if number is None else self.pipelines[number : number + 1]:
            pipeline.steps["training_step"].copies.sum_gradients()

    @property
    def summed_with_copies(self) -> Collection[str]:
        """Parameters of which that sum has the gradients of all replicas of their stages."""
        return self._first.steps["training_step"].copies.names if self._cluster.stage_map.stage_replicas else ()

    def verify_copies(self) -> None:
        """Check that what several stages use is the same on all of them. Every process calls it."""
        with self.showing_reference(False):
            for pipeline in self.pipelines:
                pipeline.steps["training_step"].copies.verify()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, answers: Mapping[str, int]) -> dict[str, Any] | None:
        """On rank 0 what parallel models have of their own; None if there is one model. Every process calls it.

        Args:
            answers: full name of each parameter and buffer -> the rank that answers for it.
        """
        return None if self.ensemble is None else full_ensemble_state(self.ensemble, self._cluster, answers)

    def dissolve(self, average: bool = True) -> None:
        """Go on with one model: the reference, after a last averaging if that is wanted. Every process calls it."""
        if self.ensemble is not None:
            self.ensemble.dissolve(average)
        self.ensemble = self._first.place = None
        self.only_first()

    def abandon(self) -> None:
        """Go on with one model after a failure, without waiting for anybody."""
        if self.ensemble is not None:
            self.ensemble.averager.abandon()
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
        before = self.saved, self.has_trained
        self.saved = SavedModels()
        try:
            yield
        finally:
            self.dissolve(average=False)
            self.saved, self.has_trained = before


@dataclass
class SavedModels:
    """Parallel models of a checkpoint, which wait until models begin to train.

    Attributes:
        state: of them; None: nothing waits.
    """

    state: Mapping[str, Any] | None = None

    @property
    def count(self) -> int | None:
        """How many there are; None if nothing waits."""
        return None if self.state is None else len(self.state.get("models", ()))

    def load_later(self, state: Mapping[str, Any]) -> None:
        """Load these when models begin to train."""
        self.state = state

    def load(self, ensemble: Ensemble) -> None:
        """Load them, and wait no more; if these are another number, they start from the reference."""
        if self.state is not None and self.count == ensemble.models.total:
            load_ensemble_state(ensemble, self.state)
        self.state = None
