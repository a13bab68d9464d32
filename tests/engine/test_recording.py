"""What observers and profilers see of several stages of one process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.recording import KernelTrace
from lightning_avgpipe.schedule import build
from tests.driver import Engine
from tests.models import MLP, loader
from tests.trainers import pipeline

NUM_STAGES, NUM_MICROBATCHES = 4, 6


class Sequence(Observer):
    """Notes what a process does."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self.found.append((work.stage, str(work.action)))
        return do()


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zbv", "dualpipev"])
def test_stages_act_in_the_order_of_the_schedule(name: str) -> None:
    module, batch, sequence = MLP(), MLP.example(NUM_MICROBATCHES), Sequence()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # no trainer here
    Engine(module, NUM_STAGES, batch, NUM_MICROBATCHES).train(batch, name, observers=[sequence])
    schedule = build(name, NUM_STAGES, NUM_MICROBATCHES)
    assert schedule.turns
    for turns in schedule.turns:
        rows = {stage: iter(schedule[stage]) for stage in set(turns)}
        expected = [(stage, str(next(rows[stage]))) for stage in turns]
        assert [place for place in sequence.found if place[0] in turns] == expected


def test_a_trace_of_torchs_profiler_tells_their_forwards_apart(tmp_path: Path) -> None:
    runner = pipeline(num_stages=3, strategy={"num_microbatches": 2}, max_epochs=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        runner.fit(MLP(), loader(MLP, 8, 8))
    names = Counter(event.name for event in profiler.events() if event.name.startswith("avgpipe::"))
    assert set(names.values()) == {1}
    # on a CUDA device each name is also written beside the kernels that were launched within it
    events = [{"cat": "gpu_user_annotation", "name": name, "ts": 1e6 * at, "dur": 1.0} for at, name in enumerate(names)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = KernelTrace()
    trace.read(path)
    assert trace.forwards_s.keys() == {(stage, i) for stage in range(3) for i in range(2)}
    assert len(set(trace.forwards_s.values())) == 6
