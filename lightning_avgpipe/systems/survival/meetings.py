"""Meetings of groups: the sums that averaging needs, over the groups that are present.

::

    group 0, all stages    B F | step   quorum   sum ----- commit | F B        who is there? sum; have all got it?
    group 1, all stages    B F | step   quorum   sum ----- commit | F B
    group 2                             quorum, heal   sum commit | F B        returns: takes the reference, adds 0

Each process meets those with the same stages in other groups; all processes of a group go through a meeting together.
If a sum fails because a group dies in the midst of it, the groups that are left begin the meeting again. What a group
has learned since the last meeting is still in its model, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import BUCKET_BYTES, Bucket, Collectives, TensorCollectives, buckets
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.systems.survival.progress import go_to, load_optimizer_states, optimizer_states, progress_of
from lightning_avgpipe.systems.survival.survival import STARTED
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.stepping import scalers_of
from lightning_avgpipe.utils.lightning import Callback, pl, rank_zero_only

if TYPE_CHECKING:
    from lightning_avgpipe.systems.survival.survival import Survival

_log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="The given buffer is not writable", module="torchft")
_POLL_S = 0.05
_COMMIT = 2  # in limits of a sum: a stage that has its sum waits here for one whose sum may run into the limit
_BEGINS, _GOES_ON = 1, 2  # marks of a group in a meeting; 0: it is absent
_RETRIES = 10  # if the lighthouse does not answer
_GOODBYE = b"."  # of a process that ends as it should
_RANK_BYTES = 4


@contextlib.contextmanager
def meeting(survival: Survival, context: RunContext, deployment: Deployment) -> Iterator[None]:
    """Average the group's models with those of other groups within this context, which is one run of training."""
    trainer, cluster = context.trainer, context.cluster
    if cluster.stage_map.num_groups > 1:
        raise ConfigurationError(
            f"{survival!r} with {cluster.stage_map.num_groups} replicas in each group: a group has one pipeline; use "
            "num_stages='auto', or more groups"
        )
    if any(scaler.is_enabled() for scaler in scalers_of(trainer.precision_plugin)):
        raise ConfigurationError(
            f"{survival!r} with precision={trainer.precision_plugin.precision!r}: a loss scaler skips steps, and "
            "groups would not meet as often as each other; use 'bf16-mixed'"
        )
    meetings = Meetings(survival, trainer, cluster, context.configuration.options.timeout)
    deployment.parallel.averaging_group = meetings
    ends = _AtBatchEnd(meetings)
    trainer.callbacks.insert(0, ends)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.callbacks.remove(ends)  # type: ignore[attr-defined]
        meetings.leave()


class _AtBatchEnd(Callback):
    """A callback that ends the averaging of a step, so that groups meet at the same place of an iteration.

    Args:
        meetings: meetings that this process leaves first of all when it fails.
    """

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings

    def on_exception(self, *args: Any) -> None:
        self._meetings.leave()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.strategy.run.models.finish_averaging()  # type: ignore[attr-defined]


class GroupManager(Manager):
    """torchft's manager, which tells the other groups at once that a sum has failed here.

    In a ring, some of them wait for this process, not for the one that is gone, and would wait until the time limit.

    Args:
        connections: connections to other groups.
        options: further options of torchft's manager.
    """

    def __init__(self, connections: ProcessGroupGloo, **options: Any) -> None:
        self._connections = connections
        super().__init__(pg=connections, **options)

    def report_error(self, e: Exception) -> None:
        """Note an error, so that this meeting does not count, and close the connections to other groups."""
        super().report_error(e)
        self._connections.abort()


