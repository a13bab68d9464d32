"""Which pipelines have a stream of their own, and from when on."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_avgpipe.capture.graph import CallGraph, changed_in_common
from lightning_avgpipe.engine.own_stream import OwnStream
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.utils.device import DevicePort


class PipelineStreams:
    """Gives parallel pipelines streams, if that was asked for and can be.

    Args:
        port: of their device.
        wanted: whether it was asked for.
    """

    def __init__(self, port: DevicePort, wanted: bool) -> None:
        self._port = port
        self._wanted = wanted
        self._waiting = False

    def can_be(self, graph: CallGraph) -> bool:
        """Whether pipelines that run this step get streams."""
        return self._wanted and not self._against(graph)

    def wait(self, pipelines: Sequence[Pipeline]) -> None:
        """These are new: they share one stream first, where a step makes what it keeps for all of them."""
        graph, several = pipelines[0].graph("training_step"), len(pipelines) > 1
        pipelines[0].stream, self._waiting = None, several and self.can_be(graph)
        if self._wanted and several and not self._waiting:
            rank_zero_info(f"pipeline_streams=True: pipelines take turns, since {self._against(graph)}")

    def give(self, pipelines: Sequence[Pipeline]) -> None:
        """These have run a step."""
        if self._waiting:
            self._waiting = False
            for pipeline in pipelines:
                pipeline.stream = OwnStream(self._port)

    def _against(self, graph: CallGraph) -> str:
        """What pipelines have in common has to be changed in one order."""
        if not self._port.runs_ahead:
            return f"{self._port.device.type} has no streams"
        common = changed_in_common(graph)
        return f"{graph.step} changes {common}" if common else ""
