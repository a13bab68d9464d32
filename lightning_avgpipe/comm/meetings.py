"""Meetings: what groups of processes do together, while one of them may die.

A collective that breaks may have ended on some processes and not on others. So each one is tried on the groups that
were known when it began, and then the store decides, once for all of them, whether it counts::

    took part        add 1 to its votes; the last voter writes "done"
    a group left     write "left", unless "done" is there
    done             all go on                         left        all try again with those that are left

Nobody goes on before it is decided, so all are at the same place. Every wait is bounded, and ends with an error if the
own group fails. A connection that breaks, or a wait that takes too long, is some process's: whoever does not answer
then is given up, and its group with it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.codec import as_bytes
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.membership import Membership
from lightning_avgpipe.comm.network import Network
from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.comm.routes import Party
from lightning_avgpipe.comm.waits import GivenUpError, Waits
from lightning_avgpipe.errors import AvgPipeError, PeerError
from lightning_avgpipe.utils.patching import nothing

T = TypeVar("T")

AVERAGING = "teams"  # those that average

_POLL_S = 0.001


class Meetings:
    """This process's part, in all runs.

    Args:
        membership: of the groups.
        network: connects processes.
        changed: told, in the main thread, when other groups average, or do anything with this process, than before.

    Attributes:
        membership: as given.
        taken: changes with which this process tries what it does together with others.
        averaging: changes with which models are averaged: the same on all processes, at the same point.
    """

    def __init__(self, membership: Membership, network: Network, changed: Callable[[], None]) -> None:
        self.taken = self.averaging = 0
        self.membership = membership
        self._network = network
        self._changed = changed
        self._groups: dict[tuple[Party, int], Any] = {}
        self._trying = threading.local()  # in a thread of an attempt, with how many changes
        self._waits: Waits | None = None
        self._store: dist.Store | None = None
        self._numbers: Counter[str] = Counter()

    def begin(self, waits: Waits, store: dist.Store) -> None:
        """A run begins, with a store that lasts for all runs."""
        self._waits, self._store = waits, store

    @property
    def groups(self) -> tuple[int, ...]:
        """Those that average, by their numbers at the start. The same on all processes."""
        return self.membership.groups(self.averaging)

    def party(self, whole: Party, changes: int) -> Party:
        """Those of a party that are left after so many changes."""
        left = set(self.membership.ranks(changes))
        return Party(whole.what, tuple(rank for rank in whole.ranks if rank in left), whole.on_host)

    def process_group(self, whole: Party, changes: int) -> Any:
        """What connects them; connected when it is first asked for, which waits."""
        if getattr(self._trying, "changes", changes) != changes:
            raise RuntimeError("this attempt was given up")
        key = whole, changes
        if key not in self._groups:
            self._groups[key] = self._network.meet(self.party(whole, changes), f"{changes}")
        return self._groups[key]

    def run(self, collective: Callable[[], object], doing: str, changes: int) -> None:
        """Try something with those that are left after so many changes.

        Raises:
            GivenUpError: there are fewer by now.
            PeerError: it broke, or takes too long.
        """
        waits, membership = self._waits, self.membership
        assert waits is not None

        def attempt() -> None:
            self._trying.changes = changes
            collective()

        with self._across():
            waits.run(attempt, doing, given_up=lambda: membership.count > changes, across=1)

    @contextlib.contextmanager
    def _across(self) -> Iterator[None]:
        """Within this context the main thread waits for other groups."""
        assert self._waits is not None
        monitor = self._waits.monitor
        monitor.across = True
        try:
            yield
        finally:
            monitor.across = False

    def enter(self, changes: int) -> None:
        """A group has come back, or this one has; from now on all do what they do together with so many changes.

        Every process that is there then calls it, where nothing that they do together is under way.
        """
        self.taken = self.averaging = changes
        self._numbers.clear()  # the same on all, and no decision is there yet
        for group in self._groups.values():
            self._network.part(group)
        self._groups.clear()
        self._changed()

    def hold(self, whole: Party, collective: Callable[[], object], doing: str) -> None:
        """Do something together with all of a party that are left, again if some leave meanwhile."""
        name = f"{whole.what}/{min(whole.ranks)}"
        self._numbers[name] += 1
        while True:
            changes = self.taken
            ranks = self.party(whole, changes).ranks
            done = self.attempt(lambda: self.run(collective, doing, changes), changes)  # noqa: B023
            if self._decide(name, done, len(ranks), doing, changes) is None:
                return
            self._take(self.membership.count)
            self._part_from(whole.what, self.taken)

    def attempt(self, function: Callable[[], object], changes: int) -> bool:
        """Try something; tells whether it ended, or a group has left, maybe since it does not answer here.

        Raises:
            PeerError: this group fails.
        """
        if self.membership.count > changes:
            return False
        try:
            function()
            return True
        except GivenUpError:
            return False
        except RuntimeError as error:
            if isinstance(error, AvgPipeError) and not isinstance(error, PeerError):
                raise
            self._look_for_the_dead(error, changes)
            return False

    def settle(self, done: bool, whole: Party) -> bool:
        """Decide whether sums over groups count; else those that have left do not average any more.

        Args:
            done: whether this process has its sums.
            whole: all processes.
        """
        changes = self.averaging
        ranks = self.party(whole, changes).ranks
        self._numbers["averaging"] += 1
        doing = "waits for the sums over groups of other processes"
        left = self._decide("averaging", done, len(ranks), doing, changes)
        if left is None:
            return True
        assert self._waits is not None
        with self._across():  # others may know more than this process does
            self._waits.until(lambda: self.membership.count >= left, "waits to learn which group has left")
        self.averaging = left
        self._take(max(self.taken, left))
        self._part_from(AVERAGING, left)
        return False

    def _take(self, changes: int) -> None:
        """From now on this process does what it does with those that are left after so many changes.

        Raises:
            PeerError: it is in one of the groups that have left.
        """
        assert self._waits is not None
        if self.membership.group not in self.membership.groups(changes):
            self._waits.monitor.look()  # which knows why, unless the store is slow
            raise PeerError(f"the other groups go on without group {self.membership.group}")
        self.taken = changes
        self._changed()

    def _decide(self, name: str, done: bool, voters: int, doing: str, changes: int) -> int | None:
        """None if something was done by all; else how many groups had left."""
        waits, store = self._waits, self._store
        assert waits is not None and store is not None
        if voters == 1:
            return None if done else self.membership.count
        number = self._numbers[name]
        token = f"meetings/{name}/{number}/{changes}"
        decision = f"{token}/decision"
        if done and store.add(token, 1) == voters:
            store.compare_set(decision, "", "done")
            for old in (token, decision):  # which all have read that have voted now
                store.delete_key(old.replace(f"/{number}/", f"/{number - 1}/"))
        begin, limit_s = time.monotonic(), waits.limit_s(across=2)
        with waits.monitor.during(doing), self._across():
            while not store.check([decision]):
                waits.monitor.check()
                if not done or self.membership.count > changes:
                    store.compare_set(decision, "", f"{self.membership.count}")
                elif time.monotonic() - begin > limit_s:
                    account = waits.monitor.account()
                    late = PeerError(f"{waits.monitor.name} {doing}, for more than {limit_s:g} s{account.text}")
                    self._look_for_the_dead(late, changes)
                else:
                    time.sleep(_POLL_S)
        found = store.get(decision).decode()
        return None if found == "done" else int(found)

    def _look_for_the_dead(self, error: BaseException, changes: int) -> None:
        """Something broke, or takes too long: give up the groups of processes that do not answer.

        Raises:
            PeerError: all answer, or one of the own group does not.
        """
        waits, membership = self._waits, self.membership
        assert waits is not None
        monitor = waits.monitor
        monitor.look()
        if not isinstance(error, PeerError):
            monitor.account()
        if membership.count > changes and not waits.broken:
            return
        silent = [rank for rank in monitor.asked.silent if rank in membership.ranks()]
        if waits.broken or not silent or membership.group in map(membership.group_of, silent):
            raise error
        monitor.give_up(silent, str(error))

    def _part_from(self, what: str, changes: int) -> None:
        """Close what connected parties of which some have left. That they do is decided, so nobody needs it."""
        for key in [key for key in self._groups if key[0].what == what and key[1] < changes]:
            self._network.part(self._groups.pop(key))


class LivingCollectives(Collectives):
    """Those of a set of processes whose groups have not left.

    Args:
        whole: the set at the start.
        rank: of this process among all.
        meetings: of this process.
        network: connects the members.
        moved: called when bytes went over a connection.
    """

    def __init__(
        self, whole: Party, rank: int, meetings: Meetings, network: Network, moved: Callable[[], None]
    ) -> None:
        super().__init__(whole, rank, network, lambda collective, doing: None, moved)
        self._meetings = meetings

    @property
    def _changes(self) -> int:
        return self._meetings.taken

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of those that are left."""
        return self._meetings.party(self._party, self._changes).ranks

    @property
    def process_group(self) -> Any:
        """What connects them."""
        return self._meetings.process_group(self._party, self._changes)

    def together(self, what: str, collective: Callable[[], object]) -> None:
        """Run a collective, again if a group leaves meanwhile, unless there is one process."""
        if self.world_size > 1:
            self._meetings.hold(self._party, collective, f"waits for the other processes in {what}")

    def begin_exchange(self, item: T) -> Callable[[], list[T]]:
        """It begins with its end, when it may be repeated."""
        return partial(self.exchange_objects, item)


