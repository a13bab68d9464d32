"""The options of survival, and where its groups find each other."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.system import System
from lightning_avgpipe.utils.allowed import Allowed, Count, Natural, check, has_options, number, optional, whole

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.context import RunContext
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
    from lightning_avgpipe.systems.survival.groups import GroupsLauncher
    from lightning_avgpipe.training.deployment import Deployment

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variables: address of the lighthouse, and number of the group
NUMBER = "REPLICA_GROUP_ID"
STARTED = "AVGPIPE_SURVIVAL"  # set in processes that our launcher has started: path of a file that marks the end

_TEXT = Allowed("an address", "'http://10.0.0.1:29510'", lambda value: isinstance(value, str) and bool(value))
ALLOWED = {
    "groups": whole(2, 1024, 2),
    "group": optional(whole(0, 1023, 0), f"the variable {NUMBER}"),
    "lighthouse": optional(_TEXT, f"the variable {LIGHTHOUSE}, or one of the run's own"),
    "address": optional(Allowed("a host name or address", "'10.0.0.2'", _TEXT.accepts), "the name of the host"),
    "restarts": whole(0, 1_000_000, 3),
    "heartbeat_timeout": number(0.2, 3600, 1.0, least=True),
    "sum_timeout": number(0.1, 86400, 10.0, least=True),
}


def torchft(module: str = "") -> Any:
    """Import a module of torchft and silence its logs: it logs a traceback for a death that we report in a line."""
    os.environ.setdefault("RUST_LOG", "error")
    logger = logging.getLogger("torchft")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    return importlib.import_module(f"torchft{module}")


@has_options(ALLOWED)
@dataclass(frozen=True, kw_only=True)
class Survival(System):
    """Groups of processes that survive each other: ``AvgPipeStrategy(system=Survival(groups=2))``.

    Each group has all stages and a model of its own; elastic averaging holds the models together, as with
    ``Averaging(groups=2)``. When a group dies, the others go on. When it is started again, it takes over the reference
    model, the optimizer's state and the place in the epoch from another group. Needs torchft:
    ``pip install -e ".[survival]"``.

    Groups find each other through a lighthouse. Without the address of one, the process that runs the script hosts it,
    divides ``devices`` among the groups, starts each by running the script again, and restarts those that die. This
    process does not train, and ends with the groups, so what follows ``fit`` in the script runs in the groups only.
    With an address, you start each group yourself, with its own ``devices``, its own torchrun if any, and its number.

    Args:
        groups: number of groups. All of them must be there when training begins.
        group: number of this process's group, from 0. None: our launcher, or yours, has set ``REPLICA_GROUP_ID``.
        lighthouse: address of a lighthouse that you have started (``torchft_lighthouse``). None: that in
            ``TORCHFT_LIGHTHOUSE``; if there is none, the process that runs the script hosts one.
        address: name or address at which other groups reach this host. None: the host's name; ``localhost`` for groups
            that our launcher starts.
        restarts: number of times that each group is started again after it has died.
        heartbeat_timeout: seconds without a sign of life after which the others go on without a group; for a lighthouse
            of your own, give ``--heartbeat_timeout_ms`` there.
        sum_timeout: longest time for a sum over the groups, in seconds. A dead group is noticed earlier, but not a
            group that hangs during a sum.
    Raises:
        ConfigurationError: an option that cannot work, or torchft is missing.
    """

    groups: Count = 2
    group: Natural | None = None
    lighthouse: str | None = None
    address: str | None = None
    restarts: Natural = 3
    heartbeat_timeout: float = 1.0
    sum_timeout: float = 10.0

    needs_equal_plans = True

    def __post_init__(self) -> None:
        check(ALLOWED, vars(self), "Survival")
        if importlib.util.find_spec("torchft") is None:
            raise ConfigurationError(
                "Survival needs torchft, which is not installed: pip install -e '.[survival]' in the repository"
            )
        if self.world_number >= self.groups:
            raise ConfigurationError(
                f"Survival(groups={self.groups}) in group {self.world_number}: groups are numbered from 0 to "
                f"{self.groups - 1}, by group=... or {NUMBER}"
            )

    @property
    def starts_groups(self) -> bool:
        """Whether this process starts the groups, and does not train."""
        return not self.lighthouse and STARTED not in os.environ and LIGHTHOUSE not in os.environ

    @property
    def num_worlds(self) -> int:  # type: ignore[override]
        """The number of groups."""
        return self.groups

    @property
    def world_number(self) -> int:  # type: ignore[override]
        """The number of this process's group."""
        told = os.environ.get(NUMBER, "0")
        if self.group is None and not told.isdecimal():
            raise ConfigurationError(f"{NUMBER}={told!r}: must be the number of the group, from 0")
        return int(told) if self.group is None else self.group

    @property
    def meets_at(self) -> str:
        """The address of the lighthouse."""
        return self.lighthouse or os.environ[LIGHTHOUSE]

    @property
    def host(self) -> str:
        """The name or address by which other groups reach this process."""
        return self.address or ("localhost" if STARTED in os.environ else socket.gethostname())

    def devices(self, given: Sequence[torch.device]) -> list[torch.device]:
        """Return the devices of this process's group: a part of the trainer's, if our launcher starts the groups."""
        if not self.starts_groups and STARTED not in os.environ:
            return list(given)
        size, left = divmod(len(given), self.groups)
        if left or not size:
            raise ConfigurationError(
                f"Survival(groups={self.groups}) with devices={len(given)}: the groups share the devices equally; use "
                f"devices={max(1, size) * self.groups}, or another number of groups"
            )
        return list(given[self.world_number * size : (self.world_number + 1) * size])

    def launcher(self, strategy: AvgPipeStrategy) -> GroupsLauncher | None:
        """Return what starts the groups; None in their processes."""
        from lightning_avgpipe.systems.survival.groups import GroupsLauncher, check_start

        check_start(self, strategy)
        return GroupsLauncher(self, strategy.num_processes) if self.starts_groups else None

    def training(self, context: RunContext, deployment: Deployment) -> AbstractContextManager[object]:
        """Return the context in which the group's models are averaged with those of other groups."""
        torchft()
        from lightning_avgpipe.systems.survival.meetings import meeting

        return meeting(self, context, deployment)
