"""The synchronisation of replicas in an iteration: they agree on what trains, and sum gradients."""

from __future__ import annotations

import torch
from torch import nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.observer import Observer, Observers
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import Schedule, in_turn
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.training.replicas import GradientSums, StatisticsSharing


class ReplicaSync:
    """The synchronisation of the replicas of a group's models in one run of the trainer; nothing without replicas.

    Args:
        module: module that is trained.
        cluster: the connected processes.
        models: models that are trained.
        observers: observers of iterations.
        normalises: whether replicas normalise batches together (sync_batchnorm).
    """

    def __init__(
        self, module: nn.Module, cluster: Cluster, models: ParallelPipelines, observers: Observers, normalises: bool
    ) -> None:
        self._module = module
        self._cluster = cluster
        self._models = models
        self._observers = observers
        self._gradient_sums: GradientSums | None = None
        self._statistics = StatisticsSharing(cluster) if normalises else None

    def agree(self, count: int, skipped: frozenset[int], num_pipelines: int, steps: bool) -> tuple[int, frozenset[int]]:
        """Agree which models had a batch, and which of these had no loss. Every process calls it.

        Args:
            count: number of pipelines that had a batch here.
            skipped: numbers of those whose batch had no loss here.
            num_pipelines: N.
            steps: whether gradients are complete, and are summed over replicas now.
        Returns:
            The number of pipelines that had a batch on any replica, and the numbers of those whose batch had no loss.
        """
        replicas = self._cluster.replicas
        if replicas is None:
            return count, skipped
        votes = torch.zeros(2, num_pipelines, dtype=torch.int32, device="cpu")
        votes[0, :count] = 1
        votes[1, [n for n in range(count) if n not in skipped]] = 1
        if steps:
            with self._observers.activity("averaging"):
                votes = self._sums().finish(self._summed(num_pipelines), votes)
        else:
            replicas.members.sum(votes)
        fed, trained = votes.bool().tolist()
        replicas.copy([t for n in range(num_pipelines) for t in self._models.changed_by_steps(n)])
        return sum(fed), frozenset(n for n in range(sum(fed)) if not trained[n])

    def check_trains(self, micro_batch: int) -> None:
        """Raise, where a micro-batch has no loss, if replicas normalise together: all would need its backward."""
        if self._statistics is not None:
            raise ConfigurationError(
                f"micro-batch {micro_batch} has no loss (the step returned None, or its weight is 0), and with "
                "sync_batchnorm=True other replicas would wait for its backward; return a loss of zero that depends on "
                "the outputs (0.0 * outputs.sum()), or remove sync_batchnorm"
            )

    def observers(self, schedule: Schedule, num_pipelines: int, steps: bool) -> list[Observer]:
        """Return the observers of an iteration of training, which come before all others. Every process calls it.

        Args:
            schedule: schedule of pipeline 0.
            num_pipelines: N.
            steps: whether gradients are complete after the iteration.
        """
        statistics = [] if self._statistics is None else self._statistics.observers(schedule)
        if self._cluster.replicas is None or not steps:
            return statistics
        sums, stage_map = self._sums(), self._cluster.stage_map
        if num_pipelines > 1:  # the gradients of all pipelines are on the same parameters
            sums.watch({}, {})
        else:
            rows = {k: in_turn(schedule.rows[k], *stage_map.share(k, self._cluster.rank)) for k in self._cluster.stages}
            sums.watch(self._summed(1), rows)
        return [sums, *statistics]

    def _sums(self) -> GradientSums:
        """Return the gradient sums of the replicas that there are now."""
        replicas = self._cluster.replicas
        assert replicas is not None
        if self._gradient_sums is None or self._gradient_sums.replicas is not replicas:
            self._gradient_sums = GradientSums(replicas)
        return self._gradient_sums

    def _summed(self, models: int) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients replicas sum, of a number of models."""
        copied, ensemble = self._models.summed_with_copies, self._models.ensemble
        if ensemble is not None:
            own = [ensemble.models.parameters(n) for n in range(models)]
        else:
            own = [{name: p for name, p in self._module.named_parameters() if not p.is_meta}] * models
        return {f"{n}.{name}": p for n, of in enumerate(own) for name, p in of.items() if name not in copied}
