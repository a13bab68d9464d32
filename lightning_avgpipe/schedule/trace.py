"""Export of timelines as Chrome trace events, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_avgpipe.schedule.timeline import Timeline

_MICROSECONDS = 1e6
# The tracks in their order: those of each lane, then those of each device.
_OF_LANES = {"action": "stage", "forward": "sends forward from stage", "backward": "sends backward from stage"}
_OF_DEVICES = ("wait", "step", "averaging")


def chrome_trace(timeline: Timeline, **notes: Any) -> dict[str, Any]:
    """Return a timeline in the trace event format, with a process per device and a track per lane, link and activity.

    Args:
        timeline: simulated or recorded; its first action begins at 0.
        notes: numbers and strings that the viewer shows as information about the trace.
    Returns:
        A dict for ``json.dump``; times are in microseconds.
    Source: Trace Event Format, the Chromium project.
    """
    events = [*_tracks(timeline), *_actions(timeline), *_messages(timeline), *_activities(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}


def _tracks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events that give names and an order to processes and tracks."""
    for row, device in enumerate(timeline.rows):
        stages = ", ".join(map(str, timeline.stages_of(device)))
        yield _meta("process_name", device, 0, name=f"device {device} (stage {stages})")
        yield _meta("process_sort_index", device, 0, sort_index=row)
        for stage in timeline.stages_of(device):
            for n in range(timeline.num_pipelines):
                for kind, what in _OF_LANES.items():
                    name = f"{what} {stage}" + (f" of pipeline {n}" if n else "")
                    yield _meta("thread_name", device, _track(timeline, kind, stage, n), name=name)
        for activity in _OF_DEVICES:
            yield _meta("thread_name", device, _track(timeline, activity), name=activity)


def _actions(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for span in timeline.spans:
        device = timeline.device_of(span.stage, span.action.micro_batch)
        track = _track(timeline, "action", span.stage, span.pipeline)
        about = {"stage": span.stage, "micro_batch": span.action.micro_batch, "pipeline": span.pipeline}
        about |= {"iteration": span.iteration} if span.iteration else {}
        yield _event(timeline, str(span.action), span.action.kind.name, device, track, span, about)


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    senders = {(s.action.kind.produces, s.stage, s.action.micro_batch, s.pipeline): s.action for s in timeline.spans}
    for transfer in timeline.transfers:
        action = senders[transfer.direction, transfer.source, transfer.micro_batch, transfer.pipeline]
        device = timeline.device_of(transfer.source, transfer.micro_batch)
        track = _track(timeline, transfer.direction, transfer.source, transfer.pipeline)
        about = {
            "hop": transfer.hop,
            "micro_batch": transfer.micro_batch,
            "pipeline": transfer.pipeline,
            "arrival_us": (transfer.arrival_s - timeline.begin_s) * _MICROSECONDS,
        }
        yield _event(timeline, f"{action} sent", "transfer", device, track, transfer, about)


def _activities(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for activity in timeline.activities:
        track = _track(timeline, activity.kind)
        about = {"note": activity.note} if activity.note else {}
        yield _event(timeline, activity.kind, activity.kind, activity.device, track, activity, about)


def _track(timeline: Timeline, kind: str, stage: int = 0, pipeline: int = 0) -> int:
    """Return the number of a track within its process. Viewers sort by it: stages, links, activities."""
    lanes = timeline.num_stages * timeline.num_pipelines
    if kind in _OF_LANES:
        return 1 + list(_OF_LANES).index(kind) * lanes + stage * timeline.num_pipelines + pipeline
    return 1 + len(_OF_LANES) * lanes + _OF_DEVICES.index(kind)


def _event(
    timeline: Timeline, name: str, category: str, device: int, track: int, timed: Any, about: dict[str, Any]
) -> dict[str, Any]:
    begin, end = ((at - timeline.begin_s) * _MICROSECONDS for at in (timed.begin_s, timed.end_s))
    return {
        "name": name, "cat": category, "ph": "X", "pid": device, "tid": track, "ts": begin, "dur": end - begin,
        "args": about,
    }  # fmt: skip


def _meta(what: str, device: int, track: int, **about: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": device, "tid": track, "args": about}
