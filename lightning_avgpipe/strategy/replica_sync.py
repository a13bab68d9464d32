"""What the replicas of a model do together in an iteration: they agree on what trains, and sum its gradients."""

from __future__ import annotations

import torch
from torch import nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.observer import Observer, Observers
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import Schedule, in_turn
from lightning_avgpipe.training.gradient_sums import GradientSums
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.training.statistics_sharing import StatisticsSharing


class ReplicaSync:
    """Of the models of a group, in one run of the trainer. Without replicas nothing here does anything.

    Args:
        module: that is trained.
        cluster: of the processes.
        models: that are trained.
        observers: of iterations.
        normalises: whether replicas normalise batches together.
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
        """Agree which models had a batch, and which of these no loss. Every process calls it.

        Args:
            count: pipelines that had a batch here.
            skipped: those whose batch had no loss here.
            num_pipelines: N.
            steps: whether gradients are complete, and become those of all replicas together.
        Returns:
            Pipelines that had a batch anywhere, and those of them whose batch had no loss.
        """
        replicas = self._cluster.replicas
        if replicas is None:
            return count, skipped
        votes = torch.zeros(2, num_pipelines, dtype=torch.int32)
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
        """Called where a micro-batch has no loss: replicas that normalise together must all have a backward of it."""
        if self._statistics is not None:
            raise ConfigurationError(
                f"micro-batch {micro_batch} has no loss (the step returned None, or its weight is 0), and with "
                "sync_batchnorm=True other replicas would wait for its backward; return a loss of zero that depends on "
                "the outputs (0.0 * outputs.sum()), or remove sync_batchnorm"
            )

    def observers(self, schedule: Schedule, num_pipelines: int, steps: bool) -> list[Observer]:
        """What looks on while an iteration of training runs, before all others. Every process calls it.

        Args:
            schedule: of pipeline 0.
            num_pipelines: N.
            steps: whether gradients are complete after it.
        """
        statistics = [] if self._statistics is None else self._statistics.observers(schedule)
        if self._cluster.replicas is None or not steps:
            return statistics
        sums, stage_map = self._sums(), self._cluster.stage_map
        if num_pipelines > 1:  # which have their gradients under the same parameters
            sums.watch({}, {})
        else:
            rows = {k: in_turn(schedule.rows[k], *stage_map.share(k, self._cluster.rank)) for k in self._cluster.stages}
            sums.watch(self._summed(1), rows)
        return [sums, *statistics]

    def _sums(self) -> GradientSums:
        """Of the replicas that there are now."""
        replicas = self._cluster.replicas
        assert replicas is not None
        if self._gradient_sums is None or self._gradient_sums.replicas is not replicas:
            self._gradient_sums = GradientSums(replicas)
        return self._gradient_sums

    def _summed(self, models: int) -> dict[str, nn.Parameter]:
        """What replicas sum the gradients of, of so many models."""
        copied, ensemble = self._models.summed_with_copies, self._models.ensemble
        if ensemble is not None:
            own = [ensemble.models.parameters(n) for n in range(models)]
        else:
            own = [{name: p for name, p in self._module.named_parameters() if not p.is_meta}] * models
        return {f"{n}.{name}": p for n, of in enumerate(own) for name, p in of.items() if name not in copied}
