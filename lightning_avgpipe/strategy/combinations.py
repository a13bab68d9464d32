"""Checks of combinations of options: which exclude each other, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory import parse_limit
from lightning_avgpipe.planning.planner import SOURCES
from lightning_avgpipe.schedule.builders import NAMES
from lightning_avgpipe.utils.device import TUNED_WITHOUT_GRAPHS, keeps_graphs
from lightning_avgpipe.utils.lightning import rank_zero_warn

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options


# Rules of the packages in ``systems``: each raises a ConfigurationError for options that exclude each other.
RULES: list[Callable[[Options], None]] = []


def options(given: Options) -> None:
    """Check the strategy's own arguments against each other, as far as this is possible without a trainer."""
    if given.split_points is not None and given.num_stages != "auto":
        num_split_points(given.split_points, given.num_stages)
    if given.advance not in ("auto", 0) and given.schedule != "advance_forward":
        raise ConfigurationError(
            f"advance={given.advance} has no meaning for schedule={given.schedule!r}; use schedule='advance_forward', "
            "or advance=0"
        )
    replicates = SOURCES[given.planner].replicates
    if replicates and given.replicas != "auto":
        raise ConfigurationError(
            f"replicas={given.replicas!r} and planner={given.planner!r}: the planner chooses stages and their "
            "replicas together; leave replicas out"
        )
    if not replicates and given.links.bandwidth != "measured":
        others = "".join(f"use planner={name!r}, or " for name, source in SOURCES.items() if source.replicates)
        raise ConfigurationError(f"Links(bandwidth=...) has no use with planner={given.planner!r}; {others}leave it")
    if given.shares_stages:
        _stage_replicas(given)
    if given.shard is not None:
        _sharded(given)
    if given.loss_weight is not None and given.loss_reduction == "sum":
        raise ConfigurationError(
            "loss_weight gives the weights of micro-batches in a mean, but loss_reduction='sum' adds up their losses; "
            "leave one of them out"
        )
    if given.compile is not False:
        _compiled(given)
    if given.averaging.rolling is True:
        _without_barrier(given)
    if given.averaging.delay and given.averaging.on_nonfinite == "skip":
        raise ConfigurationError(
            f"Averaging(delay={given.averaging.delay}) with Averaging(on_nonfinite='skip'): a model starts again while "
            "an update of it is under way; use on_nonfinite='raise', or delay=0"
        )
    if given.averaging.split_batches and given.loss_reduction == "sum":
        raise ConfigurationError(
            "Averaging(split_batches=True) with loss_reduction='sum': each model would have a part of the sum only; "
            "use loss_reduction='mean', or batches of their own"
        )
    for rule in RULES:
        rule(given)


def num_split_points(names: Sequence[str], num_stages: int) -> None:
    """Check that there is one split point for each stage except the first."""
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"split_points names {len(names)} units, but num_stages={num_stages} needs {num_stages - 1}: one for each "
            "stage after the first"
        )


@dataclass(frozen=True)
class Facts:
    """Facts about a run of training on which the effect of options depends.

    Attributes:
        num_models: number of parallel models in all groups.
        num_stages: K.
        num_processes: number of processes in all groups.
        num_groups: number of groups of processes.
        replicas: number of groups that train the same models.
        tuned: whether a tuner chooses N.
    """

    num_models: int
    num_stages: int
    num_processes: int
    num_groups: int
    replicas: int
    tuned: bool


@dataclass(frozen=True)
class _Idle:
    """Options that have no effect in some runs, or an effect that the user may not expect.

    Attributes:
        defaults: for each option the value, besides "auto", for which there is nothing to warn of.
        when: returns whether this applies to a run.
        why: part of the message that says why.
        instead: part of the message that says what to do.
    """

    defaults: Mapping[str, Any]
    when: Callable[[Options, Facts], bool]
    why: str
    instead: str


_MEANT_AS_GIGABYTES = 1024  # a memory limit of at most so many bytes was probably meant as gigabytes

_IDLE = (
    _Idle(
        {
            "averaging.alpha": None, "averaging.outer_lr": "auto", "averaging.outer_optimizer": None,
            "averaging.every": 1, "averaging.fragments": 1, "averaging.delay": 0, "averaging.wire": None,
            "averaging.rolling": False, "averaging.streams": True, "averaging.save_models": True,
        },
        lambda given, run: run.num_models == 1,
        "without effect: there is one pipeline, and nothing to average",
        "Use num_pipelines=2 or more",
    ),
    _Idle(
        {"averaging.split_batches": False},
        lambda given, run: given.num_pipelines == 1,
        "without effect: there is one pipeline, and each batch is its own",
        "Use num_pipelines=2 or more",
    ),
    _Idle(
        {"averaging.split_batches": False},
        lambda given, run: given.num_pipelines > 1 and given.averaging.rolling is False,
        "saves no time while pipelines wait for each other at the end of each step",
        "Use rolling=True with it",
    ),
    _Idle(
        {"averaging.wire": None},
        lambda given, run: run.num_models > 1 and run.num_groups == run.replicas,
        "without effect: there is one group of processes, and no update travels",
        "Use Averaging(groups=2) or more",
    ),
    _Idle(
        {"advance": 0, "weight_policy": "flush"},
        lambda given, run: run.num_stages == 1,
        "without effect: there is one stage, and nothing goes ahead of another one",
        "Use num_stages=2 or more",
    ),
    _Idle(
        {"links.reader": "last", "links.send_batch": "needed", "links.wire": None, "links.shared_memory": True},
        lambda given, run: run.num_processes == 1,
        "without effect: there is one process, and nothing travels",
        "Use devices=2 or more",
    ),
    _Idle(
        {"costs_cache": None},
        lambda given, run: given.costs == "flops",
        "without effect: costs='flops' measures nothing",
        "Use costs='measured'",
    ),
    _Idle(
        {"memory_limit": None},
        lambda given, run: 1 < parse_limit(given.memory_limit) <= _MEANT_AS_GIGABYTES,
        "is a number of bytes, as is every number above 1, and no stage fits into so few",
        "Use a size such as '10GB'",
    ),
)  # fmt: skip


