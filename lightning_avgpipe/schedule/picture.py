"""Pictures of timelines, simulated or recorded, and their export as Chrome trace events.

In a picture, rows are devices, and time goes to the right::

    stage 0 |0|1|2|....|  0 |3|  1 |   a row: forwards, backwards (with the number of the micro-batch), idleness
              ~~ ~~ ~~                  under it the messages that it sends, values above gradients
    stage 1 ...

Actions of parallel pipelines are drawn lighter, the higher the number of the pipeline.

Drawing needs matplotlib, which is imported only when something is drawn; :func:`text` draws with letters instead.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule.kinds import KINDS
from lightning_avgpipe.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"transfer": "#e39b3c", "idle": "#ececec", "step": "#8c6bb1", "averaging": "#c0504d"}

_WIDTH_INCHES, _ROW_INCHES, _MARGIN_INCHES = 10.0, 0.6, 1.3
_DPI = 100
_FONT_POINTS = 8.0
# (top, height) as shares of a row's height: actions, messages forwards, messages backwards; the rest is space.
_ACTIONS, _FORWARD, _BACKWARD = (0.0, 0.62), (0.66, 0.12), (0.80, 0.12)
_LIGHTEST = 0.7  # share of white
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

_MICROSECONDS = 1e6


def colours() -> dict[str, str]:
    """Return the colours of everything that is drawn, by the names of kinds of actions, ``"transfer"`` and so on."""
    return {kind.name: kind.colour for kind in KINDS} | _COLOURS


def is_available() -> bool:
    """Return whether matplotlib is installed, so that pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Check that matplotlib is installed; raise ConfigurationError, which says how to install it, otherwise."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "drawing needs matplotlib, which is not installed; use pip install -e '.[pictures]' in the repository"
        ) from error


def draw(timeline: Timeline, title: str = "") -> Figure:
    """Draw a timeline.

    Args:
        timeline: simulated or recorded; its first action begins at the left edge.
        title: text above the picture.
    Returns:
        A matplotlib figure without a window, which does not have to be closed.
    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    return draw_together({title: timeline})


def draw_together(timelines: Mapping[str, Timeline], end_s: float | None = None) -> Figure:
    """Draw timelines below each other, with one common time axis.

    Args:
        timelines: title -> timeline, simulated or recorded; its first action begins at the left edge.
        end_s: number of seconds that are shown; None: up to the last end.
    Returns:
        A matplotlib figure without a window, which does not have to be closed.
    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    end_s = max(map(_end_s, timelines.values())) if end_s is None else end_s
    factor, unit = _unit(end_s)
    heights = [_MARGIN_INCHES / 2 + _ROW_INCHES * len(timeline.rows) for timeline in timelines.values()]
    height = sum(heights) + _MARGIN_INCHES / 2
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    parts = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    kinds: set[str] = set()
    for axes, (title, timeline) in zip(parts, timelines.items(), strict=True):
        axes.set_xlim(0, (end_s or 1.0) / factor)
        axes.set_ylim(len(timeline.rows), -0.08)
        axes.set_yticks([row + sum(_ACTIONS) / 2 for row in range(len(timeline.rows))], list(_labels(timeline)))
        axes.set_title(title, fontsize=10)
        axes.tick_params(left=False)
        axes.spines[["left", "right", "top"]].set_visible(False)
        kinds |= _paint(axes, timeline, end_s, factor)
    parts[-1].set_xlabel(f"time ({unit})")
    most = max(timeline.num_pipelines for timeline in timelines.values())
    _add_legend(parts[-1], kinds, most, heights[-1] + _MARGIN_INCHES / 2)
    figure.draw_without_rendering()  # computes the layout, which decides whether numbers fit
    figure.set_layout_engine("none")
    for axes, timeline in zip(parts, timelines.values(), strict=True):
        for row, device in enumerate(timeline.rows):
            _write_numbers(axes, timeline, device, row, factor, end_s)
    return figure


def _paint(axes: Axes, timeline: Timeline, end_s: float, factor: float) -> set[str]:
    """Draw the boxes of a timeline, and return the kinds of boxes that occur."""
    kinds = set()
    for row, device in enumerate(timeline.rows):
        for kind, lane, boxes, colour in _boxes(timeline, device, end_s):
            if not boxes:
                continue
            kinds.add(kind)
            ranges = [(begin / factor, (end - begin) / factor) for begin, end, _ in boxes]
            edges: Any = {"edgecolor": "white", "linewidth": 0.4} if lane is _ACTIONS and kind != "idle" else {}
            bars = axes.broken_barh(ranges, (row + lane[0], lane[1]), facecolors=colour, **edges)
            bars.set_gid(f"{kind} of row {row}")
    return kinds


