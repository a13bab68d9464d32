"""What a step prints, warns and logs is heard once, as in one process that accumulates the micro-batches."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from tqdm.auto import tqdm

from tests import processes
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
