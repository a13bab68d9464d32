"""A relocation brings every name to its new owners, in few messages, and says beforehand what it will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.comm.collectives import Collectives, Peer
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap
from lightning_avgpipe.weights.relocation import Relocation
from tests import threads

OLD = {"a": (0,), "b": (0,), "c": (1,), "d": (0, 1, 2), "e": ()}
NEW = {"a": (1,), "b": (0,), "c": (2, 0), "d": (1,), "e": (2,)}


def in_threads(size: int, function: Callable[[Collectives], Any]) -> list[Any]:
    """What the function returns in each of some processes, which are threads."""
    stages = StageMap.on(DeviceLayout(size), size)
    return threads.results(threads.run(stages, lambda cluster: function(cluster.group)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_in_each_round_every_process_meets_one_other(size: int) -> None:
    every = {str(rank): (rank,) for rank in range(size)}
    moves = Relocation(every, dict.fromkeys(every, tuple(range(size)))).moves
    assert set(moves) == {(a, b) for a in range(size) for b in range(size) if a != b}
    rounds: list[set[frozenset[int]]] = [set()]
    for pair in moves:
        meeting = frozenset(pair)
        if meeting not in rounds[-1] and any(meeting & other for other in rounds[-1]):
            rounds.append(set())
        rounds[-1].add(meeting)
    assert len(rounds) <= size


def items(rank: int) -> dict[str, Any]:
    everything: dict[str, dict[str, Any]] = {
        name: {"weight": torch.arange(15.0).view(3, 5).T * ord(name), "steps": 4, "none": None} for name in OLD
    }
    everything["c"]["weight"] = torch.arange(6, dtype=torch.bfloat16)
    everything["a"]["inner"] = [torch.tensor(2.5, dtype=torch.float64), torch.empty(0, 3), torch.tensor([True])]
    return {name: everything[name] for name, ranks in OLD.items() if rank in ranks}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_trees_arrive_as_they_were(bucket_bytes: int) -> None:
    def move(processes: Collectives) -> Any:
        held = items(processes.rank)
        return Relocation(OLD, NEW).carry_out(processes, held.__getitem__, bucket_bytes)

    everything = items(0) | items(1)
    for rank, arrived in enumerate(in_threads(3, move)):
        assert set(arrived) == {0: {"c"}, 1: {"a"}, 2: {"c"}}[rank]
        for name, arrival in arrived.items():
            there, here = everything[name], arrival.on(torch.device("cpu"))
            assert here.keys() == there.keys() and here["steps"] == 4 and here["none"] is None
            assert torch.equal(here["weight"], there["weight"])
            assert here["weight"].stride() == there["weight"].stride()
            assert here["weight"].dtype == there["weight"].dtype
            assert here["weight"].untyped_storage().nbytes() == there["weight"].nbytes, "nothing else is kept with it"
            for one, other in zip(here.get("inner", ()), there.get("inner", ()), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


def test_small_tensors_travel_together_and_no_message_exceeds_the_bucket() -> None:
    old = {str(i): (0,) for i in range(64)}
    new = {str(i): (1,) for i in range(64)}

    sent: list[int] = []
    send = Peer.send

    def noted(peer: Peer, tensor: Tensor) -> None:
        sent.append(tensor.numel())
        send(peer, tensor)

    def move(processes: Collectives) -> Any:
        arrived = Relocation(old, new).carry_out(processes, lambda name: torch.full((16,), float(name)), 1024)
        return {name: arrival.on(torch.device("cpu")) for name, arrival in arrived.items()}

    with mock.patch.object(Peer, "send", noted):
        nothing, arrived = in_threads(2, move)
    assert not nothing
    assert sent[2::3] == [1024] * 4  # contents, after lengths and description
    assert all(torch.equal(arrived[str(i)], torch.full((16,), float(i))) for i in range(64))
