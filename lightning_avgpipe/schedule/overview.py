"""The overview picture: 1F1B, advance forward propagation and two rolling models below each other, on slow links.

``python -m lightning_avgpipe.schedule.overview docs/overview.png`` draws it. A transfer takes as long as a forward.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_avgpipe.schedule import picture
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.recipes import build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline

_STAGES, _MICROBATCHES, _MODELS = 3, 4, 2
_SHOWN_S = 36.0


def overview() -> dict[str, Timeline]:
    """Return simulated timelines by title, with forwards of 1 s, backwards of 2 s and transfers of 1 s."""
    costs = StageCosts.uniform(_STAGES, 1, 2, 1)
    ahead = build("advance_forward", _STAGES, _MICROBATCHES, 1)
    plain, advanced = simulate(build("1f1b", _STAGES, _MICROBATCHES), costs), simulate(ahead, costs)
    rolling = simulate([ahead] * _MODELS, costs, iterations=4)
    return {
        _title("1F1B", plain.iteration_s, plain.bubble_fraction): plain,
        _title("advance forward propagation", advanced.iteration_s, advanced.bubble_fraction): advanced,
        _title("two rolling models", rolling.steady_s / _MODELS, rolling.steady_bubble_fraction): rolling,
    }


def _title(what: str, batch_s: float, idle: float) -> str:
    return f"{what}: {batch_s:g} s a batch, {idle:.0%} idle"


if __name__ == "__main__":
    picture.save(picture.draw_together(overview(), _SHOWN_S), Path(sys.argv[1]))
