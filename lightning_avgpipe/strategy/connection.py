"""The connection of the strategy's processes, from the set-up of the environment to teardown.

After an exception or a signal all processes end together. Processes with the same place in each group are
data-parallel peers, for ``self.all_gather``, ``strategy.reduce`` and ``self.log(sync_dist=True)``::

    group 0     rank 1     rank 0        trains on samples 0 2 4 ..
    group 1     rank 3     rank 2        trains on samples 1 3 5 ..
                peers      peers

Groups train parallel models, or are replicas. Processes of one group work on the same batch, so they are not peers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.alone import hides_rank
from lightning_avgpipe.comm.cluster import Cluster, Process
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, Party, StageMap
from lightning_avgpipe.comm.watch import REQUEUE, STOP
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks, launch
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.utils import parent
from lightning_avgpipe.utils.device import backends, connects_hosts, device_backend, port_of
from lightning_avgpipe.utils.lightning import (
    Callback,
    ClusterEnvironment,
    SIGTERMException,
    TrainerStatus,
    _all_gather_ddp_if_available,
    _destroy_dist_connection,
    _init_dist_connection,
    _sync_ddp_if_available,
    _TunerExitException,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_avgpipe.utils.patching import Replacement, all_replaced, noop
from lightning_avgpipe.utils.tensors import reduced, reduction_name

T = TypeVar("T")

# Connections have a longer timeout than our own waits, whose errors name the stage and the action.
_GRACE = timedelta(seconds=60)


class Connection:
    """Connects the processes of one strategy, and ends them together. Several runs use one connection.

    Args:
        backend: backend of torch.distributed; None: one is chosen for the device.

    Attributes:
        backend: backend of torch.distributed; None before it is chosen.
        cluster: the processes and their channels; None before :meth:`arrange`, and after a failure.
        layout: layout of all processes on devices; None before :meth:`arrange`.
        failed: whether the last run has ended with an error, here or in another process.
        noted: requests to this process in this run from outside, such as a signal to stop.
        hears: called with each request of any process, once all processes know of it.
        is_leading: whether a hook is running that only rank 0 of each group runs, so that the other processes of the
            group take part in no collective.
    """

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.cluster: Cluster | None = None
        self.layout: DeviceLayout | None = None
        self.failed = False
        self.noted: set[str] = set()
        self.hears: Callable[[str], None] = noop
        self.is_leading = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cluster": None, "hears": noop}  # a trainer that has trained can be pickled

    def arrange(
        self, num_stages: int, rank: int, device: torch.device, layout: DeviceLayout, options: Options
    ) -> Cluster:
        """Create the cluster, or rearrange the present one if it has the same groups of processes.

        Args:
            num_stages: K.
            rank: rank of this process among all.
            device: device of this process.
            layout: layout of all processes on devices.
            options: options of the strategy.
        """
        self.layout, several = layout, layout.world_size > 1
        checks.schedule(options, num_stages, layout.group_size(num_stages))
        self.failed = False
        if several:
            self.backend = self.backend or device_backend(None, device)
            checks.backend(self.backend, device)
        stage_map = StageMap.on(layout, num_stages, placement=options.placement)
        if self.cluster is None or self.cluster.stage_map.layout != stage_map.layout:
            if several and options.links.reader == "first":
                stage_map = replace(stage_map, reader=stage_map.owner(0))
            if several:
                gc.collect()  # an unused trainer is a reference cycle, and keeps its connections open until collected
            between = None if port_of(device).is_host or not several else device_backend(self.backend, device)
            shared_memory = options.links.shared_memory
            network = ProcessGroups(rank, device, options.timeout + _GRACE, between, shared_memory)
            process = Process(rank, device, options.timeout.total_seconds(), network, parent.deaths)
            self.cluster = Cluster(stage_map, process)
        else:  # the last run's plan may have placed stages differently
            self.cluster.rearrange(replace(stage_map, reader=self.cluster.stage_map.reader))
        return self.cluster

    def open(self, environment: ClusterEnvironment, options: Options) -> None:
        """Connect the processes, unless they are connected. Every process calls it, and waits for all others.

        Args:
            environment: environment through which processes find each other.
            options: options of the strategy.
        Raises:
            PeerError: a process does not connect within the timeout, or ends meanwhile.
        """
        assert self.cluster is not None
        rank, size = self.cluster.world.rank, self.cluster.world.world_size
        if size == 1:
            self.cluster.open()
            return
        assert self.backend is not None
        with launch.connecting(rank, size):
            store = launch.shared_store(environment, rank, options.timeout)
            # control messages travel on the host, whatever connects the devices
            all_devices = self.backend if options.averaging.processes_per_device == 1 else "gloo"
            both = self.backend if connects_hosts(self.backend) else backends("gloo", all_devices, self.cluster.device)
            # if torch.distributed is initialized already, Lightning leaves it as it is
            meet = partial(_init_dist_connection, environment, both, timeout=options.timeout, store=store)
            is_made_here = not dist.is_initialized()
            self.cluster.open(store, meet, "torchrun's agent" if launch.has_agent() else None)
        if is_made_here and not port_of(self.cluster.device).is_host:  # Lightning does so only for exactly "nccl"
            atexit.register(_destroy_dist_connection)
        self.cluster.control.when_agreed(self.hears)
        for request in tuple(self.noted):  # noted before these connections were open
            self.cluster.watch.request(request)

    def note(self, request: str) -> None:
        """Note a request to this process, which the watch passes on. It never waits, since signal handlers call it."""
        self.noted.add(request)
        if self.cluster is not None:
            self.cluster.watch.request(request)

    def agreed(self, request: str) -> bool:
        """Return whether all processes know of a request that any of them has noted."""
        if self.cluster is None or self.cluster.world.world_size == 1:
            return request in self.noted
        return self.cluster.control.agreed(request)

    def fail(self, exception: BaseException) -> None:
        """Report an exception that ends this process to the others, unless it is the stop that all agreed on."""
        if self.cluster is None or (isinstance(exception, SIGTERMException) and self.agreed(STOP)):
            return
        self.failed = True
        self.cluster.watch.report(exception)
        parent.end_with_this_process()

    def close(self) -> None:
        """Stop the channels at the end of a run; after a failure, close the connections for good."""
        if self.cluster is not None:
            self.cluster.close(self.failed)
        if self.failed:
            self.cluster = None
            atexit.unregister(_destroy_dist_connection)  # it would wait for processes that no longer exist

    def barrier(self, name: str | None) -> None:
        """Wait for all processes, if they are connected."""
        if (processes := self._processes) is not None:
            processes.barrier(f"the barrier '{name}'" if name else "a barrier")

    def broadcast(self, item: T, source: int) -> T:
        """Return the source's item on every process; without connected processes, return the given item."""
        return item if (processes := self._processes) is None else processes.broadcast(item, source)

    def decide(self, decision: bool, unanimously: bool) -> bool:
        """Return whether all processes (``unanimously``), or any of them, decided for something."""
        processes = self._processes
        if processes is None:
            return decision
        votes = processes.count(decision)
        return votes == processes.world_size if unanimously else votes > 0

    @property
    def _processes(self) -> Collectives | None:
        """The processes that take part in a collective now; None if they are not connected."""
        if self.cluster is None or self.failed:
            return None
        return self.cluster.leaders if self.is_leading else self.cluster.world


