"""Splits batches into micro-batches, and weights each micro-batch in the mean over its batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lightning_avgpipe.engine.loss import LossWeight, uneven_targets, weighted
from lightning_avgpipe.engine.microbatch import MicroBatch, as_one, divided, fewest_samples, split, split_with
from lightning_avgpipe.engine.sample_layout import EarlierBatches
from lightning_avgpipe.errors import BatchError
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.data import expected_now
from lightning_avgpipe.strategy.options import SplitBatch
from lightning_avgpipe.training.replicas import weighing
from lightning_avgpipe.utils.lightning import RunningStage, rank_zero_warn

_LOOKED_AT = 8  # number of training batches that are searched for ignored targets


class BatchSplitter:
    """Splits the batches of one run of the trainer."""

    def __init__(self, context: RunContext, batches: Batches) -> None:
        self._trainer, self._cluster, self._configuration = context.trainer, context.cluster, context.configuration
        self._distributor = context.distributor
        self._batches = batches
        self._seen: dict[tuple[str, int], EarlierBatches] = {}
        self._warned: set[str] = set()
        self._unweighted = _LOOKED_AT
        self._kept_whole: set[RunningStage | None] = set()  # stages of the trainer whose steps need whole batches

    @property
    def loss_weight(self) -> LossWeight | None:
        """What computes a micro-batch's weight: ``loss_weight(batch)`` of the module, or the option; None: its size."""
        own = getattr(self._trainer.lightning_module, "loss_weight", None)
        if inspect.ismethod(own) and next(iter(inspect.signature(own).parameters), None) == "batch":
            return own
        return self._configuration.options.loss_weight

    @property
    def custom_split(self) -> SplitBatch | None:
        """The user's function that splits batches; None if there is none."""
        return getattr(self._trainer.lightning_module, "split_batch", None) or self._configuration.options.split_batch

    @property
    def count(self) -> int:
        """M, the number of micro-batches per batch; a batch of fewer than M samples makes fewer."""
        return (
            1 if self._keeps_whole else self._configuration.options.microbatches(self._cluster.stage_map.given_stages)
        )

    @property
    def chooses(self) -> bool:
        """Whether M was left to the strategy (``num_microbatches="auto"``)."""
        return self._configuration.options.num_microbatches == "auto"

    def keep_whole(self) -> None:
        """Stop splitting batches of the running stage, whose step needs whole ones, if M was left to the strategy."""
        self._kept_whole.add(self._running)

    @property
    def _keeps_whole(self) -> bool:
        return self.chooses and self._running in self._kept_whole

    @property
    def _running(self) -> RunningStage | None:
        stage = self._trainer.state.stage
        return RunningStage.VALIDATING if stage == RunningStage.SANITY_CHECKING else stage

    def weighing(self, works: list[list[MicroBatch]]) -> Callable[[], list[list[MicroBatch]]]:
        """Begin to exchange the weights of a training iteration's micro-batches between replicas.

        Every process calls this method and then the returned function, and may do other work in between.

        Returns:
            A function that waits for the weights and returns the micro-batches by pipeline. They have their weights
            over all replicas on the processes that compute losses.
        """
        replicas, options = self._cluster.replicas, self._configuration.options
        several = self._cluster.stage_map.replicas > 1
        if replicas is None or not (several and self._cluster.rank == 0) or options.loss_reduction != "mean":
            return lambda: works
        return weighing(works, options.num_pipelines, options.averaging.split_batches, replicas)

    def split(self, batches: Sequence[Any], shares: int, weighs: bool) -> list[list[MicroBatch]]:
        """Split the batches of an iteration into micro-batches.

        Args:
            batches: batches of the pipelines, as they were sent to the other processes.
            shares: number of pipelines among which each batch is divided.
            weighs: whether micro-batches get weights, on the processes that compute the loss.
        Returns:
            The micro-batches of each pipeline; of fewer pipelines if a batch has too few samples.
        Raises:
            ConfigurationError: a batch has changed since it was sent.
            BatchError: a batch cannot be split.
        """
        works = []
        for n, batch in enumerate(batches):
            self._distributor.check_seal(batch, n)
            parts = self.parts(batch, shares)
            works += divided(self._weighed(parts) if weighs else parts, shares)
        return works

    def _weighed(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        alone = len(parts) == 1 and self._cluster.stage_map.replicas == 1
        has_loss = self._cluster.stage_map.num_stages - 1 in self._cluster.stages
        if not has_loss or alone:
            return parts
        if self.loss_weight is not None:
            return weighted(parts, self.loss_weight)
        if self._unweighted > 0 and self._configuration.options.loss_reduction == "mean":
            self._look_for_ignored_targets(parts)
        return parts

    def counts(self, parts: Sequence[MicroBatch]) -> tuple[list[int], list[float]]:
        """Return the sizes of micro-batches, and their weights in a mean."""
        sizes = [part.size for part in parts]
        return sizes, list(sizes) if self.loss_weight is None else [part.weight for part in parts]

    def log_weight(self, part: MicroBatch, parts: Sequence[MicroBatch]) -> float | None:
        """Return the weight of a micro-batch in logged means; None: its size, or the ``batch_size`` of ``self.log``."""
        if self.loss_weight is None:
            return None
        several = self._cluster.stage_map.replicas > 1
        return part.mean_weight if several else part.weight * (sum(other.size for other in parts) or 1)

    def parts(self, batch: Any, shares: int = 1) -> list[MicroBatch]:
        """Split a batch into micro-batches without weights, M for each of its shares."""
        options, trainer, module = self._configuration.options, self._trainer, self._trainer.lightning_module
        count, index = shares * self.count, self._batches.dataloader_idx
        if self.custom_split is not None and not self._keeps_whole:
            return split_with(self.custom_split, batch, count)
        expected = expected_now(trainer, index, changed=not self._distributor.sends_when_read)
        stage = "" if trainer.state.stage is None else trainer.state.stage.value
        first = (stage, index) not in self._seen
        seen = self._seen.setdefault((stage, index), EarlierBatches())
        try:
            parts = split(batch, count, expected, seen, fewest_samples(module) if self.chooses else 1)
        except BatchError as error:
            if not self.chooses:
                raise
            self.warn_once(
                f"a batch of the {stage} data is not split into micro-batches, so its stages take turns: {error}. An "
                "explicit num_microbatches makes this an error"
            )
            return as_one(batch, expected)
        if first and len(parts) == 1 < count and self._cluster.stage_map.num_stages > 1:
            self.warn_once(
                f"the first batch of the {stage} data holds {parts[0].size} sample(s) and makes one micro-batch where "
                f"num_microbatches={options.num_microbatches!r} wants {count}, so its stages take turns; use a "
                "larger batch_size"
            )
        elif first and len(parts) < count and not self.chooses and trainer.training:
            samples = sum(part.size for part in parts)
            self.warn_once(
                f"AvgPipeStrategy: num_microbatches={count} without effect: the first batch of the {stage} data holds "
                f"{samples} samples, and makes {len(parts)} micro-batches. Use a larger batch_size, or at most "
                f"num_microbatches={len(parts)}"
            )
        return parts

    def _look_for_ignored_targets(self, parts: Sequence[MicroBatch]) -> None:
        self._unweighted -= 1
        name = uneven_targets(parts)
        if name is not None:
            self._unweighted = 0
            self.warn_once(
                f"'{name}' of the batch holds ignored targets (-100), and micro-batches have unequal numbers of "
                "other targets. If the loss is a mean over targets, the mean over micro-batches differs from the loss "
                "of the whole batch, since each micro-batch is weighted by its samples; "
                f"loss_weight={name!r} weights it by its targets"
            )

    def warn_once(self, text: str) -> None:
        """Warn on rank 0, once in this run."""
        if text not in self._warned:
            self._warned.add(text)
            rank_zero_warn(text)
