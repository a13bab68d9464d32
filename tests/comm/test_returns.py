"""Who asks to come back gets an answer, and who asks in vain holds up nobody for long."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_avgpipe.comm.arrivals import Arrivals
from lightning_avgpipe.comm.board import Answer, Board
from lightning_avgpipe.comm.meetings import Meetings
from lightning_avgpipe.comm.membership import Membership
from lightning_avgpipe.comm.monitor import Monitor
from lightning_avgpipe.comm.requests import STOP
from lightning_avgpipe.comm.returns import Returns
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.utils.patching import nothing
from tests import threads

MAP = StageMap(1, ((0,), (1,), (2,)))
TIMEOUT_S = 4.0  # half of which processes that ask have to answer


def answer(hub: threads.Hub, rank: int, question: int) -> None:
    """A process of the others says that it is there."""
    network = threads.MemoryNetwork(hub, rank)
    Board(network.stores.next_run(hub.store), rank, lambda: [rank]).answer(question, Answer("does something", 0.0))


def returns_of(hub: threads.Hub, rank: int, anew: bool = False, stopped: bool = False) -> Returns:
    """Of a process; group 1 has left."""
    network, arrivals = threads.MemoryNetwork(hub, rank), Arrivals()
    membership = Membership(MAP, rank, min_groups=1)
    membership.begin(network.stores.lasting(network.stores.next_run(hub.store)), outlives=True)
    membership.begun = True
    if anew:
        membership.stand_apart()
    else:
        membership.leave(1, "it died")
    monitor = Monitor(rank, [MAP.name(other) for other in range(3)], None, TIMEOUT_S, arrivals.notify)
    if stopped:
        monitor.requests.note(STOP)
    meetings = Meetings(rank, membership, network, nothing)
    meetings.enter(membership.count)
    waits = Waits(arrivals, monitor, TIMEOUT_S)
    return Returns(rank, MAP.layout, membership, meetings, network, waits, hub.store, nothing)


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