# -- all processes end together ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def handling_signals_together(trainer: pl.Trainer, connection: Connection) -> Iterator[None]:
    """Within this context, the whole run of a trainer, all processes act on a signal together, between two batches.

    A signal may reach any process at any time. Its handler only notes it; all processes learn of it with the same
    message from rank 0, and act on it at the same batch. So a checkpoint that is saved then is complete, although all
    processes must take part. Lightning would act in each process at once: it might save during the capture of a step,
    or when only some of the models have stepped.
    """
    signals, loop, several = trainer._signal_connector, trainer.fit_loop.epoch_loop, trainer.world_size > 1
    requeue, advance = signals._slurm_sigusr_handler_fn, loop.advance
    requeued: list[bool] = []

    def stop(signum: Any, frame: Any) -> None:  # a signal handler must not wait for the code that it interrupts
        launcher = trainer.strategy.launcher
        if STOP not in connection.noted and launcher is not None:  # pass the signal on to the processes started here
            launcher.kill(signum)
        connection.note(STOP)

    def agreed(request: str) -> None:
        if request == STOP:
            rank_zero_info("SIGTERM was received: all processes stop after this batch")
            signals.received_sigterm = True  # Lightning's loops do the rest

    def requeue_if_agreed() -> None:
        if connection.agreed(REQUEUE) and not requeued:
            requeued.append(True)
            requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]

    def then_requeue(function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any) -> T:
            result = function(*args)
            requeue_if_agreed()
            return result

        return call

    def next_batch(*args: Any) -> None:
        requeue_if_agreed()
        if trainer.received_sigterm:
            raise SIGTERMException
        advance(*args)

    connection.noted.clear()
    replacements: list[Replacement] = [
        (connection, "hears", agreed),
        (signals, "_slurm_sigusr_handler_fn", lambda *_: connection.note(REQUEUE)),
        (loop, "advance", next_batch),
    ]
    evaluations = (trainer.validate_loop, "_evaluation_step"), (trainer.test_loop, "_evaluation_step")
    for each, step in (*evaluations, (trainer.predict_loop, "_predict_step")):
        # after each step and at the end of the loop, since groups may learn of a request only then
        replacements += [(each, name, then_requeue(getattr(each, name))) for name in (step, "run")]
    if several:
        replacements.append((signals, "_sigterm_notifier_fn", stop))
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # a collective of all processes before every batch
            replacements.append((loop, "_broadcast_sigterm_tensor", noop))
    with all_replaced(replacements):
        yield


