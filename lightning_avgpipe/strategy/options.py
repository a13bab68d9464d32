"""The strategy's options with the checks of their values, and changes to them that are requested during training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_type_hints

import torch

from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.capture.cost_cache import CostCache, default_directory
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.options import Links
from lightning_avgpipe.engine.loss import LossWeight
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory import MemoryLimit, parse_limit
from lightning_avgpipe.planning.planner import SOURCES
from lightning_avgpipe.schedule.builders import Builder
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.policies import OPTION_DOCS, OPTION_TYPES, POLICIES, WeightPolicy
from lightning_avgpipe.schedule.recipes import RECIPES
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.strategy.schedule_choice import ScheduleRequest
from lightning_avgpipe.strategy.system import System
from lightning_avgpipe.utils.allowed import (
    DURATION,
    Allowed,
    check,
    choice,
    directory,
    either,
    flag,
    instance,
    names,
    optional,
    whole,
)
from lightning_avgpipe.utils.lightning import rank_zero_warn

_MICROBATCHES_PER_STAGE = 4
# options that may differ between processes
_OF_EACH_PROCESS = {"loss_weight", "split_batch", "outer_optimizer", "timeout", "costs_cache"}

SplitBatch = Callable[[Any, int], Sequence[Any]]
if TYPE_CHECKING:
    ScheduleName = str
    PolicyChoice = Any
else:  # includes what systems have registered
    ScheduleName = Literal[(*RECIPES, "auto")]
    PolicyChoice = Union[(Literal[tuple(POLICIES)], *OPTION_TYPES)]
# Descriptions of the values that systems have registered, for the documentation of options.
FURTHER = {
    "schedule": " ".join(filter(None, (r.about for r in RECIPES.values()))),
    "weight_policy": " ".join(OPTION_DOCS),
}


def _is_memory(value: Any) -> bool:
    try:
        parse_limit(value)
    except ConfigurationError:
        return False
    return True


MEMORY = Allowed(
    "a size such as '10GB' or '512MiB', a number of bytes, a fraction of the device's memory up to 1.0, or None for no "
    "limit",
    "'10GB'",
    _is_memory,
)

_COUNT = whole(1, 1024, 2)
_STAGE_REPLICAS = Allowed(
    "a list with the number of replicas of each stage",
    "[3, 1]",
    lambda value: isinstance(value, (list, tuple)) and bool(value) and all(map(_COUNT.accepts, value)),
)
_BUILDER = Allowed("a function (num_stages, num_microbatches) -> a row of actions for each stage", "'1f1b'", callable)
_COMPILE = dict.fromkeys(
    name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")
)
_COMPILER = Allowed(
    f"a dict of arguments of torch.compile ({', '.join(_COMPILE)})",
    "{'dynamic': False}",
    lambda value: isinstance(value, dict) and value.keys() <= _COMPILE.keys(),
)
_POLICY = reduce(either, (instance(kind, example) for kind, example in OPTION_TYPES.items()), choice(*POLICIES))
_WEIGHT = Allowed(
    "a function of a micro-batch that returns a number, or the name of a tensor of the batch whose entries other than "
    "-100 count",
    "'labels'",
    lambda value: callable(value) or (isinstance(value, str) and bool(value)),
)
_SPLIT = Allowed("a function (batch, num_microbatches) -> list of micro-batches", "my_split", callable)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a strategy was given; see ``AvgPipeStrategy`` for their meaning and defaults.

    Each has a type, and its allowed values, which are checked.

    Raises:
        ConfigurationError: an option has an invalid value, or options exclude each other.
    """

    num_stages: Annotated[int | Literal["auto"], whole(1, 1024, 4, "auto")]
    num_microbatches: Annotated[int | Literal["auto"], whole(1, 1_000_000, 16, "auto")]
    num_pipelines: Annotated[int, whole(1, 1024, 2)]
    replicas: Annotated[int | Sequence[int] | Literal["auto"], either(whole(1, 1024, 2, "auto"), _STAGE_REPLICAS)]
    schedule: Annotated[str | Builder, either(choice(*RECIPES, "auto"), _BUILDER)]
    advance: Annotated[int | Literal["auto"], whole(0, 1_000_000, 1, "auto")]
    split_points: Annotated[
        Sequence[str] | None, optional(names("names of submodules", "['layers.4']"), "balanced stages")
    ]
    memory_limit: Annotated[MemoryLimit, MEMORY]
    recompute: Annotated[
        bool | Sequence[str], either(flag(), names("names of submodules, or patterns of such", "['blocks.*']"))
    ]
    compile: Annotated[bool | Mapping[str, Any], either(flag(), _COMPILER)]
    static_step: Annotated[bool | Literal["auto"], flag("auto")]
    weight_policy: Annotated[str | Any, _POLICY]
    averaging: Annotated[Averaging, instance(Averaging, "Averaging(rolling='auto')")]
    system: Annotated[System | None, optional(instance(System, "Survival(groups=2)"), "none")]
    planner: Annotated[str, choice(*SOURCES)]
    costs: Annotated[Literal["measured", "flops"], choice("measured", "flops")]
    costs_cache: Annotated[str | Path | None, optional(directory("auto"), "no cache")]
    links: Annotated[Links, instance(Links, "Links(reader='first')")]
    loss_reduction: Annotated[str, choice("mean", "sum")]
    loss_weight: Annotated[LossWeight | None, optional(_WEIGHT, "numbers of samples")]
    split_batch: Annotated[SplitBatch | None, optional(_SPLIT, "tensors")]
    shard: Annotated[Literal["optimizer"] | None, optional(choice("optimizer"), "none")]
    verify: Annotated[bool | int | Literal["auto"], either(flag("auto"), whole(1, 1000, 3))]
    save_distributed_checkpoint: Annotated[bool, flag()]
    start_method: Annotated[str, choice("popen", "spawn", "fork")]
    timeout: Annotated[timedelta, DURATION]

    def __post_init__(self) -> None:
        check(ALLOWED, vars(self))
        combinations.options(self)

    @property
    def verifies(self) -> bool:
        """Whether the user has asked for verification."""
        return self.verify not in (False, "auto")

    def with_rolling(self, rolling: bool) -> Options:
        """Return the options with another value of ``Averaging.rolling``."""
        return replace(self, averaging=replace(self.averaging, rolling=rolling))

    @property
    def overrides(self) -> dict[str, Any]:
        """The options that may change during training and were not left at their defaults."""
        defaults = {"num_pipelines": 1, "num_microbatches": "auto", "advance": "auto"}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    @property
    def shared(self) -> dict[str, Any]:
        """The options that must be the same in all processes; fields of nested options are under their own names."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            nested = is_dataclass(value) and not isinstance(value, System)
            found |= vars(value) if nested else {name: value}
        own = _OF_EACH_PROCESS | ({"schedule"} if callable(self.schedule) else set())
        return {name: value for name, value in found.items() if name not in own}

    @property
    def policy(self) -> WeightPolicy:
        """The policy that decides which version of the weights an action uses."""
        return POLICIES[self.weight_policy] if isinstance(self.weight_policy, str) else self.weight_policy.policy

    @property
    def schedule_request(self) -> ScheduleRequest:
        """The requested schedule; a weight policy that does not drain the pipeline always uses 1F1B."""
        schedule, advance = (self.schedule, self.advance) if self.policy.drains else ("1f1b", 0)
        return ScheduleRequest(schedule, advance, not self.recompute)

    @property
    def overlap(self) -> tuple[str, str]:
        """The option by which batches overlap, and the value that prevents this, as code for messages."""
        if self.policy.drains:
            return f"Averaging(rolling={self.averaging.rolling!r})", "Averaging(rolling=False)"
        return f"weight_policy={self.weight_policy!r}", "weight_policy='flush'"

    @property
    def placement(self) -> Placement:
        """The placement of stages on processes that host several of them."""
        name = self.schedule if isinstance(self.schedule, str) else ""
        return RECIPES[name].placement if name in RECIPES else "loop"

    @property
    def cache_directory(self) -> Path | None:
        """The directory of measured costs and verdicts; None if nothing is kept, or if there is no home directory."""
        if self.costs_cache is None:
            return None
        return default_directory() if self.costs_cache == "auto" else Path(self.costs_cache)

    @property
    def cache(self) -> CostCache | None:
        """The cache of measured costs; None if they are not kept. Warns if there is no directory to keep them in."""
        directory = self.cache_directory
        if directory is None and self.costs_cache is not None:
            rank_zero_warn(
                "AvgPipeStrategy: there is no home directory, so measured costs are not kept for the next run. Set "
                "XDG_CACHE_HOME or costs_cache to a directory, or costs_cache=None to keep none"
            )
        return None if directory is None else CostCache(directory)

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        """The number of replicas of each stage; empty if pipelines are replicated as a whole."""
        return () if isinstance(self.replicas, (int, str)) else tuple(self.replicas)

    @property
    def shares_stages(self) -> bool:
        """Whether processes may share the micro-batches of a stage."""
        return bool(self.stage_replicas) or SOURCES[self.planner].replicates

    @property
    def asks_for_replicas(self) -> bool:
        """Whether the user has asked for replicas, of pipelines or of stages."""
        return self.shares_stages or self.replicas not in (1, "auto")

    def has_replicas(self, replicas: int) -> bool:
        """Return whether several processes train the same stage, given the number of replicas of the pipelines."""
        return self.shares_stages or replicas > 1

    @property
    def splits(self) -> bool:
        """Whether ``num_microbatches`` is a number above 1."""
        return self.num_microbatches not in ("auto", 1)

    def microbatches(self, num_stages: int) -> int:
        """Return M, the number of micro-batches of a batch, for a number of stages."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        together = max(num_stages, max(self.stage_replicas, default=1))
        return _MICROBATCHES_PER_STAGE * together if together > 1 else 1


