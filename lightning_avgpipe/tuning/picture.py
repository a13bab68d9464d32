"""Pictures of a search: time per batch and memory by M and N, with marks for settings that do not fit and the choice.

Drawing needs matplotlib, which is imported only when something is drawn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_avgpipe.schedule.picture import require_matplotlib
from lightning_avgpipe.tuning.search import Candidate, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL_INCHES, _MARGIN_INCHES = 0.55, 1.6
_DPI = 100
_GIB = 2**30

_Cells = list[list[Candidate | None]]  # a row for each N, with a column for each M


def draw(result: Result) -> Figure:
    """Draw two heat maps: predicted time per batch, and memory of the fullest stage relative to the limit.

    Each cell shows the best schedule for its M and N. Cells in which no schedule fits are hatched, and the choice has a
    star. ≥ marks times that are only a lower bound, which was enough to rule these settings out.

    Args:
        result: result of a search.
    Returns:
        A matplotlib figure without a window, which does not have to be closed.
    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    columns = sorted({candidate.setting.num_microbatches for candidate in result.candidates})
    rows = sorted({candidate.setting.num_pipelines for candidate in result.candidates})
    size = (2 * (_MARGIN_INCHES + _CELL_INCHES * len(columns)), _MARGIN_INCHES + _CELL_INCHES * len(rows))
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    cells = [[result.best(m, n) for m in columns] for n in rows]
    left, right = figure.subplots(1, 2)
    _draw_times(left, cells)
    _draw_memory(right, cells, result)
    chosen = result.choice.setting
    for axes in (left, right):
        axes.set_xticks(range(len(columns)), [str(m) for m in columns])
        axes.set_yticks(range(len(rows)), [str(n) for n in rows])
        axes.set_xlabel("micro-batches M")
        axes.set_ylabel("pipelines N")
        _hatch(axes, cells, result.limit)
        place = columns.index(chosen.num_microbatches), rows.index(chosen.num_pipelines)
        star = axes.scatter(*place, s=160, marker="*", color="white", edgecolors="black", zorder=4)
        star.set_gid("choice")
    return figure


def _draw_times(axes: Axes, cells: _Cells) -> None:
    times = [[math.nan if c is None else c.prediction.per_batch_s * 1e3 for c in row] for row in cells]
    shown = [t for row in times for t in row if not math.isnan(t)]
    _map(axes, times, min(shown), max(shown), "viridis_r", "predicted ms per batch")
    _mark_bounds(axes, cells)


def _draw_memory(axes: Axes, cells: _Cells, result: Result) -> None:
    unlimited = result.memory_limit is None
    unit = _GIB if unlimited else result.limit
    memory = [[math.nan if c is None else max(c.prediction.memory) / unit for c in row] for row in cells]
    top = max(m for row in memory for m in row if not math.isnan(m)) if unlimited else 1.0
    title = "GiB on the fullest stage" if unlimited else "memory / limit, fullest stage"
    _map(axes, memory, 0.0, top, "magma_r", title)


def _map(axes: Axes, values: list[list[float]], low: float, high: float, colours: str, title: str) -> None:
    image = axes.imshow(values, origin="lower", aspect="auto", cmap=colours, vmin=low, vmax=high)
    axes.figure.colorbar(image, ax=axes)
    axes.set_title(title, fontsize=10)


def _mark_bounds(axes: Axes, cells: _Cells) -> None:
    for row, found in enumerate(cells):
        for column, candidate in enumerate(found):
            if candidate is not None and candidate.prediction.at_least:
                axes.text(column, row, "≥", ha="center", va="center", color="grey")


def _hatch(axes: Axes, cells: _Cells, limit: float) -> None:
    from matplotlib.patches import Rectangle

    for row, found in enumerate(cells):
        for column, candidate in enumerate(found):
            if candidate is not None and not candidate.fits(limit):
                corner = (column - 0.5, row - 0.5)
                patch = Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor="grey", linewidth=0)
                patch.set_gid(f"M={candidate.setting.num_microbatches} N={candidate.setting.num_pipelines}")
                axes.add_patch(patch)
