"""What a group that has left had not trained on is dealt to the others."""

from __future__ import annotations

from lightning_avgpipe.strategy.dealing import deal


def dealt(shares: list[list[int]], begins: list[int], groups: int) -> list[list[int]]:
    return [deal(shares, begins, number, groups) for number in range(groups)]


def test_what_is_left_keeps_its_order_and_comes_once() -> None:
    shares = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    # two are done, of the group that has left one
    assert dealt(shares, [2, 1, 2], 2) == [[4, 7, 9, 11], [6, 8, 10, 4]]
    assert dealt(shares, [2, 2, 2], 2) == [[6, 8, 10], [7, 9, 11]]


def test_one_group_gets_all() -> None:
    assert dealt([[0, 2, 4], [1, 3, 5]], [3, 1], 1) == [[3, 5]]


def test_groups_get_as_many_though_little_is_left() -> None:
    assert dealt([[0], [1], [2], [3]], [1, 1, 0, 1], 3) == [[2], [2], [2]]
    assert dealt([[0], [1]], [1, 1], 1) == [[]]
