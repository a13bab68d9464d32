"""The gallery of schedules: each one on four processes, drawn with letters, with its costs and its source.

``python docs/gallery.py docs/schedules.md`` writes the gallery into a page, between two marks;
``python docs/gallery.py docs/overview.png`` draws three schedules on slow links.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_avgpipe.schedule import picture
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.recipes import RECIPES, build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline

BEGIN, END = "<!-- the gallery begins -->", "<!-- the gallery ends -->"
_DEVICES, _MICROBATCHES = 4, 8
_SHOWN_S = 36.0  # of the overview


@dataclass(frozen=True)
class Known:
    """What is known of a schedule with equal stages and links that take no time.

    Attributes:
        title: name in texts.
        idle: by how many seconds an iteration is longer than the work of one process in it. f and b are the
            seconds of one micro-batch on a process, with all of its v = K/D stages.
        stash: number of micro-batches that process d, or stage k, stashes at most; each stage of a process counts.
        source: paper that describes the schedule.
        note: further remarks; empty if there are none.
    """

    title: str
    idle: str
    stash: str
    source: str
    note: str = ""


_INTERLEAVED = "Narayanan et al., arXiv:2104.04473"
_ZERO_BUBBLE = "Zero Bubble Pipeline Parallelism, Qi et al., ICLR 2024, section 2"
_CONTROLLABLE = "Pipeline Parallelism with Controllable Memory, Qi et al., arXiv:2405.15362"
KNOWN = {
    "advance_forward": Known(
        "Advance forward propagation", "(K-1) (f+b)", "1 + (K-1-k) (1+h)",
        "AvgPipe, Chen et al., PPoPP 2023, section 4",
    ),
    "1f1b": Known("1F1B", "(K-1) (f+b)", "K-k", f"DAPPLE, Fan et al., PPoPP 2021; {_INTERLEAVED}"),
    "afab": Known(
        "All forwards, then all backwards", "(K-1) (f+b)", "M", "GPipe, Huang et al., arXiv:1811.06965"
    ),
    "interleaved": Known(
        "Interleaved 1F1B", "(D-1) (f+b)/v", "(v+1) D - 2 d - 1", f"{_INTERLEAVED}, section 2.2"
    ),
    "bfs": Known(
        "Looped breadth-first", "(D-1) (f+b)/v", "v M",
        "Breadth-First Pipeline Parallelism, Lamy-Poirier, arXiv:2211.05953",
    ),
    "broadcast": Known(
        "Broadcast forward", "(K-1) (f+b) + (M-1) f", "K-k", "as described in `systems/broadcast/schedule.py`",
        "Stages that build their graph late (`G`) stash one. On free links it is slower than 1F1B. If a transfer takes "
        "as long as a forward, it is 1.07 times as fast with 12 stages.",
    ),
    "zb_h1": Known("ZB-H1", "(K-1) (f+i-w)", "K", _ZERO_BUBBLE),
    "zb_h2": Known("ZB-H2", "(K-1) (f+i-w)", "2 K - 1", _ZERO_BUBBLE),
    # the idle times of these two are approximate, for f = i = w
    "zbv": Known("ZB-V", "(D-1) f/2", "2 D", _CONTROLLABLE),
    "dualpipev": Known("DualPipeV", "D f/2", "2 D + 1", "DeepSeek-V3, arXiv:2412.19437: DualPipe, cut in half"),
}  # fmt: skip


def gallery() -> str:
    """Return all schedules as Markdown. A forward and each half of a backward take a third of a stage's time."""
    sections = []
    for name, recipe in RECIPES.items():
        known, each = KNOWN[name], 1 if recipe.needs == "any" else 2
        num_stages = each * _DEVICES
        advance = 1 if name == "advance_forward" else 0
        schedule = build(name, num_stages, _MICROBATCHES, advance)
        timeline = simulate(schedule, StageCosts.uniform(num_stages, 1, 2))
        counted = ", counted once for each of its stages" if each > 1 else ""
        note = f"{known.note}\n" if known.note else ""
        sections.append(
            f'### {known.title}: `"{name}"`\n\n'
            f"```\n{picture.text(timeline, round(timeline.iteration_s))}\n```\n\n"
            f"An iteration is longer than a process's work by `{known.idle}`: here "
            f"{timeline.bubble_fraction:.1%} of the time is idle.\n"
            f"A process stashes `{known.stash}` micro-batches{counted}.\n"
            f"{note}Source: {known.source}.\n"
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
        _title("1F1B", plain): plain,
        _title("advance forward propagation", advanced): advanced,
        _title("two rolling models", rolling, num_models): rolling,
    }


def _title(what: str, timeline: Timeline, num_models: int = 1) -> str:
    return f"{what}: {timeline.steady_s / num_models:g} s a batch, {timeline.bubble_fraction:.0%} idle"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if path.suffix == ".md":
        path.write_text(written(path.read_text()))
    else:
        picture.draw_together(overview(), _SHOWN_S).savefig(path)
