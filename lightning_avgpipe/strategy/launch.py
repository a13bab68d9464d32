"""Start and connection of the processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_avgpipe.comm import keeper
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.utils.attempt import fresh
from lightning_avgpipe.utils.parent import needing_starter, started, starting
from lightning_avgpipe.utils.torch_compat import default_store

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy

# name -> start_method, beside the strategy's own name; as in ddp
_kept: list[dist.Store] = []  # that a keeper has, of this process: torch's groups may not be the same everywhere
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each other process of this node, and tells it who started it."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, if they are not there, and call the function.

        Lightning's own launcher would also kill this process when another one dies, before it can say which and why.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Send a signal to the other processes, also if an earlier trainer has started them."""
        for process in started():
            process.send_signal(signum)

    def _call_children_scripts(self) -> None:
        first = self.cluster_environment.node_rank() * self.num_processes
        with starting(first + 1, lambda: self.procs):  # which is another list by then
            super()._call_children_scripts()


def launcher(strategy: AvgPipeStrategy, start_method: Any) -> _Launcher | None:
    """What starts the processes of this node; None if there is only one process in all.

    Raises:
        ConfigurationError: processes cannot be started in this way here.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    _check_started(environment, strategy.device_layout)
    processes = strategy.num_processes
    if processes * strategy.num_nodes == 1:
        return None
    external = environment.creates_processes_externally
    if start_method == "popen":
        if _IS_INTERACTIVE and not external:
            raise ConfigurationError(
                f"strategy='avgpipe' with {processes} processes runs the script again, but a notebook is no script. "
                "Use strategy='avgpipe_notebook', which forks this process, or devices=1, which hosts all stages in it "
                "(with num_stages=..., and processes_per_device=1)"
            )
        # also where processes exist already (torchrun, SLURM): it starts none then, but limits their threads
        return ScriptLauncher(environment, processes, strategy.num_nodes)
    if external:
        raise ConfigurationError(
            f"start_method={start_method!r} starts processes, but {type(environment).__name__} says that they exist "
            "already; use strategy='avgpipe'"
        )
    return _MultiProcessingLauncher(strategy, start_method=start_method)


def _check_started(environment: ClusterEnvironment, device_layout: DeviceLayout) -> None:
    """Check that processes which exist already are as many as are needed, and in their places."""
    found, needed, each = environment.world_size(), device_layout.world_size, device_layout.node_size
    name = type(environment).__name__
    if found != needed:
        raise ConfigurationError(
            f"{name} says that {found} processes were started, but {device_layout} need {needed}: start {each} on each "
            f"node (torchrun --nproc_per_node={each}, SLURM --ntasks-per-node={each}), or change devices, num_nodes or "
            "processes_per_device"
        )
    node, local = environment.node_rank(), environment.local_rank()
    if device_layout.sharing > 1 and environment.global_rank() != node * each + local:
        raise ConfigurationError(
            f"{name} says that process {local} of node {node} has rank {environment.global_rank()}, but with "
            f"processes_per_device={device_layout.sharing} it must have rank {node * each + local}: number the "
            "processes node by node (SLURM --distribution=block)"
        )


@contextlib.contextmanager
def connecting(rank: int, world_size: int) -> Iterator[None]:
    """Explain why the processes do not find each other; and do not wait for them without the one that started this."""
    with needing_starter(f"rank {rank}"):
        try:
            yield
        except ConfigurationError:  # they were found
            raise
        except RuntimeError as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise PeerError(
                f"rank {rank} could not connect to the other processes ({world_size} in all) at {address} in set-up. "
                "Either one of them failed before, or not all were started, or they were given different MASTER_ADDR, "
                f"MASTER_PORT or NODE_RANK. {error}"
            ) from error


@dataclass(frozen=True)
class Meeting:
    """Where processes find each other.

    Attributes:
        store: that all processes share.
        keeper: who keeps it; None: rank 0.
        before: who came before this process as the same rank; None: nobody.
    """

    store: dist.Store
    keeper: str | None
    before: str | None = None


def meeting(environment: ClusterEnvironment, rank: int, timeout: timedelta, apart: bool = False) -> Meeting:
    """Find the store that all processes share.

    It is the one that torch.distributed would make by itself. But that would not return before all processes have come,
    and while it waits nobody could say which of them is missing, or that one has died.

    Args:
        environment: in which the processes find each other.
        rank: of this process.
        timeout: longest wait.
        apart: whether it must outlive rank 0.

    Raises:
        RuntimeError: it is not there within the timeout.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # of torchrun
    if dist.is_initialized():
        return Meeting((_kept or [default_store()])[0], "torchrun's agent" if agent else keeper.name())
    apart = apart and not agent
    if apart and rank == 0:
        keeper.start(environment.main_port, environment.world_size(), timeout.total_seconds())
    found: dist.Store = dist.TCPStore(
        environment.main_address,
        environment.main_port,
        is_master=rank == 0 and not agent and not apart,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    if agent:  # who outlives its processes, and starts them again
        return Meeting(fresh(found, rank, environment.world_size(), timeout), "torchrun's agent")
    _kept[:] = [found] * apart
    before = keeper.enter(found, rank) if apart else None
    return Meeting(found, keeper.name(), before)


def meeting_apart(meeting: Meeting, group: int, ranks: Sequence[int], rank: int, timeout: timedelta) -> dist.Store:
    """What the processes of a group that were started anew have of the store alone. All of them call it.

    Raises:
        ConfigurationError: it is group 0, or not all of them come within the timeout.
    """
    if group == 0:
        raise ConfigurationError(
            f"rank {rank} was started anew: {meeting.before} came before it to this run. If that has died, group 0 has "
            "left, or is about to, and does not come back, since logs and checkpoints would change hands twice; the "
            "others go on without it. To have it back, end all processes and start all again from the last checkpoint; "
            "another run needs another MASTER_PORT"
        )
    try:
        return fresh(dist.PrefixStore(f"avgpipe/anew/{group}", meeting.store), ranks.index(rank), len(ranks), timeout)
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank {rank} was started anew, after {meeting.before}, but not all processes of group {group} (ranks "
            f"{', '.join(map(str, ranks))}) within {timeout.total_seconds():g} s; start all of them, or another run "
            f"with another MASTER_PORT. {error}"
        ) from error


def register(registry: Any, strategy: type[AvgPipeStrategy]) -> None:
    """Make the names known: one for each way to start the processes."""
    what = "Pipeline parallelism for any LightningModule (AvgPipe)"
    if strategy.strategy_name in registry:  # this package was imported anew
        return
    registry.register(strategy.strategy_name, strategy, description=what)
    for suffix, start_method in _START_METHODS.items():
        registry.register(
            f"{strategy.strategy_name}_{suffix}",
            strategy,
            description=f"{what}; start_method={start_method!r}",
            start_method=start_method,
        )