def _add_legend(axes: Axes, kinds: Collection[str], num_pipelines: int, height: float) -> None:
    from matplotlib.patches import Patch

    legend = [Patch(color=colour, label=kind) for kind, colour in colours().items() if kind in kinds]
    if num_pipelines > 1:
        legend.append(Patch(alpha=0, label=f"{num_pipelines} pipelines, from dark to light"))
    axes.legend(
        handles=legend, ncols=len(legend), loc="upper center", bbox_to_anchor=(0.5, -0.84 / height), frameon=False
    )


def png(figure: Figure) -> bytes:
    """Return the picture as the contents of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=_DPI, format="png")
    return file.getvalue()


def pixels(figure: Figure) -> Any:
    """Return the picture as an array of shape ``(height, width, 3)`` with values 0..255."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


_Boxes = list[tuple[float, float, str]]


def _boxes(timeline: Timeline, device: int, end_s: float) -> Iterator[tuple[str, tuple[float, float], _Boxes, str]]:
    """Yield kind, lane, boxes (begin, end, label) and colour of a row, in the order in which they are painted."""
    zero, stages = timeline.begin_s, timeline.stages_of(device)
    spans = [s for s in timeline.spans if timeline.device_of(s.stage, s.action.micro_batch) == device]
    messages = [t for t in timeline.transfers if timeline.device_of(t.source, t.micro_batch) == device]
    yield "idle", _ACTIONS, [(0.0, end_s, "")], _COLOURS["idle"]
    prefix = "" if len(stages) == 1 else "{}."
    for kind in KINDS:
        for n in range(timeline.num_pipelines):
            found = [s for s in spans if (s.action.kind, s.pipeline) == (kind, n)]
            boxes = [
                (s.begin_s - zero, s.end_s - zero, prefix.format(s.stage) + str(s.action.micro_batch)) for s in found
            ]
            yield kind.name, _ACTIONS, boxes, _lighter(kind.colour, _LIGHTEST * n / timeline.num_pipelines)
    for other in ("step", "averaging"):
        activities = [a for a in timeline.activities if (a.device, a.kind) == (device, other)]
        yield other, _ACTIONS, [(a.begin_s - zero, a.end_s - zero, "") for a in activities], _COLOURS[other]
    for direction, lane in (("forward", _FORWARD), ("backward", _BACKWARD)):
        sent = [t for t in messages if t.direction == direction]
        boxes = [(t.begin_s - zero, t.arrival_s - zero, "") for t in sent if t.arrival_s > t.begin_s]
        yield "transfer", lane, boxes, _COLOURS["transfer"]