class _Averaging(LivingCollectives):
    """Those that average; what breaks is not repeated here."""

    @property
    def _changes(self) -> int:
        return self._meetings.averaging

    def together(self, what: str, collective: Callable[[], object]) -> None:
        if self.world_size > 1:
            doing = f"waits for the other processes in {what}"
            self._meetings.run(collective, doing, self._changes)


class LivingReplicaGroup(ReplicaGroup):
    """The processes that host the same stages, of groups that have not left. They meet on the host.

    Args:
        whole: those at the start.
        world: all processes at the start.
        rank: of this process among all.
        meetings: of this process.
        network: connects them.
        moved: called when bytes went over a connection.
    """

    def __init__(
        self, whole: Party, world: Party, rank: int, meetings: Meetings, network: Network, moved: Callable[[], None]
    ) -> None:
        super().__init__(_Averaging(whole, rank, meetings, network, moved), 0, on_host=True)
        self._world = world
        self._meetings = meetings
        self._under_way: list[Callable[[], None]] = []
        self._done = True

    @property
    def number(self) -> int:
        """Of this process's group among those that are left."""
        return self.members.rank

    def settle(self) -> bool:
        """Wait for all sums that have begun; tells whether they count, on all processes of all groups."""
        for end in self._under_way:
            self._done = self._done and self._meetings.attempt(end, self._meetings.averaging)
        done, self._done, self._under_way = self._done, True, []
        return self.count == 1 or self._meetings.settle(done, self._world)

    def copy(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """As of :meth:`ReplicaGroup.copy`; if a group leaves meanwhile, an error."""
        if self.count > 1:
            self._connect("a copy of parameters")
            super()._begin(tensors, "a copy of parameters", partial(self._broadcast, source))()

    def _connect(self, what: str) -> None:
        self.members.together(what, lambda: self.members.process_group)

    def _begin(self, tensors: Sequence[Tensor], what: str, collective: Any) -> Callable[[], None]:
        if self.count == 1:
            return nothing
        ends: list[Callable[[], None]] = []

        def begin() -> None:
            self._connect(what)
            ends.append(super(LivingReplicaGroup, self)._begin(tensors, what, collective))

        def end() -> None:  # once
            if ends:
                ends.pop()()

        if not self._meetings.attempt(begin, self._meetings.averaging):
            self._done = False
        self._under_way.append(end)
        return end

    def _all_reduce(self, flat: Any) -> Any:
        return self.members.process_group.allreduce([flat])

    def _broadcast(self, source: int, flat: Any) -> Any:
        return self.members.process_group.broadcast(as_bytes(flat), source)
