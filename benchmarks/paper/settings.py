"""Find the setting of AvgPipe that fits the memory of another system, from the tuner's profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.paper.workloads import Workload
from lightning_avgpipe.tuning.predictors import memory_at
from lightning_avgpipe.tuning.profile import Profile, Setting, from_json
from lightning_avgpipe.tuning.search import candidates, search

__all__ = ["BOUNDS", "MICROBATCHES", "fitting", "label", "memory_of", "settings_within"]

MICROBATCHES = 8  # of all other pipelines: the strategy's default, four for each stage
BOUNDS = ("ddp", "gpipe", "1f1b", "pipedream", "2bw")
UNLIMITED = "any memory"


def memory_of(system: str, profile: Profile, workload: Workload) -> float:
    """Bytes of the fullest process, counted as the tuner counts AvgPipe's."""
    stages = [stage.memory for stage in profile.stages]
    weights = [memory.model / workload.copies for memory in stages]
    if system == "ddp":  # the whole model, buckets of its gradients, a part of a batch at once
        models = sum(memory.model for memory in stages) + sum(weights)
        return models + sum(memory.activations + memory.transient for memory in stages) / workload.devices
    schedule = "afab" if system == "gpipe" else "1f1b"
    needed = [stage.total for stage in memory_at(profile, Setting(MICROBATCHES, 1, 0, schedule))]
    older = {"pipedream": lambda k: len(stages) - 1 - k, "2bw": lambda k: 1}.get(system, lambda k: 0)
    return max(total + older(k) * weights[k] for k, total in enumerate(needed))


def fitting(system: str, profile: Profile, workload: Workload, most: int, rolls: bool = False) -> Setting:
    """Return what the tuner takes within the memory of a system, with at most so many parallel models, which may roll.

    Models have batches of their own, or divide each batch, whichever is sooner at a goal.

    Raises:
        TuningError: not even one pipeline fits.
    """
    counts = [m for m in (1, 2, 4, 6, 8, 12, 16, 24, 32) if m <= workload.batch_size]
    limit = None if system == UNLIMITED else memory_of(system, profile, workload)
    rolling: Any = "auto" if rolls else False
    settings = [s for split in (False, True) for s in candidates(profile, most, counts, rolling=rolling, split=split)]
    return search(profile, settings, limit, samples_factor=None).choice.setting


def settings_within(found: Mapping[str, Any], workload: Workload) -> dict[str, Setting]:
    """Bound -> setting, from what ``timing.measure`` says of ``TUNING``."""
    profile = from_json(Profile, found["profile"])
    return {
        system: fitting(system, profile, workload, found["most"], found["rolls"]) for system in (*BOUNDS, UNLIMITED)
    }


def label(setting: Setting) -> str:
    """Name of a setting in results."""
    how = " rolling" * setting.rolling + " split" * setting.split
    return f"avgpipe M={setting.num_microbatches} N={setting.num_pipelines} h={setting.advance}{how}"