@contextlib.contextmanager
def ending_together(trainer: pl.Trainer, connection: Connection) -> Iterator[None]:
    """Within this context, the whole run of a trainer, an exception is reported before any code reacts to it.

    Callbacks may react with calls that need all processes. So does a search for a learning rate: it restores the
    checkpoint that it began with, and sets up the data, before it lets the exception out.
    """
    first, fit = _ReportsExceptionFirst(), trainer.fit_loop.run

    def run() -> None:
        try:
            fit()
        except _TunerExitException:
            raise
        except BaseException as error:
            trainer.strategy.on_exception(error)
            raise

    def unless_failed(function: Callable[..., object]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if not connection.failed:
                function(*args, **kwargs)

        return call

    reacting = (trainer._checkpoint_connector, "restore"), (trainer.fit_loop, "setup_data")
    replacements: list[Replacement] = [(each, name, unless_failed(getattr(each, name))) for each, name in reacting]
    with all_replaced([(trainer.fit_loop, "run", run), *replacements]):
        trainer.callbacks.insert(0, first)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if first in trainer.callbacks:  # type: ignore[attr-defined]  # a search that fails leaves others there
                trainer.callbacks.remove(first)  # type: ignore[attr-defined]


class _ReportsExceptionFirst(Callback):
    """A callback that reports an exception first, before other callbacks react with calls that need all processes."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        trainer.strategy.on_exception(exception)


def _why_no_checkpoint(trainer: pl.Trainer, connection: Connection, has_begun: bool) -> str | None:
    """Return the end of a sentence that begins with "No checkpoint is saved"; None if one can be saved.

    A callback that saves in ``on_exception`` could replace a good checkpoint with a bad one: before training has begun
    the module may not have the weights that the run resumes from, and after a failure no process has the whole model.
    """
    if connection.failed:
        return (
            " after the failure: each process holds a part of the model only, and the processes did not stop at the "
            "same iteration. Save regularly (ModelCheckpoint(every_n_train_steps=...)), and resume from the last "
            "checkpoint"
        )
    if trainer.state.status == TrainerStatus.INTERRUPTED and not has_begun:
        return ": the run ended before training began, and what may be there from a run before is as it was"
    return None


def _is_refused(trainer: pl.Trainer, connection: Connection, has_begun: Callable[[], bool], what: str = "") -> bool:
    why = _why_no_checkpoint(trainer, connection, has_begun())
    if why is not None:
        rank_zero_warn(f"No checkpoint is saved{what}{why}")
    return why is not None


def refusing_bad_checkpoints(trainer: pl.Trainer, connection: Connection, has_begun: Callable[[], bool]) -> Replacement:
    """Return a replacement, for a whole run, with which the trainer saves no bad checkpoint after a failure.

    Args:
        trainer: trainer of the run.
        connection: connection of the processes.
        has_begun: returns whether training has begun in this run.
    """
    save = trainer.save_checkpoint

    def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_refused(trainer, connection, has_begun, f" to {filepath}"):
            save(filepath, *args, **kwargs)

    return trainer, "save_checkpoint", save_checkpoint


def keeping_last_checkpoint(
    trainer: pl.Trainer, connection: Connection, has_begun: Callable[[], bool]
) -> Iterator[Replacement]:
    """Yield replacements with which callbacks do not save after an exception either, once all callbacks are known.

    Otherwise a callback would replace its last checkpoint, although the trainer saves no new one. For the arguments see
    :func:`refusing_bad_checkpoints`.
    """

    def unless_refused(saves: Callable[[pl.Trainer], bool]) -> Callable[[pl.Trainer], bool]:
        return lambda trainer: saves(trainer) and not _is_refused(trainer, connection, has_begun)

    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_should_save_on_exception"):
            yield callback, "_should_save_on_exception", unless_refused(callback._should_save_on_exception)


# -- data-parallel peers -----------------------------------------------------------------------------------------------


class Peers:
    """The processes with the same place in each group, which train on different parts of the data.

    A process without peers gets its own values back unchanged, as on one device. In evaluation no process has peers,
    since every group evaluates all data, and a sum over groups would count each sample several times.

    All processes must construct this object at the same time. Peers have their own process group, so that collectives
    of user code cannot mix with the messages of training.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        self._trainer = trainer
        layout = cluster.stage_map.layout
        self._members = None
        if len(layout) > 1:
            self._members = cluster.connect([Party("peers", ranks) for ranks in zip(*layout, strict=True)], "peers")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all peers, in the order of groups.

        Args:
            tensor: tensor of this process.
            group: process group made by user code, used instead of the peers; None or the group of all processes means
                the peers.
            sync_grads: whether gradients flow back; this is refused for peers, since hooks run outside of any backward.
        Raises:
            ConfigurationError: a training step calls it, or gradients would have to flow back.
        """
        if _is_own(group):
            return _all_gather_ddp_if_available(tensor, group, sync_grads)
        if sync_grads and tensor.requires_grad and self._are_several("all_gather(sync_grads=True)"):
            raise ConfigurationError(
                "all_gather(sync_grads=True) over groups of processes: no backward passes through a hook; "
                "use sync_grads=False"
            )
        gathered = self._gathered(tensor, "all_gather")
        return tensor if gathered is None else gathered

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce the tensors of all peers; anything else is returned unchanged.

        Args:
            tensor: tensor of this process.
            group: see :meth:`all_gather`.
            reduce_op: a name, such as "mean" or "sum", or an operation of torch.distributed.
        Raises:
            ConfigurationError: a training step calls it, or there is no such operation.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if _is_own(group):
            return _sync_ddp_if_available(tensor, group, reduce_op)
        gathered = self._gathered(tensor, "reduce")
        if gathered is None:
            return tensor
        result = reduced(gathered, reduction_name(reduce_op))
        if result is None:
            raise ConfigurationError(
                f"strategy.reduce(reduce_op={reduce_op!r}): must be 'mean', 'sum', 'min', 'max' or 'product'"
            )
        return result

    def _gathered(self, tensor: Tensor, what: str) -> Tensor | None:
        """Stack the tensors of all peers; None if there are no peers."""
        if self._members is None or not self._are_several(what):
            return None
        found = self._members.exchange_objects(tensor.detach().cpu())
        return torch.stack([one.to(tensor.device) for one in found])

    def _are_several(self, what: str) -> bool:
        """Return whether there are peers now; raise a ConfigurationError if a step asks for them."""
        if self._members is None or not self._trainer.training:
            return False
        if hides_rank():
            raise ConfigurationError(
                f"{type(self._trainer.lightning_module).__name__}.training_step calls {what}, and "
                f"{self._members.world_size} groups of processes train on data of their own: groups do not wait for "
                "each other within a pipeline, and a step sees a micro-batch. Gather in on_train_batch_end or "
                "on_train_epoch_end instead, or use self.log, which goes over all groups by itself"
            )
        return True


def _is_own(group: Any) -> bool:
    """Return whether user code has created a process group."""
    return group is not None and group is not dist.group.WORLD
