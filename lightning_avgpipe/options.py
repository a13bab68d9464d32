"""The strategy's options, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning_avgpipe import checks
from lightning_avgpipe.capture.cache import CostCache, default_directory
from lightning_avgpipe.elastic.averaging import Elasticity, OuterOptimizer
from lightning_avgpipe.runtime.memory import MemoryLimit

__all__ = ["Options", "SplitBatch"]

_MICROBATCHES_PER_STAGE = 4

SplitBatch = Callable[[Any, int], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a strategy was asked for; see ``AvgPipeStrategy`` for what each means, and for the defaults.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    num_stages: int | Literal["auto"]
    num_pipelines: int
    processes_per_device: int
    num_microbatches: int | Literal["auto"]
    schedule: str
    advance: int | Literal["auto"]
    split_points: Sequence[str] | None
    costs: Literal["measured", "flops"]
    costs_cache: str | Path | None
    memory_limit: MemoryLimit
    recompute: bool | Sequence[str]
    loss_reduction: str
    split_batch: SplitBatch | None
    reader: str
    send_batch: str
    verify_copies: bool
    alpha: float | None
    outer_lr: float | Literal["auto"]
    outer_optimizer: OuterOptimizer | None
    average_every: int
    save_replicas: bool
    save_distributed_checkpoint: bool
    start_method: str
    process_group_backend: str | None
    timeout: timedelta

    def __post_init__(self) -> None:
        checks.options(self)

    @property
    def given(self) -> dict[str, Any]:
        """Of the numbers that may change during training those that are not as by default."""
        defaults = {"num_pipelines": 1, "num_microbatches": "auto", "advance": "auto"}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    @property
    def elasticity(self) -> Elasticity:
        """How parallel models are held together."""
        return Elasticity(self.alpha, self.outer_lr, self.outer_optimizer, self.average_every)

    @property
    def cache(self) -> CostCache | None:
        """Where measured costs are kept; None if they are not."""
        if self.costs_cache is None:
            return None
        return CostCache(default_directory() if self.costs_cache == "auto" else self.costs_cache)

    @property
    def splits(self) -> bool:
        """Whether it was asked that batches are split, on however many stages."""
        return self.num_microbatches not in ("auto", 1)

    def microbatches(self, num_stages: int) -> int:
        """M on so many stages."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        return _MICROBATCHES_PER_STAGE * num_stages if num_stages > 1 else 1
