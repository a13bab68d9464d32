"""The gallery of schedules: each one on four processes, drawn with letters, with its costs and its source.

``python docs/gallery.py docs/schedules.md`` writes the gallery into a page, between two marks;
``python docs/gallery.py docs/overview.png`` draws three schedules on slow links.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_avgpipe.schedule import picture
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.recipes import RECIPES, build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline

BEGIN, END = "<!-- the gallery begins -->", "<!-- the gallery ends -->"
_DEVICES, _MICROBATCHES = 4, 8
_SHOWN_S = 36.0  # of the overview


def gallery() -> str:
    """Return all schedules as Markdown. A forward and each half of a backward take a third of a stage's time."""
    sections = []
    for name, recipe in RECIPES.items():
        each = 1 if recipe.needs == "any" else 2
        num_stages = each * _DEVICES
        advance = 1 if name == "advance_forward" else 0
        schedule = build(name, num_stages, _MICROBATCHES, advance)
        timeline = simulate(schedule, StageCosts.uniform(num_stages, 1, 2))
        half = " of half a process" if each > recipe.lines else ""
        where = f" {recipe.where}" if recipe.where else ""
        note = f"{recipe.note}\n" if recipe.note else ""
        sections.append(
            f'### {recipe.title}: `"{name}"`\n\n'
            f"```\n{picture.text(timeline, round(timeline.iteration_s))}\n```\n\n"
            f"An iteration is longer than a process's work by `{recipe.idle}`{where}: here "
            f"{timeline.bubble_fraction:.1%} of the time is idle.\nStashed are `{recipe.stash}` micro-batches{half}.\n"
            f"{note}Source: {recipe.source}.\n"
        )
    return "\n".join(sections)


def written(page: str) -> str:
    """Return a page with the current gallery between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{gallery()}\n{END}{rest.partition(END)[2]}"


def overview() -> dict[str, Timeline]:
    """Return the timelines of three schedules by title: f = 1 s, b = 2 s, and transfers take as long as forwards."""
    costs, num_stages, num_microbatches, num_models = StageCosts.uniform(3, 1, 2, 1), 3, 4, 2
    ahead = build("advance_forward", num_stages, num_microbatches, 1)
    plain, advanced = simulate(build("1f1b", num_stages, num_microbatches), costs), simulate(ahead, costs)
    rolling = simulate([ahead] * num_models, costs, iterations=4)
    return {
        _title("1F1B", plain.iteration_s, plain.bubble_fraction): plain,
        _title("advance forward propagation", advanced.iteration_s, advanced.bubble_fraction): advanced,
        _title("two rolling models", rolling.steady_s / num_models, rolling.steady_bubble_fraction): rolling,
    }


def _title(what: str, batch_s: float, idle: float) -> str:
    return f"{what}: {batch_s:g} s a batch, {idle:.0%} idle"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if path.suffix == ".md":
        path.write_text(written(path.read_text()))
    else:
        picture.save(picture.draw_together(overview(), _SHOWN_S), path)
