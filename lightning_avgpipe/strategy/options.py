"""The strategy's options, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_avgpipe.capture.cost_cache import CostCache, default_directory
from lightning_avgpipe.elastic.averaging import Elasticity, OuterOptimizer
from lightning_avgpipe.engine.weighting import LossWeight
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory_limit import MemoryLimit, parse_limit
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.own import Builder
from lightning_avgpipe.schedule.recipes import RECIPES, TRAINING
from lightning_avgpipe.schedule.versions import POLICIES, PipeOptim, WeightPolicy
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.strategy.schedule_choice import Order
from lightning_avgpipe.utils.allowed import (
    Allowed,
    check,
    choice,
    directory,
    either,
    flag,
    names,
    number,
    optional,
    whole,
)
from lightning_avgpipe.utils.durations import DURATION

_MICROBATCHES_PER_STAGE = 4

SplitBatch = Callable[[Any, int], Sequence[Any]]
ScheduleName = Literal[
    "advance_forward", "1f1b", "afab", "zb_h1", "zb_h2", "interleaved", "bfs", "zbv", "dualpipev", "broadcast", "auto"
]
PolicyName = Literal["flush", "stash", "2bw", "spectrain", "spectrain_stashed", "pipeoptim", "none"]


def _is_memory(value: Any) -> bool:
    try:
        parse_limit(value)
    except ConfigurationError:
        return False
    return True


def _is_matrix(value: Any) -> bool:
    """Positive numbers, as many in each row as there are rows, but for the diagonal."""
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(row, (list, tuple)) or len(row) != len(value) for row in value
    ):
        return False
    links = [speed for u, row in enumerate(value) for v, speed in enumerate(row) if u != v]
    return all(isinstance(speed, (int, float)) and 0 < speed < math.inf for speed in links) and len(value) > 0


def _is_backend(value: Any) -> bool:
    """A name that torch.distributed knows, or one for each kind of device: ``cpu:gloo,cuda:nccl``."""
    known = set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED}
    return value is None or (
        isinstance(value, str) and all(part.rpartition(":")[2].lower() in known for part in value.split(","))
    )


MEMORY = Allowed(
    "a size such as '10GB' or '512MiB', a number of bytes, a fraction of the device's memory up to 1.0, or None for no "
    "limit",
    "'10GB'",
    _is_memory,
)

_COUNT = whole(1, 1024, 2)
_COMPILE = dict.fromkeys(
    name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")
)

ALLOWED = {
    "num_stages": whole(1, 1024, 4, "auto"),
    "num_pipelines": whole(1, 1024, 2),
    "replicas": either(
        whole(1, 1024, 2, "auto"),
        Allowed(
            "a list with the number of replicas of each stage",
            "[3, 1]",
            lambda value: isinstance(value, (list, tuple)) and bool(value) and all(map(_COUNT.accepts, value)),
        ),
    ),
    "planner": choice("balanced", "spp"),
    "bandwidth": either(
        choice("measured"),
        Allowed("a list with a row of bytes per second for each process", "[[1e9, 1e8], [1e8, 1e9]]", _is_matrix),
    ),
    "shard_optimizer_states": flag(),
    "processes_per_device": whole(1, 64, 2),
    "min_groups": optional(whole(1, 1024, 1), "all"),
    "num_microbatches": whole(1, 1_000_000, 16, "auto"),
    "schedule": either(
        choice(*TRAINING, "auto"),
        Allowed("a function (num_stages, num_microbatches) -> a row of actions for each stage", "'1f1b'", callable),
    ),
    "advance": whole(0, 1_000_000, 1, "auto"),
    "split_points": optional(names("names of submodules", "['layers.4']"), "balanced stages"),
    "costs": choice("measured", "flops"),
    "costs_cache": optional(directory("auto"), "no cache"),
    "memory_limit": MEMORY,
    "compile": either(
        flag(),
        Allowed(
            f"a dict of arguments of torch.compile ({', '.join(_COMPILE)})",
            "{'dynamic': False}",
            lambda value: isinstance(value, dict) and value.keys() <= _COMPILE.keys(),
        ),
    ),
    "pipeline_streams": flag(),
    "recompute": either(flag(), names("names of submodules, or patterns of such", "['blocks.*']")),
    "loss_reduction": choice("mean", "sum"),
    "loss_weight": optional(
        Allowed(
            "a function of a micro-batch that returns a number, or the name of a tensor of the batch whose entries "
            "other than -100 count",
            "'labels'",
            lambda value: callable(value) or (isinstance(value, str) and bool(value)),
        ),
        "numbers of samples",
    ),
    "split_batch": optional(
        Allowed("a function (batch, num_microbatches) -> list of micro-batches", "my_split", callable), "tensors"
    ),
    "reader": choice("last", "first"),
    "send_batch": choice("needed", "all"),
    "verify_copies": flag(),
    "verify": either(flag(), whole(1, 1000, 3)),
    "alpha": optional(number(0, 1, 0.5, least=True), "1/N"),
    "outer_lr": number(0, 1000, 1.0, "auto"),
    "outer_optimizer": optional(
        Allowed(
            "a function that makes an optimizer from parameters",
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)",
            callable,
        ),
        "outer_lr",
    ),
    "average_every": whole(1, 1_000_000, 4),
    "rolling": flag("auto"),
    "weight_policy": either(
        choice(*POLICIES), Allowed("a PipeOptim", "PipeOptim(delta='increment')", lambda v: isinstance(v, PipeOptim))
    ),
    "save_replicas": flag(),
    "save_distributed_checkpoint": flag(),
    "on_nonfinite": optional(choice("auto", "raise", "skip"), "no check"),
    "start_method": choice("popen", "spawn", "fork"),
    "process_group_backend": Allowed(
        "a backend that torch.distributed knows, one for each kind of device, or None",
        "'cpu:gloo,cuda:nccl'",
        _is_backend,
    ),
    "timeout": DURATION,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a strategy was asked for; see ``AvgPipeStrategy`` for what each means, and for the defaults.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    num_stages: int | Literal["auto"]
    num_pipelines: int
    replicas: int | Sequence[int] | Literal["auto"]
    planner: Literal["balanced", "spp"]
    bandwidth: Matrix | Literal["measured"]
    shard_optimizer_states: bool
    processes_per_device: int
    min_groups: int | None
    num_microbatches: int | Literal["auto"]
    schedule: str | Builder
    advance: int | Literal["auto"]
    split_points: Sequence[str] | None
    costs: Literal["measured", "flops"]
    costs_cache: str | Path | None
    memory_limit: MemoryLimit
    recompute: bool | Sequence[str]
    compile: bool | Mapping[str, Any]
    pipeline_streams: bool
    loss_reduction: str
    loss_weight: LossWeight | None
    split_batch: SplitBatch | None
    reader: str
    send_batch: str
    verify_copies: bool
    verify: bool | int
    alpha: float | None
    outer_lr: float | Literal["auto"]
    outer_optimizer: OuterOptimizer | None
    average_every: int
    rolling: bool | Literal["auto"]
    weight_policy: str | PipeOptim
    save_replicas: bool
    save_distributed_checkpoint: bool
    on_nonfinite: Literal["auto", "raise", "skip"] | None
    start_method: str
    process_group_backend: str | None
    timeout: timedelta

    def __post_init__(self) -> None:
        check(ALLOWED, {field.name: getattr(self, field.name) for field in fields(self)})
        combinations.options(self)

    @property
    def overrides(self) -> dict[str, Any]:
        """Of the numbers that may change during training those that are not as by default."""
        defaults = {"num_pipelines": 1, "num_microbatches": "auto", "advance": "auto"}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    @property
    def shared(self) -> dict[str, Any]:
        """Those that must be the same in all processes, and can be compared."""
        own = {
            "" if isinstance(self.schedule, str) else "schedule",
            "costs_cache",
            "loss_weight",
            "split_batch",
            "outer_optimizer",
            "timeout",
        }
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in own}

    @property
    def policy(self) -> WeightPolicy:
        """Which weights actions use."""
        return POLICIES[self.weight_policy] if isinstance(self.weight_policy, str) else self.weight_policy.policy

    @property
    def order(self) -> Order:
        """In which actions come."""
        splits = not self.recompute
        return Order(self.schedule, self.advance, splits) if self.policy.drains else Order("1f1b", 0, splits)

    @property
    def overlap(self) -> tuple[str, str]:
        """What lets batches overlap, and with what they do not, for messages."""
        if self.policy.drains:
            return f"rolling={self.rolling!r}", "rolling=False"
        return f"weight_policy={self.weight_policy!r}", "weight_policy='flush'"

    @property
    def placement(self) -> Placement:
        """How several stages are placed on each process."""
        name = self.schedule if isinstance(self.schedule, str) else ""
        return RECIPES[name].placement if name in RECIPES else "loop"

    @property
    def elasticity(self) -> Elasticity:
        """How parallel models are held together."""
        return Elasticity(self.alpha, self.outer_lr, self.outer_optimizer, self.average_every)

    @property
    def cache(self) -> CostCache | None:
        """Where measured costs are kept; None if they are not."""
        if self.costs_cache is None:
            return None
        directory = default_directory() if self.costs_cache == "auto" else self.costs_cache
        if directory is None:
            rank_zero_warn(
                "AvgPipeStrategy: there is no home directory, so measured costs are not kept for the next run. Set "
                "XDG_CACHE_HOME or costs_cache to a directory, or costs_cache=None to keep none"
            )
            return None
        return CostCache(directory)

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        """Replicas of each stage; empty if pipelines are replicated as a whole."""
        return () if isinstance(self.replicas, (int, str)) else tuple(self.replicas)

    @property
    def shares_stages(self) -> bool:
        """Whether processes may share the micro-batches of a stage."""
        return not isinstance(self.replicas, int)

    @property
    def splits(self) -> bool:
        """Whether it was asked that batches are split, on however many stages."""
        return self.num_microbatches not in ("auto", 1)

    def microbatches(self, num_stages: int) -> int:
        """M on so many stages."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        together = max(num_stages, max(self.stage_replicas, default=1))
        return _MICROBATCHES_PER_STAGE * together if together > 1 else 1
