"""The gallery is what the code makes, and its formulas are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.gallery import KNOWN, written
from lightning_avgpipe.schedule import StageCosts, build, simulate
from lightning_avgpipe.schedule.__main__ import main
from lightning_avgpipe.schedule.recipes import RECIPES
from tests.schedule.test_several_stages import stashed

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def value(formula: str, **names: int) -> float:
    """Of a formula in which factors are beside each other."""
    return float(eval(re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula), {}, names))


def test_the_page_has_the_gallery_as_it_is() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "run python docs/gallery.py docs/schedules.md"


@pytest.mark.parametrize("name", RECIPES)
def test_formulas_of_idleness_and_memory_are_true(name: str) -> None:
    known = KNOWN[name]
    for devices in (4, 6) if name == "broadcast" else (2, 4):  # two stages have nobody in the middle
        v, m, h = 1 if RECIPES[name].needs == "any" else 2, 4 * devices, 1 if name == "advance_forward" else 0
        schedule = build(name, v * devices, m, h, devices)
        costs = StageCosts.uniform(v * devices, 1, 2)
        timeline = simulate(schedule, costs)
        names = {"K": v * devices, "D": devices, "M": m, "v": v, "h": h, "f": v, "i": v, "w": v, "b": 2 * v}
        idle = timeline.iteration_s - 3 * v * m
        assert idle == pytest.approx(value(known.idle, **names), abs=1 if name == "dualpipev" else 1e-9)
        found = stashed(schedule) if schedule.turns else timeline.peak_stash
        expected = [value(known.stash, k=d, d=d, **names) for d in range(devices)]
        assert list(found) == [1 if d in schedule.relays else stash for d, stash in enumerate(expected)]


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_draws_every_schedule(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.svg"
    assert main([name, "--stages", "4", "--microbatches", "4", "--text", "--output", str(picture)]) == 0
    assert picture.stat().st_size > 0
    out = capsys.readouterr().out
    assert "stage 0 | F0" in out and " | F" in out and "iteration " in out
