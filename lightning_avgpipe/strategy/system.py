"""The base class of systems, which change how processes start and what groups of processes do together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from lightning_avgpipe.utils.lightning import _Launcher

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.context import RunContext
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
    from lightning_avgpipe.training.deployment import Deployment


class System:
    """A value of the strategy's option ``system``. This base class changes nothing. Each process has an instance.

    Attributes:
        num_worlds: number of worlds of torch.distributed that train together, each with processes, groups and data of
            its own.
        world_number: number of the world of this process, 0-based.
        needs_equal_plans: whether plans must be the same in all worlds, so that costs are counted and not measured.
    """

    num_worlds = 1
    world_number = 0
    needs_equal_plans = False

    def devices(self, given: Sequence[torch.device]) -> list[torch.device]:
        """Return the devices of this process's world, given those of the Trainer."""
        return list(given)

    def launcher(self, strategy: AvgPipeStrategy) -> _Launcher | None:
        """Return the launcher that starts all worlds; None in their processes, where the strategy's own is used."""
        return None

    def training(self, context: RunContext, deployment: Deployment) -> AbstractContextManager[object]:
        """Return a context for a training run, which is entered before the first plan and left after the last step.

        Args:
            context: trainer, connection and options of the run.
            deployment: deployment of the module on the processes of this world.
        """
        return contextlib.nullcontext()
