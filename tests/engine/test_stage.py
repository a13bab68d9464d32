"""Stages run what they have a handler for, and say at once what they have none for."""

from __future__ import annotations

import pytest
import torch

from lightning_avgpipe.errors import ScheduleError
from tests.driver import Engine
from tests.models import TinyTransformer


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_a_schedule_with_halves_of_backwards_is_refused_before_anything_runs(name: str) -> None:
    torch.manual_seed(0)
    module = TinyTransformer()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    batch = TinyTransformer.example(8)
    engine = Engine(module, 2, batch, 4)
    calls: list[object] = []
    hook = module.register_forward_hook(lambda *args: calls.append(args))
    can = r"input gradient \(I\), weight gradient \(W\); they can run forward \(F\), backward \(B\)"
    with pytest.raises(ScheduleError, match=rf"'{name}' has actions that stages cannot run: {can}"):
        engine.train(batch, name)
    assert not calls and all(parameter.grad is None for parameter in module.parameters())
    hook.remove()
    engine.train(batch)  # nothing is left behind that would be in the way
    assert all(parameter.grad is not None for parameter in module.parameters())