def without_effect(given: Options, run: Facts) -> None:
    """Warn of options that have no effect in a run of training, or an effect that the user may not expect."""
    for idle in _IDLE:
        values = {name: attrgetter(name)(given) for name in idle.defaults}
        found = [name for name, value in values.items() if value not in (idle.defaults[name], "auto")]
        if found and idle.when(given, run):
            rank_zero_warn(f"AvgPipeStrategy: {_written(given, *found)} {idle.why}. {idle.instead}, or leave that out")


def refuse(given: Options, refused: Mapping[str, tuple[bool, str]], message: Callable[[str, str], str]) -> None:
    """Raise a ConfigurationError for the first option that must be refused.

    Args:
        given: all options.
        refused: for each option (with a dotted name if it is nested) whether it is refused, and the reason or what is
            needed instead.
        message: returns the error message, given the option as the user would write it, and that reason or need.
    """
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ConfigurationError(message(_written(given, name), why))


def _written(given: Options, *names: str) -> str:
    """Return options with their values, as the user would write them; names may be dotted (``averaging.rolling``)."""
    said: dict[str, list[str]] = {}
    for name in names:
        option, _, inner = name.partition(".")
        said.setdefault(option, []).append(f"{inner or name}={attrgetter(name)(given)!r}")
    nested = {name.partition(".")[0] for name in names if "." in name}
    return ", ".join(
        f"{type(getattr(given, option)).__name__}({', '.join(values)})" if option in nested else values[0]
        for option, values in said.items()
    )


def _compiled(given: Options) -> None:
    """Check that no option needs units that are not compiled, and that torch.compile accepts the arguments."""
    refused = {
        "verify": (given.verifies, "a plain step is not compiled; verify once without compile, then leave it out"),
    }
    refuse(given, refused, lambda option, why: f"compile={given.compile!r} with {option}: {why}")
    if isinstance(given.compile, Mapping):
        if keeps_graphs(given.compile):
            raise ConfigurationError(
                f"compile={given.compile!r}: its CUDA graphs keep the values of one call, and a pipeline has several "
                f"micro-batches under way; use {{'mode': '{TUNED_WITHOUT_GRAPHS}'}}, or compile=True"
            )
        try:
            torch.compile(lambda: None, **given.compile)
        except Exception as error:
            raise ConfigurationError(
                f"compile={given.compile!r}: torch.compile does not take that ({type(error).__name__}: {error}); "
                "compile=True leaves all to its defaults"
            ) from error


def _without_barrier(given: Options) -> None:
    """Refuse options that would make rolling parallel models wait for each other."""
    refused = {
        "averaging.outer_optimizer": (
            given.averaging.outer_optimizer is not None,
            "models meet the reference one after the other",
        ),
        "averaging.every": (given.averaging.every > 1, "each model meets the reference after each step"),
        "averaging.wire": (given.averaging.wire is not None, "its sums are exact"),
        "averaging.on_nonfinite": (given.averaging.on_nonfinite == "skip", "other stages may have stepped"),
        "verify": (given.verifies, "a plain step follows one model"),
        "links.reader": (given.links.reader == "first", "its process is the last to end a batch"),
    }
    instead = "leave it out, or use Averaging(rolling=False)"
    refuse(given, refused, lambda option, why: f"Averaging(rolling=True) with {option}: {why}; {instead}")


def _stage_replicas(given: Options) -> None:
    """Refuse options that exclude replicas of single stages."""
    counts: Any = list(given.stage_replicas) or "auto"
    if counts != "auto" and given.num_stages not in ("auto", len(counts)):
        raise ConfigurationError(
            f"replicas={counts} names {len(counts)} stages, but num_stages={given.num_stages}; give a number for each "
            "stage, or leave num_stages='auto'"
        )
    chooses = counts == "auto"
    refused = {
        "schedule": (given.schedule not in NAMES, "forwards and backwards by warm-ups; use schedule='advance_forward'"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "one file; use False"),
        "averaging.rolling": (
            given.averaging.rolling is True and given.averaging.num_groups > 1,
            "one group, or models that step together; use False",
        ),
        "num_stages": (chooses and given.num_stages != "auto", "num_stages='auto', since the planner chooses it"),
        "split_points": (chooses and given.split_points is not None, "no split_points, since the planner cuts"),
        "num_microbatches": (chooses and given.num_microbatches == "auto", "a number, on which the plan depends"),
        "averaging.processes_per_device": (given.averaging.processes_per_device > 1, "one process on each device"),
        "recompute": (chooses and given.recompute is True, "submodules by name, or none"),
    }
    need, instead = "replicas of single stages need", "or replicate whole pipelines (replicas=2)"
    refuse(given, refused, lambda option, needed: f"replicas={counts!r} and {option}: {need} {needed}, {instead}")


def _sharded(given: Options) -> None:
    """Refuse options that exclude dividing optimizer states among replicas."""
    refused = {
        "replicas": (given.replicas in (1, [1]), "replicas, which share the states; use replicas=2, say"),
        "num_pipelines": (given.num_pipelines > 1, "one pipeline; use num_pipelines=1"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "one file; use False"),
    }
    asked, instead = f"shard={given.shard!r}", "or leave shard out"
    refuse(given, refused, lambda option, needed: f"{asked} and {option}: it needs {needed}, {instead}")
