"""Survival: groups of processes that train elastically averaged models, and each of which may die and come back.

``survival`` has the options, ``groups`` starts the groups and restarts those that have died, ``meetings`` averages
their models with torchft, and ``progress`` says how far training is, for a group that comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.systems.survival.survival import Survival

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options

__all__ = ["Survival"]

_MEETS = (
    "groups exchange all that they have learned, without rounding, after each step, since any of them may be gone at "
    "the next one"
)


def _with_groups(given: Options) -> None:
    """Refuse options that need something of all groups at once, or that let a group miss a meeting."""
    if not isinstance(given.system, Survival):
        return
    averaging = given.averaging
    refused = {
        "replicas": (given.asks_for_replicas, "each group has one pipeline of a model; use more groups"),
        "averaging.groups": (averaging.groups not in (None, 1), "the system's groups take its place"),
        "averaging.processes_per_device": (averaging.processes_per_device > 1, "groups have devices of their own"),
        "averaging.rolling": (averaging.rolling is not False, _MEETS),
        "averaging.fragments": (averaging.fragments > 1, _MEETS),
        "averaging.delay": (averaging.delay > 0, _MEETS),
        "averaging.wire": (averaging.wire is not None, _MEETS),
        "averaging.outer_optimizer": (averaging.outer_optimizer is not None, "a group that returns lacks its state"),
        "averaging.on_nonfinite": (averaging.on_nonfinite == "skip", _MEETS),
        "weight_policy": (not given.policy.drains, _MEETS),
        "shard": (given.shard is not None, "it is for replicas"),
        "verify": (given.verifies, "a plain step does not average; verify once without the system"),
        "save_distributed_checkpoint": (
            given.save_distributed_checkpoint,
            "one group writes it, and the next time this may be another one",
        ),
        "start_method": (given.start_method != "popen", "a group that has died is started by running the script again"),
    }
    combinations.refuse(given, refused, lambda option, why: f"{given.system!r} with {option}: {why}; leave it out")


combinations.RULES.append(_with_groups)
