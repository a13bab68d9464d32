"""Start and connection of the processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_avgpipe.attempt import fresh
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.runtime.arrangement import Arrangement
from lightning_avgpipe.starter import ScriptLauncher, needing_starter

if TYPE_CHECKING:
    from lightning_avgpipe.connected import ConnectedStrategy
    from lightning_avgpipe.strategy import AvgPipeStrategy

__all__ = ["connecting", "launcher", "register", "register_explanation", "store"]

# name -> start_method, beside the strategy's own name; as in ddp
_START_METHODS = {"spawn": "spawn", "fork": "fork", "notebook": "fork"}


def launcher(strategy: ConnectedStrategy, start_method: Any) -> _Launcher | None:
    """What starts the processes of this node; None if there is only one process in all.

    Raises:
        ConfigurationError: processes cannot be started in this way here.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    _check_started(environment, strategy.arrangement)
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


def _check_started(environment: ClusterEnvironment, arrangement: Arrangement) -> None:
    """Check that processes which exist already are as many as are needed, and in their places."""
    found, needed, each = environment.world_size(), arrangement.world_size, arrangement.node_size
    name = type(environment).__name__
    if found != needed:
        raise ConfigurationError(
            f"{name} says that {found} processes were started, but {arrangement} need {needed}: start {each} on each "
            f"node (torchrun --nproc_per_node={each}, SLURM --ntasks-per-node={each}), or change devices, num_nodes or "
            "processes_per_device"
        )
    node, local = environment.node_rank(), environment.local_rank()
    if arrangement.sharing > 1 and environment.global_rank() != node * each + local:
        raise ConfigurationError(
            f"{name} says that process {local} of node {node} has rank {environment.global_rank()}, but with "
            f"processes_per_device={arrangement.sharing} it must have rank {node * each + local}: number the processes "
            "node by node (SLURM --distribution=block)"
        )


@contextlib.contextmanager
def connecting(rank: int, world_size: int) -> Iterator[None]:
    """Explain why the processes do not find each other; and do not wait for them without the one that started this."""
    with needing_starter(f"rank {rank}"):
        try:
            yield
        except RuntimeError as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise PeerError(
                f"rank {rank} could not connect to the other processes ({world_size} in all) at {address} in set-up. "
                "Either one of them failed before, or not all were started, or they were given different MASTER_ADDR, "
                f"MASTER_PORT or NODE_RANK. {error}"
            ) from error


def store(environment: ClusterEnvironment, rank: int, timeout: timedelta) -> tuple[dist.Store, str | None]:
    """The store that all processes share, and who keeps it: None if rank 0 does.

    It is the one that torch.distributed would make by itself. But that would not return before all processes have come,
    and while it waits nobody could say which of them is missing, or that one has died.

    Raises:
        RuntimeError: it is not there within the timeout.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # of torchrun
    found: dist.Store
    if dist.is_initialized():
        found = dist.distributed_c10d._get_default_store()
    else:
        found = dist.TCPStore(
            environment.main_address,
            environment.main_port,
            is_master=rank == 0 and not agent,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        if agent:  # who outlives its processes, and starts them again
            found = fresh(found, rank, environment.world_size(), timeout)
    return found, "torchrun's agent" if agent else None


def register(registry: Any, strategy: type[AvgPipeStrategy]) -> None:
    """Make the names known: one for each way to start the processes."""
    what = "Pipeline parallelism for any LightningModule (AvgPipe)"
    registry.register(strategy.strategy_name, strategy, description=what)
    for suffix, start_method in _START_METHODS.items():
        registry.register(
            f"{strategy.strategy_name}_{suffix}",
            strategy,
            description=f"{what}; start_method={start_method!r}",
            start_method=start_method,
        )


def register_explanation(name: str) -> None:
    """Where the names of this package are given to the other package of Lightning, say what is wrong."""
    other = sys.modules.get("pytorch_lightning")
    if other is None:
        return

    def explain(**_: Any) -> None:
        raise ConfigurationError(
            "this is the Trainer of the package pytorch_lightning, but lightning_avgpipe is for that of "
            "lightning.pytorch, which has the same contents under another name; write 'import lightning as L' (or "
            "'import lightning.pytorch as pl') for Trainer and LightningModule alike"
        )

    for key in (name, *(f"{name}_{suffix}" for suffix in _START_METHODS)):
        if key not in other.strategies.StrategyRegistry:
            other.strategies.StrategyRegistry.register(key, explain, description="for lightning.pytorch.Trainer")