def _lighter(colour: str, share: float) -> str:
    """Return a colour mixed with a share of white, 0..1."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + share * (255 - c)):02x}" for c in channels)


def _write_numbers(axes: Axes, timeline: Timeline, device: int, row: int, factor: float, end_s: float) -> None:
    """Write the micro-batch into every action that is wide enough."""
    (left, _), (right, _) = axes.transData.transform([(0, 0), (1, 0)])
    pixels_per_unit = right - left
    for _, lane, boxes, _ in _boxes(timeline, device, 0.0):
        for begin, end, label in boxes if lane is _ACTIONS else ():
            needed = (len(label) + 0.5) * 0.62 * _FONT_POINTS * _DPI / 72
            if label and end <= end_s and (end - begin) / factor * pixels_per_unit >= needed:
                x, y = (begin + end) / 2 / factor, row + sum(_ACTIONS) / 2
                axes.text(x, y, label, ha="center", va="center", color="white", fontsize=_FONT_POINTS)


def _labels(timeline: Timeline) -> Iterator[str]:
    alone = timeline.replicas == tuple((k,) for k in range(timeline.num_stages))
    for device in timeline.rows:
        stages = timeline.stages_of(device)
        names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        yield names if alone else f"{names}\nrank {device}"


def _end_s(timeline: Timeline) -> float:
    ends = [span.end_s for span in timeline.spans]
    ends += [activity.end_s for activity in timeline.activities if activity.kind != "wait"]
    return max(ends, default=0.0) - timeline.begin_s


def _unit(seconds: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[0] if seconds == 0 else _UNITS[-1])


def text(timeline: Timeline, columns: int) -> str:
    """Draw a timeline as a row of letters for each process, with small letters for every other stage of a process.

    Args:
        timeline: timeline of one pipeline.
        columns: width of the rows in characters.
    """
    per_s = columns / timeline.iteration_s if timeline.iteration_s else 0.0
    rows = []
    for device in timeline.rows:
        stages = timeline.stages_of(device)
        cells = ["."] * columns
        for span in timeline.spans:
            if span.stage not in stages:
                continue
            symbol = span.action.kind.symbol
            letter = symbol.lower() if stages.index(span.stage) % 2 else symbol
            begin, end = ((s - timeline.begin_s) * per_s for s in (span.begin_s, span.end_s))
            for column in range(round(begin), round(end)):
                cells[column] = letter
        rows.append(f"{','.join(map(str, stages)):>7} | {''.join(cells).rstrip('.')}")
    return "\n".join(rows)


def chrome_trace(timeline: Timeline, **notes: Any) -> dict[str, Any]:
    """Return a timeline in the trace event format, with a process per device and a track per lane, link and activity.

    Args:
        timeline: simulated or recorded; its first action begins at 0.
        notes: numbers and strings that the viewer shows as information about the trace.
    Returns:
        A dict for ``json.dump``; times are in microseconds.
    Source: Trace Event Format, the Chromium project.
    """
    tracks: dict[tuple[int, str], int] = {}  # numbers of tracks by device and name; viewers sort by number
    events = []
    for device, track, name, category, timed, about in (*_actions(timeline), *_messages(timeline), *_others(timeline)):
        begin, end = ((at - timeline.begin_s) * _MICROSECONDS for at in (timed.begin_s, timed.end_s))
        number = tracks.setdefault((device, track), len(tracks) + 1)
        events.append({
            "name": name, "cat": category, "ph": "X", "pid": device, "tid": number, "ts": begin, "dur": end - begin,
            "args": about,
        })  # fmt: skip
    names = [_meta("thread_name", device, number, name=track) for (device, track), number in tracks.items()]
    for row, device in enumerate(timeline.rows):
        stages = ", ".join(map(str, timeline.stages_of(device)))
        names.append(_meta("process_name", device, 0, name=f"device {device} (stage {stages})"))
        names.append(_meta("process_sort_index", device, 0, sort_index=row))
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": notes}


# device, track, name, category, what has the times, and further information about an event
_Event = tuple[int, str, str, str, Any, dict[str, Any]]


def _track(what: str, stage: int, pipeline: int) -> str:
    return f"{what} {stage}" + (f" of pipeline {pipeline}" if pipeline else "")


def _actions(timeline: Timeline) -> Iterator[_Event]:
    for span in sorted(timeline.spans, key=lambda span: (span.stage, span.pipeline)):
        device = timeline.device_of(span.stage, span.action.micro_batch)
        about = {"stage": span.stage, "micro_batch": span.action.micro_batch, "pipeline": span.pipeline}
        about |= {"iteration": span.iteration} if span.iteration else {}
        track = _track("stage", span.stage, span.pipeline)
        yield device, track, str(span.action), span.action.kind.name, span, about


def _messages(timeline: Timeline) -> Iterator[_Event]:
    senders = {(s.action.kind.produces, s.stage, s.action.micro_batch, s.pipeline): s.action for s in timeline.spans}
    for transfer in timeline.transfers:
        action = senders[transfer.direction, transfer.source, transfer.micro_batch, transfer.pipeline]
        device = timeline.device_of(transfer.source, transfer.micro_batch)
        about = {
            "hop": transfer.hop,
            "micro_batch": transfer.micro_batch,
            "pipeline": transfer.pipeline,
            "arrival_us": (transfer.arrival_s - timeline.begin_s) * _MICROSECONDS,
        }
        track = _track(f"sends {transfer.direction} from stage", transfer.source, transfer.pipeline)
        yield device, track, f"{action} sent", "transfer", transfer, about


def _others(timeline: Timeline) -> Iterator[_Event]:
    for activity in timeline.activities:
        about = {"note": activity.note} if activity.note else {}
        yield activity.device, activity.kind, activity.kind, activity.kind, activity, about


def _meta(what: str, device: int, track: int, **about: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": device, "tid": track, "args": about}
