"""Which options of the strategy do not go together: refused when they are given, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule.broadcast import Broadcast
from lightning_avgpipe.schedule.builders import NAMES
from lightning_avgpipe.utils.device import TUNED_WITHOUT_GRAPHS, keeps_graphs

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options


def options(given: Options) -> None:
    """Check those of the strategy's own arguments against each other that can be judged alone."""
    if given.split_points is not None and given.num_stages != "auto":
        num_split_points(given.split_points, given.num_stages)
    if given.advance not in ("auto", 0) and given.schedule != "advance_forward":
        raise ConfigurationError(
            f"advance={given.advance} has no meaning for schedule={given.schedule!r}; use schedule='advance_forward', "
            "or advance=0"
        )
    if (given.replicas == "auto") != (given.planner == "spp"):
        raise ConfigurationError(
            f"replicas={given.replicas!r} and planner={given.planner!r}: the planner 'spp' chooses stages and their "
            "replicas together; use both planner='spp' and replicas='auto', or neither"
        )
    if given.planner != "spp" and given.bandwidth != "measured":
        raise ConfigurationError(f"bandwidth has no use with planner={given.planner!r}; use planner='spp', or leave it")
    if given.shares_stages:
        _stage_replicas(given)
    if given.shard_optimizer_states:
        _sharded(given)
    if given.loss_weight is not None and given.loss_reduction == "sum":
        raise ConfigurationError(
            "loss_weight says what micro-batches count in a mean, but loss_reduction='sum' adds their losses up; leave "
            "one of them out"
        )
    if given.outer_optimizer is not None and given.outer_lr != "auto":
        raise ConfigurationError(
            f"outer_lr={given.outer_lr} and an outer_optimizer: both move the reference; give the optimizer its own lr "
            "and leave outer_lr='auto'"
        )
    if given.outer_optimizer is not None:
        _try_outer(given.outer_optimizer)
    if given.compile is not False:
        _compiled(given)
    if given.min_groups is not None:
        _apart(given)
    if given.rolling is True:
        _without_barrier(given)
    if not given.policy.drains:
        _without_drain(given)


def num_split_points(names: Sequence[str], num_stages: int) -> None:
    """Check that so many stages have a name each at which they begin, but for the first."""
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"split_points names {len(names)} units, but num_stages={num_stages} needs {num_stages - 1}: one for each "
            "stage after the first"
        )


def sharing_later(given: Options, stage_map: StageMap) -> None:
    """Check options for training in which processes begin with a stage each, and share fewer of them later."""
    group_size, count = stage_map.group_size, stage_map.num_stages
    refused = {
        "num_stages": (count != group_size, f"one stage on each of {group_size} devices; use num_stages={group_size}"),
        "replicas": (given.replicas != 1, "replicas=1 at first, since it makes them of what is freed"),
        "num_pipelines": (given.num_pipelines > 1, "one model; use num_pipelines=1"),
        "verify": (bool(given.verify), "no verification, since a replica has but a share of a batch"),
    }
    if stage_map.num_groups > 1:
        refused["num_stages"] = True, f"all devices in one group; use num_stages={stage_map.world_size}"
    asked = "AdaptiveFreezing(freed='replicas')"
    refuse(given, refused, lambda option, needed: f"{asked} with {option} needs {needed}, or leave freed=None")
    try:
        replace(given, replicas=[1] * count)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{asked} makes replicas of single stages later: {error}; or leave freed=None"
        ) from error


def grouping_later(given: Options, stage_map: StageMap) -> None:
    """Check options for training in which the processes of each group become more groups, of fewer stages each."""
    size, count = stage_map.group_size, stage_map.num_stages
    refused = {
        "num_stages": (count != size, f"one stage on each device of a group; use num_stages={size}"),
        "replicas": (given.replicas != 1, "parallel models; use replicas=1, or freed='replicas'"),
        "processes_per_device": (given.processes_per_device > 1, "one process on each device"),
        "min_groups": (given.min_groups is not None, "groups that stay, since other ones are made"),
        "planner": (given.planner != "balanced", "planner='balanced', which plans for groups"),
        "schedule": (given.schedule not in NAMES, f"one for any number of stages: {', '.join(NAMES[:3])}"),
        "weight_policy": (not given.policy.drains, "one that several groups have: weight_policy='flush'"),
        "verify": (bool(given.verify), "no verification, which follows the models of one run"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "one file"),
    }
    asked = "AdaptiveFreezing(freed='groups')"
    refuse(given, refused, lambda option, needed: f"{asked} with {option} needs {needed}; or leave freed=None")


def without_effect(given: Options) -> None:
    """Say which options have no effect, where one model is trained and nobody may change that."""
    elastic = {"alpha": None, "outer_lr": "auto", "outer_optimizer": None, "average_every": 1}
    found = [f"{name}={getattr(given, name)!r}" for name, default in elastic.items() if getattr(given, name) != default]
    if found:
        rank_zero_warn(
            f"AvgPipeStrategy: {', '.join(found)} without effect: there is one pipeline, and nothing to average. Use "
            "num_pipelines=2 or more, or leave that out"
        )


def refuse(given: Options, refused: Mapping[str, tuple[bool, str]], message: Callable[[str, str], str]) -> None:
    """Refuse the first option that is set as it must not be.

    Args:
        given: all options.
        refused: name of an option -> whether it is so set, and why not, or what is needed.
        message: of the option with its value, and of that.
    """
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ConfigurationError(message(f"{name}={getattr(given, name)!r}", why))


