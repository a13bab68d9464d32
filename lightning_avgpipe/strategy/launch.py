"""Starting and connecting the processes."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_avgpipe.comm.topology import DeviceLayout
from lightning_avgpipe.comm.transfer import is_broken_connection
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.utils.lightning import (
    _IS_INTERACTIVE,
    ClusterEnvironment,
    _Launcher,
    _MultiProcessingLauncher,
    _set_num_threads_if_needed,
    _SubprocessScriptLauncher,
)
from lightning_avgpipe.utils.parent import fresh, needing_starter, started, starting
from lightning_avgpipe.utils.torch_compat import default_store

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy

# suffix of the strategy's name -> start_method, as in ddp
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each other process of this node, and tells these processes which one started them."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, unless they exist, and call the function.

        Lightning's own launcher would kill this process as soon as another one dies, before it can report which and
        why.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Send a signal to the started processes, including those that an earlier trainer has started."""
        for process in started():
            process.send_signal(signum)

    def _call_children_scripts(self) -> None:
        first = self.cluster_environment.node_rank() * self.num_processes
        with starting(first + 1, lambda: self.procs):  # read later, since Lightning replaces the list
            super()._call_children_scripts()


def launcher(strategy: AvgPipeStrategy, start_method: Any) -> _Launcher | None:
    """Return the launcher of this node's processes; None if there is one process in total.

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
                f"strategy='avgpipe' with {processes} processes runs the script again, but a notebook is not a script. "
                "Use strategy='avgpipe_notebook', which forks this process, or devices=1, which hosts all stages in it "
                "(with num_stages=...)"
            )
        # also if the processes exist already (torchrun, SLURM): then the launcher only limits their threads
        return ScriptLauncher(environment, processes, strategy.num_nodes)
    if external:
        raise ConfigurationError(
            f"start_method={start_method!r} starts processes, but {type(environment).__name__} says that they exist "
            "already; use strategy='avgpipe'"
        )
    return _MultiProcessingLauncher(strategy, start_method=start_method)


def _check_started(environment: ClusterEnvironment, device_layout: DeviceLayout) -> None:
    """Check that the environment has the needed number of processes, with the right ranks."""
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
            f"Averaging(processes_per_device={device_layout.sharing}) it must have rank {node * each + local}: number "
            "the processes node by node (SLURM --distribution=block)"
        )


@contextlib.contextmanager
def connecting(rank: int, world_size: int) -> Iterator[None]:
    """Within this context, in which processes connect, explain errors; end this process if its starter has ended."""
    with needing_starter(f"rank {rank}"):
        try:
            yield
        except RuntimeError as error:
            if not is_broken_connection(error):
                raise
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise PeerError(
                f"rank {rank} could not connect to the other processes ({world_size} in all) at {address} in set-up. "
                "Either one of them failed before, or not all were started, or they were given different MASTER_ADDR, "
                f"MASTER_PORT or NODE_RANK. {error}"
            ) from error


def has_agent() -> bool:
    """Return whether torchrun's agent hosts the store through which processes connect; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def shared_store(environment: ClusterEnvironment, rank: int, timeout: timedelta) -> dist.Store:
    """Return the store that all processes share.

    torch.distributed would create the same store by itself, but would return only after all processes have joined.
    While it waits, no process could report which one is missing, or that one has died.

    Args:
        environment: environment that knows the store's address.
        rank: rank of this process.
        timeout: longest wait.
    Raises:
        DistError: no store was found within the timeout.
        ConfigurationError: the store belongs to another run.
    """
    if dist.is_initialized():
        return default_store()
    found: dist.Store = dist.TCPStore(
        environment.main_address,
        environment.main_port,
        is_master=rank == 0 and not has_agent(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    # the agent outlives its processes and may restart them, so the store may hold entries of earlier processes
    if has_agent():
        return fresh(found, rank, environment.world_size(), timeout)
    _enter(found, environment, rank)
    return found


def _enter(store: dist.Store, environment: ClusterEnvironment, rank: int) -> None:
    """Register this process in a store, and check that no other run or process uses the store with this rank.

    Two runs that were given the same port would share the store of the first one.
    """
    run, this = f"{environment.world_size()} processes", f"process {os.getpid()} on {platform.node()} as rank {rank}"
    for key, mine in (("run", run), (f"rank/{rank}", this)):
        found = store.compare_set(f"avgpipe/{key}", "", mine).decode()
        if found != mine:
            raise ConfigurationError(
                f"rank {rank} has found another run at {environment.main_address}:{environment.main_port}, with "
                f"{found}. The other run is not disturbed. Start this one with another MASTER_PORT, or after it"
            )


def register(registry: Any, strategy: type[AvgPipeStrategy]) -> None:
    """Register the strategy under one name for each way to start processes."""
    what = "Pipeline parallelism for any LightningModule (AvgPipe)"
    if strategy.strategy_name in registry:  # this package was imported again
        return
    registry.register(strategy.strategy_name, strategy, description=what)
    for suffix, start_method in _START_METHODS.items():
        registry.register(
            f"{strategy.strategy_name}_{suffix}",
            strategy,
            description=f"{what}; start_method={start_method!r}",
            start_method=start_method,
        )
