"""A tensor is known by the object, not by its number or memory."""

from __future__ import annotations

import torch

from lightning_avgpipe.utils.tensors import KnownTensors


def test_a_view_has_the_value_of_its_base_but_none_of_its_own() -> None:
    known, base = KnownTensors[int](), torch.zeros(2, 2)
    known.learn(base, 7)
    view = base[0]
    assert base in known and view not in known
    assert (known.value_of(view), known.own_value_of(view)) == (7, None)
    known.learn(view, 8)
    assert (known.value_of(view), known.value_of(base)) == (8, 7)


def test_nothing_is_kept_alive() -> None:
    known, kept = KnownTensors[int](), torch.zeros(1)
    known.learn(kept, 0)
    known.learn(torch.zeros(1), 1)
    assert list(known.alive()) == [0]
    assert torch.zeros(1) not in known
