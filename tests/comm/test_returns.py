"""Who asks to come back gets an answer, and who asks in vain holds up nobody for long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.board import Answer, Board
from lightning_avgpipe.comm.meetings import Meetings
from lightning_avgpipe.comm.membership import Membership
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.process import Process
from lightning_avgpipe.comm.requests import STOP
from lightning_avgpipe.comm.returns import Invitation, Returns
from lightning_avgpipe.comm.stage_map import StageMap, names
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.utils.patching import nothing
from tests import threads

MAP = StageMap(1, ((0,), (1,), (2,)))
INVITATION = Invitation(1, (1,), leader=0, changes=1, ticket="ticket")
TIMEOUT_S = 4.0  # half of which processes that ask have to answer


def answer(hub: threads.Hub, rank: int, question: int) -> None:
    """A process of the others says that it is there."""
    network = threads.MemoryNetwork(hub, rank)
    Board(network.stores.next_run(hub.store), rank, lambda: [rank]).answer(question, Answer("does something", 0.0))


@dataclass(frozen=True)
class Member:
    """A process."""

    membership: Membership
    monitor: Monitor
    returns: Returns


def member(
    hub: threads.Hub, rank: int, anew: bool = False, stopped: bool = False, runs: int = 1, watched: bool = False
) -> Member:
    """A process; group 1 has left."""
    network, arrivals = threads.MemoryNetwork(hub, rank), Arrivals()
    for _ in range(runs):
        store = network.stores.next_run(hub.store)
    membership = Membership(MAP.layout, rank, min_groups=1)
    membership.begin(network.stores.lasting(store if anew else hub.store), outlives=True)  # its group has its own
    membership.begun = True
    if anew:
        membership.stand_apart()
    else:
        membership.leave(1, "it died")
    monitor = Monitor(rank, names(MAP), store if watched else None, TIMEOUT_S, arrivals.notify)
    if stopped:
        monitor.requests.note(STOP)
    meetings = Meetings(membership, network, nothing)
    meetings.enter(membership.count)
    process = Process(rank, torch.device("cpu"), TIMEOUT_S, network)
    return Member(membership, monitor, Returns(process, meetings, Waits(arrivals, monitor, TIMEOUT_S), hub.store))


def returns_of(hub: threads.Hub, rank: int, anew: bool = False, stopped: bool = False) -> Returns:
    return member(hub, rank, anew, stopped).returns


def test_who_asks_is_invited_by_the_first_process() -> None:
    hub = threads.Hub(threads.Injector())
    answer(hub, 0, 1)
    leader = returns_of(hub, 0)
    assert leader.missing == (1,)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(returns_of(hub, 1, anew=True).ask, "ticket")
        invitation = None
        while invitation is None and not asked.done():
            invitation, told = leader.look(lambda group: "")
            assert not told
        assert asked.result() == invitation
    assert invitation is not None and invitation.ranks == (1,) and invitation.changes == 1


def test_who_cannot_come_back_is_told_why_and_so_are_the_others() -> None:
    hub = threads.Hub(threads.Injector())
    answer(hub, 0, 1)
    leader, told = returns_of(hub, 0), list[str]()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(returns_of(hub, 1, anew=True).ask, "ticket")
        while not told and not asked.done():
            invitation, told = leader.look(lambda group: f"a reason of group {group}")
            assert invitation is None
        with pytest.raises(ConfigurationError, match=r"group 1 .* cannot come back: a reason of group 1\."):
            asked.result()
    assert told == ["group 1 does not come back: a reason of group 1"]


def test_who_asks_and_dies_is_waited_for_once_and_not_for_long() -> None:
    hub = threads.Hub(threads.Injector())
    with pytest.raises(PeerError, match="was asked to stop before the other groups had counted it in"):
        returns_of(hub, 1, anew=True, stopped=True).ask("ticket")
    leader = returns_of(hub, 0)
    reason = "its new processes have asked, but do not answer within 2 s"
    assert leader.look(lambda group: "") == (None, [f"group 1 does not come back: {reason}"])
    assert leader.look(lambda group: "") == (None, [])


def test_who_asks_when_training_is_over_is_told_so() -> None:
    hub = threads.Hub(threads.Injector())
    answer(hub, 0, 1)
    leader = returns_of(hub, 0)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(returns_of(hub, 1, anew=True).ask, "ticket")
        while not asked.done():
            leader.end()
        with pytest.raises(ConfigurationError, match="cannot come back: training has ended"):
            asked.result()


def test_who_asks_where_nobody_is_there_any_more_gives_up() -> None:
    hub = threads.Hub(threads.Injector())
    with pytest.raises(PeerError, match="none of the other groups answers within 2 s"):
        returns_of(hub, 1, anew=True).ask("ticket")


def test_who_asks_where_nobody_goes_on_gives_up() -> None:
    hub = threads.Hub(threads.Injector())
    for question in range(1, 9):
        answer(hub, 0, question)
    with pytest.raises(PeerError, match="they have done no iteration without group 1 for 4 s"):
        returns_of(hub, 1, anew=True).ask("ticket")


def test_who_asks_in_a_later_run_of_the_others_is_told_so() -> None:
    hub = threads.Hub(threads.Injector())
    leader = member(hub, 0, runs=2).returns
    with pytest.raises(PeerError, match="was asked to stop"):
        returns_of(hub, 1, anew=True, stopped=True).ask("ticket")
    assert leader.look(lambda group: "") == (
        None, ["group 1 does not come back: the others are not in their first run"]
    )  # fmt: skip


def test_who_is_ready_gets_what_it_needs() -> None:
    hub = threads.Hub(threads.Injector())
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(returns_of(hub, 0).send, INVITATION, {"step": 3})
        told, ready = returns_of(hub, 1, anew=True).receive(INVITATION)
        ready()
        assert (told, sent.result()) == ({"step": 3}, "")


def test_what_cannot_be_sent_is_said_to_both() -> None:
    hub, why = threads.Hub(threads.Injector()), "what it needs cannot be sent"
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(returns_of(hub, 0).send, INVITATION, lambda: None)
        with pytest.raises(ConfigurationError, match=f"group 1 was started anew, but cannot come back: {why}"):
            returns_of(hub, 1, anew=True).receive(INVITATION)
        assert sent.result().startswith(why)


def test_who_is_not_ready_in_time_or_fails_meanwhile_is_not_waited_for() -> None:
    hub = threads.Hub(threads.Injector())
    assert returns_of(hub, 0).send(INVITATION, "all") == "it was not ready within 2 s"
    hub.leave(1)
    assert returns_of(hub, 0).send(INVITATION, "all") == "it has failed meanwhile"


def test_who_is_ready_when_another_group_has_left_is_not_counted_in() -> None:
    hub, why = threads.Hub(threads.Injector()), "another group has left meanwhile"
    leader = member(hub, 0)
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(leader.returns.send, INVITATION, "all")
        new = member(hub, 1, anew=True, watched=True)
        _, ready = new.returns.receive(INVITATION)
        leader.membership.leave(2, "it died too")
        ready()
        assert sent.result() == why
    with closing(new.monitor), pytest.raises(ConfigurationError, match=f"cannot come back: {why}"):
        new.returns.join(INVITATION)
    assert new.membership.apart and new.membership.groups() == (1,)


def test_who_is_ready_and_hears_nothing_gives_up() -> None:
    new = member(threads.Hub(threads.Injector()), 1, anew=True, watched=True)
    gives_up = r"rank 1 \(stage 0 of group 1\) waits until the other groups count this one in, for more than 4 s"
    with (
        closing(new.monitor),
        pytest.raises(PeerError, match=gives_up),
    ):
        new.returns.join(INVITATION)


def test_who_is_given_up_while_it_receives_is_told_why() -> None:
    hub = threads.Hub(threads.Injector())
    returns_of(hub, 0).refuse(INVITATION, "a reason of the others")
    hub.leave(0)
    with pytest.raises(ConfigurationError, match="cannot come back: a reason of the others"):
        returns_of(hub, 1, anew=True).receive(INVITATION)
