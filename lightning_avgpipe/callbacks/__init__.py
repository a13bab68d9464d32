"""Callbacks for Lightning: the timeline of an iteration, and the tuner."""

from lightning_avgpipe.callbacks.timeline import PipelineTimeline
from lightning_avgpipe.callbacks.tuner import AvgPipeTuner

__all__ = ["AvgPipeTuner", "PipelineTimeline"]
