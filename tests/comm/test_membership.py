"""The list of groups that have left and come back says to all who takes part."""

from __future__ import annotations

import torch.distributed as dist

from lightning_avgpipe.comm.membership import Membership

LAYOUT = ((0, 1), (2, 3), (4, 5))


def member(store: dist.Store, rank: int) -> Membership:
    """One of the processes, in training."""
    found = Membership(LAYOUT, rank, min_groups=1)
    found.begin(store, outlives=True)
    found.begun = True
    return found


def test_a_group_that_has_come_back_takes_part_and_may_leave_again() -> None:
    store = dist.HashStore()
    one, other = member(store, 0), member(store, 4)
    assert one.leave(1, "it died") == ""
    assert one.enter(1, 1) and other.enter(1, 1)
    assert [one.groups(count) for count in range(3)] == [(0, 1, 2), (0, 2), (0, 1, 2)]
    assert other.leave(1, "it died once more") == ""
    one.read()
    assert one.changes == other.changes
    assert one.groups() == (0, 2) and one.ranks() == (0, 1, 4, 5)


def test_new_processes_are_among_all_when_the_list_says_so_and_those_before_them_are_not() -> None:
    store, alone = dist.HashStore(), dist.HashStore()
    one, before, new = member(store, 0), member(store, 2), member(alone, 2)
    new.stand_apart()
    assert new.groups() == (1,) and "has not come back" in new.ends_all(1)
    one.leave(1, "it died")
    assert new.join(store, 1) is None
    assert one.enter(1, 1)
    assert new.join(store, 1)
    assert before.read() == "it died" and new.read() is None
    assert new.groups() == before.groups() == (0, 1, 2)
    assert not one.is_first(2) and one.is_first(4)
    one.leave(1, "it died once more")
    assert new.read() == "it died once more"


def test_a_group_does_not_come_back_if_another_one_leaves_before() -> None:
    store = dist.HashStore()
    one, other, new = member(store, 0), member(store, 4), member(dist.HashStore(), 3)
    new.stand_apart()
    one.leave(1, "it died")
    other.leave(2, "it died too")
    assert not one.enter(1, 1) and not other.enter(1, 1)
    assert new.join(store, 1) is False
    assert new.groups() == (1,) and one.groups() == (0,)