class Meetings(TensorCollectives):
    """The processes with the same stages in other groups, each of which may be absent.

    Sums are collected until somebody waits for one of them; then all are made in one meeting.

    Args:
        survival: options of the groups.
        trainer: trainer of the run.
        cluster: processes of this group.
        timeout: longest wait for groups that live.
    """

    def __init__(self, survival: Survival, trainer: pl.Trainer, cluster: Cluster, timeout: timedelta) -> None:
        super().__init__(cluster.leaders, survival.world_number)  # no other process of the group has these models
        self.count = self.present = survival.groups
        self._survival, self._trainer, self._cluster, self._timeout = survival, trainer, cluster, timeout
        self._pending: list[tuple[Sequence[Tensor], Any]] = []
        self._store: dist.TCPStore | None = None
        self._lifelines: Lifelines | None = None
        self._manager: Any = None
        self._ensemble: Ensemble | None = None
        self._met = 0  # meetings that this group has taken part in, or has caught up with
        self._there: list[int] = []  # groups that took part in the last meeting
        self._begins = False  # whether this group is in its first meeting, within an iteration
        self._adds = True  # whether this group has learned something that the others do not have

    # -- methods of TensorCollectives ---------------------------------------------------------------------------------

    def begin(self, ensemble: Ensemble) -> None:
        """Meet the other groups for the first time: take over their models, or begin together with them."""
        self._ensemble = ensemble
        if self._manager is None:
            self._connect()
        self._begins = True
        ensemble.averager.stepped(0)
        ensemble.averager.average_all_now()
        self._begins = False

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Note tensors to be summed in the next meeting; return a function that holds it if it has not been held."""
        self._pending.append((tensors, ReduceOp.SUM))
        return self._meet

    def begin_choice(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Note integers of which all groups take the largest, since no single group is sure to be there to choose."""
        self._pending.append((tensors, ReduceOp.MAX))
        return self._meet

    def copy(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Leave tensors as they are: groups become equal in their first meeting."""

    # -- a meeting -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Make this process known to those of other groups, and to the lighthouse."""
        survival, world, host = self._survival, self._cluster.world, self._survival.host
        if world.rank == 0:  # a store of its own: nothing of an earlier run is in it
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        host, port = world.broadcast((host, self._store.port if self._store else 0))
        self._lifelines = Lifelines(world, host, self._timeout, self._lose)
        sum_limit = timedelta(seconds=survival.sum_timeout)
        connections = ProcessGroupGloo(timeout=sum_limit)

        def connect() -> None:
            self._manager = GroupManager(
                connections,
                timeout=_COMMIT * sum_limit,
                quorum_timeout=max(self._timeout, 2 * _COMMIT * sum_limit),
                connect_timeout=sum_limit,
                quorum_retries=_RETRIES,
                min_replica_size=1,
                use_async_quorum=False,
                load_state_dict=self._load,
                state_dict=self._state,
                # the default, HTTP, would open ports that answer anybody
                checkpoint_transport=PGTransport(connections, sum_limit, torch.device("cpu")),
                rank=world.rank,
                world_size=world.world_size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=survival.meets_at,
                replica_id=f"group_{self.group_number}",
                hostname=survival.host,
            )

        self._together(connect, f"connects to the lighthouse at {survival.meets_at}")

    def _meet(self) -> None:
        """Hold a meeting for all tensors that are noted; do nothing if there are none."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        here = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        self._together(lambda: self._hold(pending, here), "waits for the other groups")
        there = here.nonzero().flatten().tolist()
        # groups at their first meeting have not made the step that the others may log and save now
        first = int(here.argmax())
        self._tell(there, first)
        self._there, self.present, self._adds = there, len(there), True
        # rank 0 of the first group that has made this step logs and saves
        rank = self._cluster.world.rank
        rank_zero_only.rank = rank if self.group_number == first else rank + 1  # type: ignore[attr-defined]

    def _together(self, function: Callable[[], object], doing: str) -> None:
        """Run a function that waits for other groups, and watch this group meanwhile; errors name the group."""

        def named() -> None:
            try:
                function()
            except (RuntimeError, TimeoutError) as error:
                raise PeerError(
                    f"group {self.group_number} {doing}, and gets no answer from them, or from the lighthouse at "
                    f"{self._survival.meets_at}, without which groups do not find each other: {error}"
                ) from error

        lost: Sequence[int] = self._lifelines.lost if self._lifelines is not None else ()
        running = self._cluster.waits.begin(named, doing)
        self._cluster.waits.until(lambda: bool(lost) or running.over.is_set(), doing)
        if lost:
            watch = self._cluster.watch
            raise PeerError(f"{watch.names[lost[0]]} of group {self.group_number} has died, while {watch.name} {doing}")
        running.finish()

    def _hold(self, pending: Sequence[tuple[Sequence[Tensor], Any]], here: Tensor) -> None:
        """Sum over the groups that are present; if a sum fails, sum again over those that are left."""
        manager = self._manager
        while True:
            manager.start_quorum()  # may call _load
            while not self._complete():
                time.sleep(_POLL_S)
                manager.start_quorum()
            here.zero_()[self.group_number] = _BEGINS if self._begins else _GOES_ON
            kinds: dict[tuple[Any, torch.dtype], list[Tensor]] = defaultdict(list)
            for tensors, operation in pending:
                for tensor in filter(Tensor.numel, tensors):
                    if not self._adds:
                        tensor.fill_(0 if operation == ReduceOp.SUM else torch.iinfo(tensor.dtype).min)
                    kinds[operation, tensor.dtype].append(tensor)
            kinds[ReduceOp.SUM, here.dtype].append(here)
            exchanges = [
                Bucket(bucket, True, partial(manager.allreduce, reduce_op=operation))
                for (operation, _), tensors in kinds.items()
                for bucket in buckets(tensors, BUCKET_BYTES)
            ]
            for exchange in exchanges:
                exchange.work.wait()
            if manager.should_commit():
                break
            why = "in another process" if (error := manager.errored()) is None else error.original_exception
            _log.info("group %d meets once more, since a sum failed: %s", self.group_number, why)
            # torchft takes a group to be where its last process is: one that could not heal might never do so
            steps = self._cluster.group.exchange_objects(manager.current_step(), "a meeting that did not count")
            manager.load_state_dict({**manager.state_dict(), "step": min(steps)})
        for exchange in exchanges:
            exchange.put()
        self._met = manager.current_step()

    def _complete(self) -> bool:
        """Return whether training may begin or go on: the first meeting needs all groups, later ones any of them."""
        manager = self._manager
        if manager.current_step() or manager.num_participants() == self.count:
            return True
        if os.path.exists(os.environ.get(STARTED, "")):
            raise self._too_late()
        return False

    def _too_late(self) -> ConfigurationError:
        return ConfigurationError(f"group {self.group_number} comes back when the others have trained to the end")

    def _tell(self, there: Sequence[int], first: int) -> None:
        tells = self.group_number == first and self._cluster.world.rank == 0 and self._there
        for group in set(self._there) ^ set(there) if tells else ():
            verb = "is back" if group in there else "is gone"
            _log.warning("group %d %s after meeting %d; groups %s train", group, verb, self._met, list(there))

    def _lose(self) -> None:
        """End the signs of life at once when a process of this group has died: the group will end."""
        if (manager := self._manager) is not None:
            manager.shutdown(wait=False)
        self._cluster.waits.arrivals.notify()

    def leave(self) -> None:
        """End the signs of life, so that the others do not wait for this group."""
        if self._lifelines is not None:
            self._lifelines.close()
            self._lifelines = None
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._manager = None

    # -- a group that comes back ---------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Return the reference's parameters and buffers of this process's stages, and frozen parameters, by name."""
        assert self._ensemble is not None
        models, module = self._ensemble.models, self._trainer.lightning_module
        assert models.shared is not None
        frozen = {n: p.detach() for n, p in module.named_parameters() if n not in models.reference}
        named = {**frozen, **models.shared.buffers, **{name: models.reference[name] for name in models.mine}}
        return {name: tensor.detach() for name, tensor in named.items() if not tensor.is_meta}

    def _state(self) -> dict[str, Any]:
        """Return what a group that comes back needs from this process."""
        assert self._ensemble is not None
        return {
            "met": self._manager.current_step(),
            "there": self._there,
            "tensors": self._tensors(),
            "optimizers": optimizer_states(self._ensemble.optimizers.of(0)),
            "progress": progress_of(self._trainer, self._begins),
        }

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        """Take over the reference, and training's progress, from a group that is further.

        A group that has not died is behind if the last meeting counted for others but not for this group. If it took
        part in that meeting, its part is in the reference. If not, it adds its part now.
        """
        assert self._ensemble is not None
        models, own = self._ensemble.models, self._tensors()
        theirs = state["tensors"]
        differing = sorted({n for n in {**own, **theirs} if _form(own.get(n)) != _form(theirs.get(n))})
        if differing:
            raise ConfigurationError(
                f"group {self.group_number} cannot take over '{differing[0]}' from another group, which has it on "
                "another stage, or of another shape: all groups must train the same module, with the same options "
                "and devices"
            )
        if not self._met and state["progress"]["training is over"]:
            raise self._too_late()
        counted = not self._met or (state["met"] == self._met + 1 and self.group_number in state["there"])
        for model in models.each:
            for name in models.mine:
                parameter = model.parameters[name].detach()
                further = theirs[name].to(parameter.device)
                parameter.copy_(further if counted else parameter + (further - own[name]))
            for name, buffer in model.buffers.items():
                if name in theirs and not self._met:
                    buffer.detach().copy_(theirs[name])
        for name, tensor in own.items():
            tensor.copy_(theirs[name])
        if not self._met:
            for n in range(models.size):
                load_optimizer_states(self._ensemble.optimizers.of(n), state["optimizers"])
        if not self._met or state["met"] > self._met + 1:  # else it is at most one step behind, which it makes next
            go_to(self._trainer, state["progress"], self._begins)
        self._adds = self._adds and not counted


def _form(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype)


# -- deaths within the group during a meeting, in which its processes do not talk to each other ------------------------


class Lifelines:
    """Connections of rank 0 to the other processes of its world, which break when one of them ends without a goodbye.

    The others need none to rank 0, which keeps the store that their watch reads. All processes construct it together.

    Args:
        world: processes of the group.
        host: name or address at which they reach rank 0.
        limit: longest wait for the others to connect.
        notify: called when a process is lost.

    Attributes:
        lost: ranks of processes that have died; known on rank 0.
    """

    def __init__(self, world: Collectives, host: str, limit: timedelta, notify: Callable[[], None]) -> None:
        self.lost: list[int] = []
        self._notify = notify
        self._own: socket.socket | None = None
        self._others: dict[socket.socket, int] = {}
        server = socket.create_server((host, 0)) if world.rank == 0 else None
        port: int = world.broadcast(0 if server is None else server.getsockname()[1])
        if server is None:
            self._own = socket.create_connection((host, port), limit.total_seconds())
            self._own.sendall(world.rank.to_bytes(_RANK_BYTES, "big"))
            return
        with server:
            server.settimeout(limit.total_seconds())
            for _ in range(world.world_size - 1):
                other, _ = server.accept()
                other.settimeout(limit.total_seconds())
                self._others[other] = int.from_bytes(other.recv(_RANK_BYTES, socket.MSG_WAITALL), "big")
        threading.Thread(target=self._listen, name="avgpipe lifelines", daemon=True).start()

    def _listen(self) -> None:
        while self._others:
            for other in wait(list(self._others)):
                assert isinstance(other, socket.socket)
                try:
                    said = other.recv(1)
                except OSError:
                    said = b""
                rank = self._others.pop(other)
                other.close()
                if said != _GOODBYE:
                    self.lost.append(rank)
                    self._notify()

    def close(self) -> None:
        """Say goodbye to rank 0; on rank 0 itself this does nothing."""
        if self._own is not None:
            with self._own, contextlib.suppress(OSError):  # rank 0 may be gone
                self._own.send(_GOODBYE)
