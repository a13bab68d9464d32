"""What a step prints, warns and logs is heard once, as in one process; and what others see of stages."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.recording import KernelTrace
from lightning_avgpipe.schedule import build
from lightning_avgpipe.utils.source import traceback_of_user_code
from tests import processes
from tests.driver import Engine
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline


def by_print(text: str) -> None:
    print(text)


def by_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def by_warning(text: str) -> None:
    warnings.warn(text, stacklevel=1)


def by_logger(text: str) -> None:
    logging.getLogger("tests.speaking").warning(text)


WAYS, TEXTS = (by_print, by_stderr, by_warning, by_logger), ("first", "layer", "last")


class Speaking(nn.Linear):
    """A layer that says its name."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(8, 8)
        self.say = say

    def forward(self, x: Tensor) -> Tensor:
        self.say("layer")
        return super().forward(x)


class Speaks(Regression):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__("sgd")
        self.layers = nn.Sequential(nn.Linear(8, 8), Speaking(say), nn.Linear(8, 8), nn.Linear(8, 8))
        self.say = say

    def forward(self, x: Tensor) -> Tensor:
        self.say("first")
        for layer in self.layers:
            x = layer(x)
        self.say("last")
        return x


def heard(module: Regression, num_stages: int = 3, devices: int = 1, **options: Any) -> Counter[str]:
    """What is said in two batches of four micro-batches."""
    out, handler = io.StringIO(), logging.StreamHandler()
    handler.setStream(out)
    logger = logging.getLogger("tests.speaking")
    logger.addHandler(handler)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(message)
        warnings.simplefilter("always")
        options = {"num_microbatches": 4, **options}
        pipeline(num_stages, devices, options, max_epochs=1).fit(module, loader(type(module), 16, 8))
    logger.removeHandler(handler)
    return Counter(out.getvalue().splitlines())


@pytest.mark.parametrize(
    ("say", "options"),
    [
        (by_print, {"costs": "measured"}),
        (by_stderr, {"verify": 1}),
        (by_warning, {"recompute": True}),
        (by_logger, {"verify": 1}),
    ],
)
def test_each_micro_batch_is_heard_once(say: Callable[[str], None], options: dict[str, Any]) -> None:
    lines = heard(Speaks(say), **options)
    assert [lines[text] for text in TEXTS] == [8, 8, 8]


def in_every_way(text: str) -> None:
    for way in WAYS:
        way(f"{way.__name__} {text}")


def test_two_processes_say_together_what_one_would(tmp_path: Path) -> None:
    measured = {"costs": "measured", "costs_cache": None}
    said = processes.everywhere(2, lambda: heard(Speaks(in_every_way), 2, 2, **measured), folder=tmp_path)
    lines = sum(said, Counter())
    assert {line: count for line, count in lines.items() if line.startswith("by_")} == {
        f"{way.__name__} {text}": 8 for way in WAYS for text in TEXTS
    }


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Bar(tqdm):  # type: ignore[type-arg]
    """Notes in a file whether it appears: costs are measured in another process."""

    notes: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with self.notes.open("a") as file:
            print("hidden" if self.disable else "shown", file=file)


@pytest.mark.parametrize(
    ("shows", "stream", "expected"),
    [(True, Terminal, "shown"), (True, io.StringIO, "hidden"), (False, Terminal, "hidden")],
)
def test_measuring_has_a_progress_bar_where_the_trainer_has_one_and_the_output_is_a_terminal(
    shows: bool, stream: type[io.StringIO], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lightning_avgpipe.capture.measure.tqdm", Bar)
    monkeypatch.setattr(Bar, "notes", tmp_path / "bars", raising=False)
    monkeypatch.setattr(sys, "stderr", stream())
    measured = {"costs": "measured", "costs_cache": None}
    pipeline(2, 1, measured, max_epochs=1, enable_progress_bar=shows).fit(MLP(), loader(MLP, 8, 8))
    assert {*Bar.notes.read_text().splitlines()} == {expected}


# -- what observers and profilers see of several stages of one process -----------------------------------------------


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


# -- lines of user code that messages show ---------------------------------------------------------------------------


def step() -> None:
    torch.nn.Linear(2, 2)(torch.ones(3))


def test_a_traceback_has_the_frames_of_user_code_and_what_was_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        step()
    shown = traceback_of_user_code(caught.value)
    assert "in step" in shown and "test_output.py" in shown and "RuntimeError: " in shown
    assert "in _call_impl" not in shown
