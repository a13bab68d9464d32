"""Several stages of one process act in the order of their schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.schedule import build
from tests.driver import Engine
from tests.models import MLP

NUM_STAGES, NUM_MICROBATCHES = 4, 6


class Sequence(Observer):
    """Notes what a process does."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self.found.append((work.stage, str(work.action)))
        return do()


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zbv", "dualpipev"])
def test_stages_of_a_process_act_in_the_order_of_the_schedule(name: str) -> None:
    module, batch, sequence = MLP(), MLP.example(NUM_MICROBATCHES), Sequence()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    Engine(module, NUM_STAGES, batch, NUM_MICROBATCHES).train(batch, name, observers=[sequence])
    schedule = build(name, NUM_STAGES, NUM_MICROBATCHES)
    assert schedule.turns
    for turns in schedule.turns:
        rows = {stage: iter(schedule[stage]) for stage in set(turns)}
        expected = [(stage, str(next(rows[stage]))) for stage in turns]
        assert [place for place in sequence.found if place[0] in turns] == expected