def _apart(given: Options) -> None:
    """Refuse what groups cannot do any more when one of them has died."""
    refused = {
        "replicas": (given.replicas != 1, "groups that train the same model are one model without one of them"),
        "shard_optimizer_states": (given.shard_optimizer_states, "it is for replicas"),
        "rolling": (given.rolling is True, "groups that die leave others with sums of an iteration that lack theirs"),
        "weight_policy": (not given.policy.drains, "it is for one group"),
        "verify": (bool(given.verify), "a plain step follows all groups"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "all processes write it together"),
        "start_method": (given.start_method != "popen", "all processes are ended when one dies"),
    }
    refuse(given, refused, lambda o, why: f"min_groups={given.min_groups} with {o}: {why}; leave one of them out")


def _compiled(given: Options) -> None:
    """Refuse what asks for what is inside of units, and arguments that torch.compile does not take."""
    refused = {
        "schedule": (
            given.schedule in ("zb_h1", "zb_h2", "zbv", "dualpipev", "auto"),
            "the backward of a compiled unit cannot be split; use a schedule of whole ones, as 'advance_forward'",
        ),
        "verify": (bool(given.verify), "a plain step is not compiled; verify once without compile, then leave it out"),
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
    """Refuse what parallel models would have to do together."""
    refused = {
        "outer_optimizer": (given.outer_optimizer is not None, "models meet the reference one after the other"),
        "average_every": (given.average_every > 1, "each model meets the reference after each step"),
        "on_nonfinite": (given.on_nonfinite == "skip", "other stages may have stepped"),
        "verify": (bool(given.verify), "a plain step follows one model"),
        "reader": (given.reader == "first", "its process is the last to end a batch"),
        "schedule": (
            given.schedule == "broadcast" or isinstance(given.schedule, Broadcast),
            "weights go on to the next stage before an iteration, and not while another one runs",
        ),
    }
    instead = "leave it out, or use rolling=False"
    refuse(given, refused, lambda option, why: f"rolling=True with {option}: {why}; {instead}")


def _without_drain(given: Options) -> None:
    """Refuse what stages would have to do together, and what has no order that versions count by."""
    policy = given.policy
    ordered = given.schedule in ("1f1b", "advance_forward") and given.advance in ("auto", 0)
    refused = {
        "num_pipelines": (given.num_pipelines > 1, "there is one pipeline, which needs no others to fill its time"),
        "replicas": (given.replicas != 1, "replicas would wait for each other at each step"),
        "rolling": (given.rolling is True, "it is for parallel pipelines"),
        "schedule": (given.schedule not in ("1f1b", "advance_forward"), "versions are those of the order of 1F1B"),
        "advance": (not ordered, "versions are those of the order of 1F1B"),
        "recompute": (
            not isinstance(given.recompute, bool) and policy.backward is not None,
            "its stages repeat forwards as a whole, to use other weights in backwards",
        ),
        "on_nonfinite": (given.on_nonfinite == "skip", "other stages may have stepped"),
        "verify": (bool(given.verify), "a plain step has no versions"),
        "reader": (given.reader == "first", "its process is the last to end a batch"),
    }
    asked, instead = f"weight_policy={given.weight_policy!r}", "leave it out, or use weight_policy='flush'"
    refuse(given, refused, lambda option, why: f"{asked} with {option}: {why}; {instead}")


def _stage_replicas(given: Options) -> None:
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
        "rolling": (given.rolling is True, "models that step together; use False"),
        "num_stages": (chooses and given.num_stages != "auto", "num_stages='auto', since the planner chooses it"),
        "split_points": (chooses and given.split_points is not None, "no split_points, since the planner cuts"),
        "num_microbatches": (chooses and given.num_microbatches == "auto", "a number, on which the plan depends"),
        "processes_per_device": (given.processes_per_device > 1, "one process on each device"),
        "recompute": (chooses and given.recompute is True, "submodules by name, or none"),
    }
    need, instead = "replicas of single stages need", "or replicate whole pipelines (replicas=2)"
    refuse(given, refused, lambda option, needed: f"replicas={counts!r} and {option}: {need} {needed}, {instead}")


def _sharded(given: Options) -> None:
    refused = {
        "replicas": (given.replicas in (1, [1]), "replicas, which share the states; use replicas=2, say"),
        "num_pipelines": (given.num_pipelines > 1, "one pipeline; use num_pipelines=1"),
        "save_distributed_checkpoint": (given.save_distributed_checkpoint, "one file; use False"),
    }
    asked, instead = "shard_optimizer_states=True", "or shard_optimizer_states=False"
    refuse(given, refused, lambda option, needed: f"{asked} and {option}: it needs {needed}, {instead}")


def _try_outer(outer_optimizer: Any) -> None:
    """Step a parameter with it that nobody else has."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    asked = "it must make an optimizer from parameters whose step() needs no closure, such as SGD"
    try:
        made = outer_optimizer([parameter])
        if isinstance(made, Optimizer):
            made.step()
    except Exception as error:
        raise ConfigurationError(
            f"outer_optimizer={outer_optimizer!r}: {asked}; tried with one parameter it says {type(error).__name__}: "
            f"{error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigurationError(f"outer_optimizer={outer_optimizer!r}: {asked}; it made a {type(made).__name__}")
