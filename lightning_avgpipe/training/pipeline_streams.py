"""Pipeline streams: which pipelines have a stream of their own, and from which step on."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_avgpipe.capture.graph import CallGraph, changed_in_common
from lightning_avgpipe.engine.execution import OwnStream
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.utils.device import DevicePort
from lightning_avgpipe.utils.lightning import rank_zero_info


class PipelineStreams:
    """The streams of parallel pipelines, if the user asked for them and the step allows them.

    Args:
        port: port of the pipelines' device.
        wanted: whether the user asked for streams.
    """

    def __init__(self, port: DevicePort, wanted: bool) -> None:
        self._port = port
        self._wanted = wanted
        self._waiting = False

    def can_be(self, graph: CallGraph) -> bool:
        """Return whether pipelines that run this step get streams."""
        return self._wanted and not self._against(graph)

    def wait(self, pipelines: Sequence[Pipeline]) -> None:
        """Let new pipelines share one stream for their first step, in which a step may make objects that it keeps."""
        graph, several = pipelines[0].graph("training_step"), len(pipelines) > 1
        pipelines[0].stream, self._waiting = None, several and self.can_be(graph)
        if self._wanted and several and not self._waiting:
            rank_zero_info(f"Averaging(streams=True): pipelines take turns, since {self._against(graph)}")

    def give(self, pipelines: Sequence[Pipeline]) -> None:
        """Give pipelines streams of their own, once they have run a step."""
        if self._waiting:
            self._waiting = False
            for pipeline in pipelines:
                pipeline.stream = OwnStream(self._port)

    def _against(self, graph: CallGraph) -> str:
        """Return why pipelines cannot have streams, or an empty string: shared objects must be changed in one order."""
        if not self._port.runs_ahead:
            return f"{self._port.device.type} has no streams"
        common = changed_in_common(graph)
        return f"{graph.step} changes {common}" if common else ""
