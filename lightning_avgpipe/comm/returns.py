"""Returns: how the new processes of a group that has left find the others, through the store, and are among them again.

::

    new processes                       store                          the others, when an epoch begins
    ask: ask/<group> = ticket           answer/<ticket>  =             the first process reads it, and invites, or
    here/<ticket>/<rank>                leader and changes, or why not     says why not; waits until all are here
    visit: all of them meet the first process, which sends what they need; they say when they are ready
    join, when they read it             the list of changes            admit: all write that the group has come back

Until the list has the entry the others go on without the group whatever happens to it, and from there on it is one of
them. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_avgpipe.comm.board import Board
from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.meetings import Meetings
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.requests import STOP
from lightning_avgpipe.comm.routes import Party
from lightning_avgpipe.comm.waits import GivenUpError, Waits
from lightning_avgpipe.errors import ConfigurationError, PeerError, described

T = TypeVar("T")

_HERE_S = 10.0  # how long processes that ask may take to say that they are still there
_REASON_S = 5.0  # and the first process, to say why it does not wait any more
_POLL_S = 0.1
_BEATS = "beats"


@dataclass(frozen=True)
class Invitation:
    """The others let a group come back, if it is ready in time.

    Attributes:
        group: its number at the start.
        ranks: its processes among all.
        leader: the rank of the process that tells it where the others are.
        changes: of the list of groups before.
        ticket: the name of what was asked.
    """

    group: int
    ranks: tuple[int, ...]
    leader: int
    changes: int
    ticket: str


class Visit(Collectives):
    """The new processes of a group with the first process of the others, before they are among these.

    Args:
        invitation: to it.
        process: this one.
        waits: of this process.
        limit_s: longest time for all of it.
    """

    def __init__(self, invitation: Invitation, process: Process, waits: Waits, limit_s: float) -> None:
        party = Party("visit", (invitation.leader, *invitation.ranks))
        deadline = time.monotonic() + limit_s
        given_up = lambda: time.monotonic() > deadline  # noqa: E731
        run = partial(waits.run, given_up=given_up)
        super().__init__(party, process.rank, process.network, run, waits.arrivals.moved)
        self._ticket = invitation.ticket
        self._made: Any = None

    @property
    def process_group(self) -> Any:
        """What connects them; connected when it is first asked for, which waits."""
        if self._made is None:
            self._made = self._network.meet(self._party, self._ticket)
        return self._made

    def end(self) -> None:
        """Close the connections."""
        if self._made is not None:
            self._network.part(self._made)


class Returns:
    """This process's part, on either side.

    Args:
        process: this one.
        meetings: of the groups.
        waits: of this process.
        store: that all processes share.
    """

    def __init__(self, process: Process, meetings: Meetings, waits: Waits, store: dist.Store) -> None:
        self._process = process
        self._rank, self._network = process.rank, process.network
        self._meetings = meetings
        self._membership = meetings.membership
        self._waits = waits
        self._shared = store
        self._store = process.network.stores.visiting(store)  # for the main thread
        self._known: set[str] = set()  # tickets that are answered, or were asked for a group that is there
        self._last: Visit | None = None

    # -- the others --------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """The groups that are not there, by their numbers at the start. The same on all processes."""
        return tuple(group for group in range(len(self._membership.layout)) if group not in self._meetings.groups)

    def beat(self) -> None:
        """The others go on: whoever asks has reason to wait. The first process calls it."""
        self._store.add(_BEATS, 1)

    def look(self, why_not: Callable[[int], str]) -> tuple[Invitation | None, list[str]]:
        """Answer those that ask; on the first process.

        Args:
            why_not: says why a group cannot come back, or nothing.
        Returns:
            For one that can and is still there; and what there is to tell.
        """
        told: list[str] = []
        if self._membership.count != self._meetings.averaging:  # a group is about to leave
            return None, told
        for group in self.missing:
            ticket = self._read(f"ask/{group}")
            if not ticket or ticket in self._known:
                continue
            self._known.add(ticket)
            invitation = Invitation(group, self._membership.layout[group], self._rank, self._membership.count, ticket)
            later = "" if self._network.stores.is_first else "the others are not in their first run"
            if reason := why_not(group) or later:
                self.refuse(invitation, reason)
            else:
                answer = {"leader": self._rank, "changes": invitation.changes}
                self._store.set(f"answer/{ticket}", json.dumps(answer))
                if self._all_here(invitation):
                    return invitation, told
                reason = f"its new processes have asked, but do not answer within {self._here_s:g} s"
            told.append(f"group {group} does not come back: {reason}")
        return None, told

    def refuse(self, invitation: Invitation, why: str) -> None:
        """Tell a group that it does not come back."""
        self._store.set(f"refusal/{invitation.ticket}", why)

    def send(self, invitation: Invitation, item: Any) -> str:
        """Send the new processes what they need, and wait until they are ready; returns why they are not, or nothing.

        Raises:
            PeerError: this process's group, or all, have failed.
        """
        visit, data, unsendable = self._visit(invitation), b"", ""
        try:
            data = pickle.dumps(item)
        except Exception as error:  # of the user's objects, which are in checkpoints
            unsendable = f"what it needs cannot be sent ({described(error)})"
        try:
            visit.broadcast((data, unsendable))
            visit.barrier("what its new processes need")
        except GivenUpError:
            return f"it was not ready within {self._limit_s:g} s"
        except PeerError:
            self._waits.monitor.check()
            if self._waits.broken:
                raise
            return "it has failed meanwhile"
        there = self._membership.count == invitation.changes
        return unsendable or ("" if there else "another group has left meanwhile")

    def prepare(self) -> None:
        """A group may come back: from now on all meet where it can. Every process of the others calls it."""
        self._network.stores.meet_in(self._network.stores.visiting(self._shared))

    def admit(self, invitation: Invitation) -> bool:
        """Let a group come back that is ready; tells whether it has. Every process of the others calls it."""
        membership = self._membership
        entered = self._waits.monitor.talk(lambda: membership.enter(invitation.group, invitation.changes))
        if entered:
            self._meetings.enter(invitation.changes + 1)
        return entered

    def end(self) -> None:
        """Training is over. The first process calls it."""
        for group in self.missing:
            if (ticket := self._read(f"ask/{group}")) and ticket not in self._known:
                self._store.set(f"refusal/{ticket}", "training has ended")

    def _all_here(self, invitation: Invitation) -> bool:
        keys = [f"here/{invitation.ticket}/{rank}" for rank in invitation.ranks]
        deadline = time.monotonic() + self._here_s
        while not self._store.check(keys):
            self._waits.monitor.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    @property
    def _limit_s(self) -> float:
        """Longest time that a visit takes."""
        return self._waits.timeout_s / 2

    @property
    def _here_s(self) -> float:
        return min(_HERE_S, self._limit_s)

    # -- the new processes -------------------------------------------------------------------------------------------

    def ask(self, ticket: str) -> Invitation:
        """Ask to come back, and wait while the others go on. Every process of the group calls it.

        Args:
            ticket: a name, the same on all of them, that nothing else has.
        Raises:
            ConfigurationError: they say why not.
            PeerError: they do not go on.
        """
        group, store = self._membership.group, self._store
        store.set(f"ask/{group}", ticket)
        doing, limit_s = "waits until the other groups begin an epoch", self._waits.timeout_s
        beats, since, asked = -1, time.monotonic(), -math.inf
        with self._waits.monitor.during(doing):
            while not (answer := self._read(f"answer/{ticket}")):
                self._check(ticket)
                if time.monotonic() - asked > self._here_s:
                    self._look_for_others()
                    asked = time.monotonic()
                if (now := store.add(_BEATS, 0)) != beats:
                    beats, since = now, time.monotonic()
                if time.monotonic() - since > limit_s:
                    raise PeerError(
                        f"{self._waits.monitor.name} {doing}, and they have done no iteration without group {group} "
                        f"for {limit_s:g} s"
                    )
                time.sleep(_POLL_S)
        store.set(f"here/{ticket}/{self._rank}", "1")
        told = json.loads(answer)
        self.prepare()
        return Invitation(group, self._membership.layout[group], told["leader"], told["changes"], ticket)

    def _look_for_others(self) -> None:
        """Whether there are any: the store may be that of a run which is about to end.

        Raises:
            PeerError: nobody answers.
        """
        others = [rank for ranks in self._membership.layout if self._rank not in ranks for rank in ranks]
        board = Board(self._network.stores.run(self._shared), self._rank, lambda: others)
        question, deadline = board.ask(), time.monotonic() + self._here_s
        while not board.answers(question):
            self._waits.monitor.check()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{self._waits.monitor.name} was started anew, and none of the other groups answers within "
                    f"{self._here_s:g} s: they have ended, or are not in their first run any more. Start all processes "
                    "again"
                )
            time.sleep(_POLL_S)

    def receive(self, invitation: Invitation) -> tuple[Any, Callable[[], None]]:
        """What the first process sends; and what is called when this one is ready to go on from there."""
        visit = self._visit(invitation)

        def ready() -> None:
            with self._explained(invitation):
                visit.barrier("what its new processes need")

        with self._explained(invitation):
            data, unsendable = visit.broadcast((b"", ""))
        if unsendable:
            ready()
            raise self._refused(unsendable)
        return pickle.loads(data), ready

    def join(self, invitation: Invitation) -> None:
        """Be among the others again, as soon as these have agreed to it. Every process of the group calls it.

        Raises:
            ConfigurationError: they have not.
            PeerError: they do not say.
        """
        waits, doing = self._waits, "waits until the other groups count this one in"
        deadline = time.monotonic() + waits.timeout_s
        lasting, run = self._network.stores.lasting(self._shared), self._network.stores.run(self._shared)
        with waits.monitor.during(doing):
            while (joined := waits.monitor.talk(partial(self._enter, lasting, run, invitation))) is None:
                self._check(invitation.ticket)
                if time.monotonic() > deadline:
                    raise PeerError(f"{waits.monitor.name} {doing}, for more than {waits.timeout_s:g} s")
                time.sleep(_POLL_S)
        if not joined:
            raise self._refused("another group has left meanwhile")
        self._meetings.begin(waits, self._network.stores.lasting(run))
        self._meetings.enter(invitation.changes + 1)

    @contextlib.contextmanager
    def _explained(self, invitation: Invitation) -> Iterator[None]:
        """Within this context, if the first process gives up, it is given a moment to say why."""
        try:
            yield
        except PeerError:
            deadline = time.monotonic() + _REASON_S
            while time.monotonic() < deadline:
                self._check(invitation.ticket)
                time.sleep(_POLL_S)
            raise

    def _enter(self, lasting: dist.Store, run: dist.Store, invitation: Invitation) -> bool | None:
        """In the thread that talks to the store."""
        joined = self._membership.join(lasting, invitation.changes)
        if joined:
            self._waits.monitor.move(run)
        return joined

    def part(self) -> None:
        """Close the connections of the last visit: all have met, or will not."""
        if self._last is not None:
            self._last.end()
        self._last = None

    def _visit(self, invitation: Invitation) -> Visit:
        self._last = Visit(invitation, self._process, self._waits, self._limit_s)
        return self._last

    def _check(self, ticket: str) -> None:
        """Whether there is a reason not to wait any more."""
        self._waits.monitor.check()
        if why := self._read(f"refusal/{ticket}"):
            raise self._refused(why)
        if STOP in self._waits.monitor.requests.known:
            raise PeerError(f"{self._waits.monitor.name} was asked to stop before the other groups had counted it in")

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"group {self._membership.group} was started anew, but cannot come back: {why}. The others go on without it"
        )

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""
