"""What the command prints and draws, and what is in a picture and in a trace."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.gallery import KNOWN, written
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import StageCosts, Timeline, build, picture, simulate
from lightning_avgpipe.schedule.__main__ import main
from lightning_avgpipe.schedule.recipes import RECIPES
from tests.schedule.test_several_stages import stashed

COSTS = StageCosts.uniform(3, 1.0, 2.0, send_s=0.5, latency_s=0.1)


def simulated() -> Timeline:
    return simulate(build("advance_forward", 3, 4, 1), COSTS)


def test_the_command_prints_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advance_forward", "--stages", "3", "--microbatches", "4", "--advance", "1"]) == 0
    assert capsys.readouterr().out == (
        "stage 0 | F0 F1 F2 F3 B0 B1 B2 B3\n"
        "stage 1 | F0 F1 F2 B0 F3 B1 B2 B3\n"
        "stage 2 | F0 B0 F1 B1 F2 B2 F3 B3\n"
        "iteration 18 s, idle 33.3%, warm-up 4 2 0, peak stash 4 3 1\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b", "--stages", "0"], "num_stages=0"),
        (["1f1b", "--send", "-1"], "must be finite and not negative"),
        (["1f1b", "--output", "picture.nonsense"], "nonsense"),
        (["1f1b", "--output", "no/such/folder/picture.png"], "No such file"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def colour_at(image: Any, figure: Any, x: float, y: float) -> str:
    """The colour at a point in the axes' units, as in colours()."""
    column, row = figure.axes[0].transData.transform((x, y))
    red, green, blue = image[image.shape[0] - 1 - round(row), round(column)]
    return f"#{red:02x}{green:02x}{blue:02x}"


def test_every_cell_has_the_colour_of_what_runs_there() -> None:
    timeline = simulated()
    figure = picture.draw(timeline)
    image = picture.pixels(figure)
    near_top = 0.08  # of the row, clear of the number in its middle
    for span in timeline.spans:
        middle = (span.begin_s + span.end_s) / 2
        assert colour_at(image, figure, middle, span.stage + near_top) == picture.colours()[span.action.kind.name], span
    for transfer in timeline.transfers:
        lane = 0.72 if transfer.direction == "forward" else 0.86
        middle = (transfer.begin_s + transfer.end_s) / 2
        assert colour_at(image, figure, middle, transfer.source + lane) == picture.colours()["transfer"], transfer
    for stage in range(3):
        spans = sorted((s.begin_s, s.end_s) for s in timeline.spans if s.stage == stage)
        for (_, end), (begin, _) in itertools.pairwise([(0.0, 0.0), *spans]):
            if begin - end > 0.2:
                assert colour_at(image, figure, (end + begin) / 2, stage + near_top) == picture.colours()["idle"]


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install -e '\.\[pictures\]'"):
        picture.draw(simulated())


def test_costs_read_off_a_simulated_timeline_are_those_it_was_made_with() -> None:
    measured = StageCosts.measured(simulated())
    for name in ("forward_s", "backward_s", "send_forward_s", "send_backward_s", "latency_s"):
        assert getattr(measured, name) == pytest.approx(getattr(COSTS, name)), name


def test_the_picture_in_the_documentation_is_what_its_command_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.image import imread

    root = Path(__file__).parents[2]
    page = (root / "docs" / "schedules.md").read_text()
    found = re.search(r"python -m lightning_avgpipe schedule (.*) --output (\S+)", page)
    arguments, path = found.groups()
    assert main([*arguments.split(), "--output", str(tmp_path / "picture.png")]) == 0
    drawn, shown = imread(tmp_path / "picture.png"), imread(root / path)
    assert drawn.shape == shown.shape
    assert abs(drawn - shown).mean() < 0.01  # fonts differ from one machine to another
    assert (root / path).stat().st_size < 60_000
    assert main(arguments.replace("--advance 1", "").split()) == 0
    fast, slow = re.findall(r"iteration (\S+) s", capsys.readouterr().out)
    assert f"would take {slow} s instead of {fast} s" in page


# -- the gallery is what the code makes, and its formulas are true ---------------------------------------------------


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