ALLOWED: dict[str, Allowed] = {
    name: option.__metadata__[0] for name, option in get_type_hints(Options, include_extras=True).items()
}


# -- while training runs -----------------------------------------------------------------------------------------------


class Configuration:
    """The options of a strategy, some of which may change between two iterations of training.

    Attributes:
        given: options that the strategy was constructed with.
        options: current options.
        in_iteration: whether an iteration is running, from its batch to the optimizer's step; options do not change
            within it.
        can_roll: whether parallel pipelines can roll in this run, and ``rolling`` is not False.
        prefers_rolling: whether they roll if ``rolling="auto"``.
        seed: seed of the random numbers that are drawn in units; a resumed run keeps the seed of the first run.
    """

    def __init__(self, options: Options) -> None:
        self.given = self.options = options
        self.in_iteration = False
        self.can_roll = False
        self.prefers_rolling = True
        self.seed = 0
        self._asked: dict[str, Any] = {}

    @property
    def num_pipelines(self) -> int:
        """N, the current number of parallel pipelines."""
        return self.options.num_pipelines

    @property
    def batches_per_step(self) -> int:
        """The number of batches that an iteration takes from the dataloader: one for each pipeline, or one for all."""
        return 1 if self.options.averaging.split_batches else self.num_pipelines

    @property
    def rolls(self) -> bool:
        """Whether parallel pipelines roll: they go on to the next batch without waiting for each other."""
        return self.can_roll and (self.prefers_rolling or self.options.averaging.rolling is True)

    @property
    def may_stop_rolling(self) -> bool:
        """Whether pipelines roll because of ``rolling="auto"``, so that rolling may also be given up."""
        return self.rolls and self.options.averaging.rolling == "auto"

    @property
    def has_requests(self) -> bool:
        """Whether changes have been requested that do not apply yet."""
        return bool(self._asked)

    def options_with(self, changes: Mapping[str, Any]) -> Options:
        """Return the options with all requested changes and these; a value of None changes nothing.

        Raises:
            ConfigurationError: an option would have an invalid value, or options would exclude each other.
        """
        return replace(self.options, **self._with(changes))

    def request(self, changes: Mapping[str, Any]) -> None:
        """Request changes, which take effect with :meth:`apply_requests`."""
        self._asked = self._with(changes)

    def apply_requests(self, cluster: Cluster | None) -> dict[str, Any]:
        """Apply the requested changes at the end of an iteration. Every process calls it.

        Args:
            cluster: the connected processes, which must have requested the same; None before they are connected.
        Returns:
            The options that have changed, with their new values.
        Raises:
            ConfigurationError: the processes have requested different changes.
        """
        self.in_iteration = False
        asked, self._asked = self._asked, {}
        if asked and cluster is not None:
            call = f"reconfigure({', '.join(f'{name}={value!r}' for name, value in asked.items())})"
            cluster.confirm(call, "in a hook of a callback, such as on_train_batch_end, and not only if is_global_zero")
        changed = {name: value for name, value in asked.items() if getattr(self.options, name) != value}
        if changed:  # replace() checks all options again, which is slow
            self.options = replace(self.options, **changed)
        return changed

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._asked, **{name: value for name, value in changes.items() if value is not None}}
